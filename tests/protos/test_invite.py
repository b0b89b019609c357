"""Invites survive being pasted, and a broken one says which part is broken."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_protos.errors import UsageError
from starlings_protos.invite import (
    Address,
    Invite,
    InviteError,
    format_invite,
    invite_text,
    parse_address,
    parse_invite,
    spoken_duration,
    spoken_time,
)

PIN = "A" * 20 + "-_" + "b" * 21
SECRET = "s3cr3tS3CR3T-_" + "0" * 18
GOOD = f"starlings://train.example.org:7701,10.0.0.7:7701/my-job.2/{PIN}/0123456789.{SECRET}/1900000000"

_base64url = st.text("ABCXYZabcxyz0189-_", min_size=1)
_hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,5}){0,3}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
_addresses = st.builds(Address, _hosts, st.integers(1, 65535))
_invites = st.builds(
    Invite,
    addresses=st.lists(
        st.builds(Address, _hosts, st.integers(1, 65535)), min_size=1, max_size=4, unique=True
    ).map(tuple),
    job=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True),
    pin=st.text("ABCXYZabcxyz0189-_", min_size=43, max_size=43),
    token_id=st.text("0123456789abcdef", min_size=10, max_size=10),
    secret=st.text("ABCXYZabcxyz0189-_", min_size=32, max_size=32),
    expires_s=st.integers(10**9, 10**10 - 1),
)


@given(_invites)
def test_round_trip_without_characters_that_a_shell_treats_specially(invite: Invite):
    text = format_invite(invite)
    assert parse_invite(text) == invite
    assert re.fullmatch(r"[A-Za-z0-9.:,/_-]+", text)


def test_parts():
    invite = parse_invite(GOOD)
    assert invite.addresses == (Address("train.example.org", 7701), Address("10.0.0.7", 7701))
    assert (invite.job, invite.pin, invite.token_id, invite.secret) == ("my-job.2", PIN, "0123456789", SECRET)
    assert invite.expires_s == 1_900_000_000


@pytest.mark.parametrize("wrapping", ["  {}\n", "'{}'", '"{}"', "<{}>", "`{}`"])
def test_space_and_quotes_around_it_do_not_matter(wrapping: str):
    assert parse_invite(wrapping.format(GOOD)) == parse_invite(GOOD)


def test_the_secret_is_in_no_repr():
    assert SECRET not in repr(parse_invite(GOOD))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("https://train.example.org", "begins with starlings://"),
        (GOOD + "x" * 3000, "at most 2048"),
        (GOOD.replace("my-job", "my\njob"), "space or line break"),
        (GOOD.replace("my-job", "my$job"), r"character '\$' at position"),
        (GOOD[:60], "five parts"),
        (GOOD + "/more", "five parts"),
        (GOOD.replace("/my-job.2/", "//"), "job name"),
        (GOOD.replace(PIN, PIN[:-1]), "pin is not 43"),
        (GOOD.replace("0123456789.", "0123456789"), "no dot"),
        (GOOD.replace("0123456789.", "012345678."), "token's id"),
        (GOOD.replace(SECRET, SECRET[1:]), "token's secret"),
        (GOOD[:-3], "cut off at the end"),
        (GOOD.replace(":7701,", ","), "no port"),
        (GOOD.replace(":7701,", ":0,"), "no port"),
        (GOOD.replace(":7701,", ":99999,"), "no port"),
        (GOOD.replace("train.example.org", ""), "no host name"),
        (
            GOOD.replace("train.example.org:7701", ",".join(f"h{i}:1" for i in range(9))),
            "at most 8 addresses",
        ),
    ],
)
def test_errors_say_what_is_wrong_and_never_the_secret(text: str, says: str):
    with pytest.raises(InviteError, match=says) as failed:
        parse_invite(text)
    assert failed.value.exit_code == 4
    assert SECRET[:12] not in str(failed.value)


def test_random_strings_never_crash():
    rng = random.Random(3)
    for _ in range(10_000):
        text = "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x3000)))) for _ in range(rng.randrange(80))
        )
        with pytest.raises(InviteError):
            parse_invite(rng.choice(("", "starlings://")) + text)


def test_mutated_invites_parse_or_are_refused():
    rng = random.Random(4)
    for _ in range(10_000):
        letters = list(GOOD)
        for _ in range(rng.randrange(1, 4)):
            position = rng.randrange(len(letters))
            if rng.random() < 0.5:
                del letters[position]
            else:
                letters[position] = chr(rng.randrange(1, 256))
        try:
            invite = parse_invite("".join(letters))
        except InviteError:
            continue
        assert parse_invite(str(invite)) == invite


@pytest.mark.parametrize(
    ("text", "host"),
    [("[::1]:80", "::1"), ("::1:80", "::1"), ("a.b:80", "a.b"), ("2001:db8::7:80", "2001:db8::7")],
)
def test_addresses(text: str, host: str):
    assert parse_address(text) == Address(host, 80)


@pytest.mark.parametrize(
    "text", ["", ":", "a", "a:", ":80", "a:-1", "a:80x", "a b:80", "a:\u0661", "a:000080"]
)
def test_bad_addresses(text: str):
    with pytest.raises(ValueError, match=r"no port|no host"):
        parse_address(text)


def test_where_an_invite_comes_from(tmp_path: Path):
    file = tmp_path / "invite"
    file.write_text(GOOD + "\n")
    environ = {"STARLINGS_INVITE": "from environment"}
    assert invite_text("given", environ=environ) == "given"
    assert invite_text("-", environ=environ, stdin=io.StringIO(GOOD)) == GOOD
    assert invite_text(None, file, environ=environ).strip() == GOOD
    assert invite_text(None, environ=environ) == "from environment"


def test_no_invite_two_invites_and_an_unreadable_file(tmp_path: Path):
    with pytest.raises(UsageError, match="STARLINGS_INVITE"):
        invite_text(None, environ={})
    with pytest.raises(UsageError, match="not both"):
        invite_text("a", tmp_path, environ={})
    with pytest.raises(UsageError, match="cannot be read"):
        invite_text(None, tmp_path / "absent", environ={})


def test_spoken():
    assert spoken_time(0) == "1970-01-01 00:00:00 UTC"
    assert [spoken_duration(s) for s in (-3, 600, 19200, 7200, 300_000)] == [
        "3 s",
        "10 min",
        "5 h 20 min",
        "2 h",
        "3 days",
    ]
