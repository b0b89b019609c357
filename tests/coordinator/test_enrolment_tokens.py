"""The token table and the rates are pure: verdicts, folds, limits; and the journal keeps what was recorded."""

from __future__ import annotations

import os
import random
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_coordinator import tokens
from starlings_coordinator.rates import Bucket, Rate, SourceLimiter, Throttle, refilled, taken, wait_s
from starlings_coordinator.token_journal import FileJournal, decode, encode
from starlings_coordinator.tokens import (
    Denied,
    Token,
    TokenCreated,
    TokenRedeemed,
    TokenRevoked,
    TokenTable,
    WorkerRevoked,
    find,
    fold,
    hash_secret,
    open_token,
    redeem,
    revocation,
)
from starlings_protos.errors import UsageError
from starlings_protos.messages import Refusal

NOW = 1_800_000_000.0
SECRET = "s" * 32
CREATED = TokenCreated("0123456789", hash_secret(SECRET), "worker", NOW, NOW + 3600, 2)


def _open(table: TokenTable, **changed) -> Token:
    found = open_token(table, **({"token_id": "0123456789", "secret": SECRET, "now_s": NOW} | changed))
    assert isinstance(found, Token)
    return found


def _denied(verdict: object) -> Refusal:
    assert isinstance(verdict, Denied)
    assert verdict.message.endswith((".", ")."))
    return verdict.refusal


def test_a_good_token_opens_and_is_used_by_two():
    table = fold([CREATED])
    for worker in ("w1", "w2"):
        record = redeem(table, _open(table), worker)
        assert record == TokenRedeemed("0123456789", worker)
        table = tokens.apply(table, record)
    assert _denied(redeem(table, _open(table), "w3")) is Refusal.INVITE_USED_UP
    # Who is in may come again.
    assert redeem(table, _open(table), "w1") == TokenRedeemed("0123456789", "w1")


def test_no_limit():
    from dataclasses import replace

    table = fold([replace(CREATED, uses=0), *(TokenRedeemed("0123456789", f"w{i}") for i in range(500))])
    assert isinstance(redeem(table, _open(table), "another"), TokenRedeemed)


def test_each_way_to_be_wrong():
    table = fold([CREATED])
    assert _denied(open_token(table, "0123456789", "t" * 32, NOW)) is Refusal.INVITE_WRONG
    assert _denied(open_token(table, "9999999999", SECRET, NOW)) is Refusal.INVITE_WRONG
    assert _denied(open_token(table, "", "", NOW)) is Refusal.INVITE_WRONG
    assert _denied(open_token(table, "0123456789", "", NOW)) is Refusal.INVITE_WRONG
    assert _denied(open_token(table, "0123456789", SECRET, NOW + 3600)) is Refusal.INVITE_EXPIRED
    revoked = tokens.apply(table, TokenRevoked("0123456789"))
    assert _denied(open_token(revoked, "0123456789", SECRET, NOW)) is Refusal.REVOKED
    # An id that nobody gave out is as wrong as a secret: no empty secret opens it.
    assert _denied(open_token(table, "9999999999", "", NOW)) is Refusal.INVITE_WRONG


def test_who_does_not_know_the_secret_learns_nothing_more():
    table = fold([CREATED, TokenRevoked("0123456789")])
    answers = {
        str(open_token(table, token_id, "x" * 32, NOW + 9999)) for token_id in ("0123456789", "nothing")
    }
    assert len(answers) == 1


def test_the_message_of_an_expired_one_says_when():
    verdict = open_token(fold([CREATED]), "0123456789", SECRET, NOW + 3 * 3600)
    assert isinstance(verdict, Denied)
    assert "expired at 2027-01-15 09:00:00 UTC (2 h ago)" in verdict.message


def test_revoking_a_worker_outlives_its_token():
    table = fold([CREATED, TokenRedeemed("0123456789", "w1")])
    token = table.tokens["0123456789"]
    records = revocation(table, token, workers=True)
    assert records == (TokenRevoked("0123456789"), WorkerRevoked("w1"))
    table = fold([CREATED, TokenRedeemed("0123456789", "w1"), *records])
    assert table.revoked_workers == {"w1"}
    assert revocation(table, table.tokens["0123456789"], workers=True) == ()
    other = TokenCreated("aaaaaaaaaa", hash_secret(SECRET), "worker", NOW, NOW + 60, 0)
    table = tokens.apply(table, other)
    assert _denied(redeem(table, _open(table, token_id="aaaaaaaaaa"), "w1")) is Refusal.REVOKED


def test_records_are_idempotent_and_unknown_tokens_ignored():
    once = fold([CREATED, TokenRedeemed("0123456789", "w1"), TokenRevoked("0123456789"), WorkerRevoked("w1")])
    records = [CREATED, TokenRedeemed("0123456789", "w1"), TokenRevoked("0123456789"), WorkerRevoked("w1")]
    assert fold(records * 2) == once
    assert fold([TokenRedeemed("x", "w"), TokenRevoked("x")]) == TokenTable()


def test_a_token_is_found_by_its_beginning():
    other = TokenCreated("0123aaaaaa", "", "worker", NOW, NOW, 0)
    table = fold([CREATED, other])
    assert find(table, "01234") == table.tokens["0123456789"]
    assert find(table, "0123") is None  # two
    assert find(table, "012") is None  # too short
    assert find(table, "0123aaaaaa") == table.tokens["0123aaaaaa"]


# ------------------------------------------------------------------ rates


def test_a_burst_then_the_rate():
    rate = Rate(burst=3, per_s=0.5)
    bucket = Bucket(3, 0.0)
    for _ in range(3):
        assert wait_s(bucket, rate, 0.0) == 0
        bucket = taken(bucket, rate, 0.0)
    assert wait_s(bucket, rate, 0.0) == 2.0
    assert wait_s(bucket, rate, 2.0) == 0
    assert refilled(bucket, rate, 1e9).level == 3


@given(st.lists(st.floats(0, 5), max_size=60), st.floats(1, 5), st.floats(0.1, 5))
def test_never_more_than_burst_and_rate_allow(gaps: list[float], burst: float, per_s: float):
    limiter, now, allowed = SourceLimiter(Rate(burst, per_s)), 0.0, 0
    for gap in gaps:
        now += gap
        if limiter.wait_s("s", now) == 0:
            limiter.take("s", now)
            allowed += 1
    assert allowed <= burst + now * per_s + 1e-6


def test_a_clock_that_steps_back_refills_nothing():
    rate = Rate(1, 1)
    bucket = taken(Bucket(1, 100.0), rate, 100.0)
    assert wait_s(bucket, rate, 50.0) == 1.0
    assert refilled(bucket, rate, 50.0).at_s == 100.0


def test_sources_do_not_disturb_each_other_and_memory_is_bounded():
    limiter = SourceLimiter(Rate(1, 0.001), source_limit=100)
    limiter.take("a", 0.0)
    assert limiter.wait_s("a", 0.0) > 0
    assert limiter.wait_s("b", 0.0) == 0
    for i in range(10_000):
        limiter.take(str(i), 0.0)
    assert len(limiter) == 100
    with pytest.raises(ValueError, match="burst"):
        Rate(0, 1)


# ------------------------------------------------------------------ journal

RECORDS = (CREATED, TokenRedeemed("0123456789", "w1"), TokenRevoked("0123456789"), WorkerRevoked("w1"))


def test_records_come_back(tmp_path: Path):
    journal = FileJournal(tmp_path / "ca" / "tokens.jsonl")
    assert journal.read() == ()
    journal.append(RECORDS[:1])
    journal.append(RECORDS[1:])
    journal.append(())
    assert FileJournal(tmp_path / "ca" / "tokens.jsonl").read() == RECORDS
    if sys.platform != "win32":
        assert stat.S_IMODE((tmp_path / "ca" / "tokens.jsonl").stat().st_mode) == 0o600
    assert SECRET not in (tmp_path / "ca" / "tokens.jsonl").read_text()


def test_a_last_line_that_a_crash_cut_off_is_dropped(tmp_path: Path):
    path = tmp_path / "tokens.jsonl"
    FileJournal(path).append(RECORDS)
    whole = path.read_bytes()
    for cut in range(len(whole) - len(encode(RECORDS[-1])) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert FileJournal(path).read() == RECORDS[:-1]
        FileJournal(path).append(RECORDS[-1:])
        assert FileJournal(path).read() == RECORDS


def test_damage_elsewhere_is_told(tmp_path: Path):
    path = tmp_path / "tokens.jsonl"
    FileJournal(path).append(RECORDS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{}\n" + lines[1])
    with pytest.raises(UsageError, match="line 2"):
        FileJournal(path).read()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tokens.jsonl"
    FileJournal(path).append(RECORDS[:1])
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    with pytest.raises(OSError, match="No space"):
        FileJournal(path).append(RECORDS[1:2])
    monkeypatch.undo()
    FileJournal(path).append(RECORDS[2:3])
    assert FileJournal(path).read() == (RECORDS[0], RECORDS[2])


def test_random_lines_never_crash():
    rng = random.Random(11)
    seed = encode(CREATED)
    for turn in range(10_000):
        line = bytearray(seed) if turn % 2 else bytearray(rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(1, 5)):
            if line:
                line[rng.randrange(len(line))] = rng.randrange(256)
        try:
            record = decode(bytes(line))
        except ValueError:
            continue
        assert isinstance(record, TokenCreated)


def test_a_throttled_source_keeps_its_rate_and_is_never_refused():
    throttle, now_s = Throttle(Rate(burst=10, per_s=5), 0.0), 0.0
    for _ in range(100):
        now_s += throttle.take(1, now_s)
    # Ten at once, ninety at five a second.
    assert now_s == pytest.approx(18.0)
    # More than a burst at once waits for no more than a whole one.
    assert throttle.take(1e9, now_s) == pytest.approx(2.0)
