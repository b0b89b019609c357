"""The authority without a network: what it hands out, keeps, and refuses; a restart changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from starlings_coordinator.enrolment import EnrolmentAuthority, EnrolmentLimits
from starlings_coordinator.rates import Rate
from starlings_coordinator.token_journal import MemoryJournal
from starlings_protos import control_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import RefusedError, UsageError
from starlings_protos.identity import (
    COORDINATOR,
    KEEPER,
    OWNER,
    Identity,
    PeerIdentity,
    Role,
    identity_of_certificate,
    key_id,
    key_to_pem,
    make_csr,
    new_key,
    read_certificate,
    validity,
)
from starlings_protos.invite import parse_invite
from starlings_protos.messages import Refusal
from starlings_protos.renewal import make_renewal

DAY = 86400.0


class _Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def authority(tmp_path: Path, clock: _Clock) -> EnrolmentAuthority:
    return _authority(tmp_path, clock)


def _authority(directory: Path, clock: _Clock, **options) -> EnrolmentAuthority:
    made = EnrolmentAuthority(directory, "job", wall=clock, monotonic=clock, **options)
    made.serve_at(["train.example.org:7701"], ["train.example.org:7700"])
    return made


def _request(invite_text: str, key, clock: _Clock, **changed) -> control_pb2.EnrolRequest:
    invite = parse_invite(invite_text)
    fields = {
        "token_id": invite.token_id,
        "token_secret": invite.secret,
        "csr_pem": make_csr(key),
        "job": invite.job,
        "protocol_min": 1,
        "protocol_max": 1,
        "wall_time_s": clock.now,
    }
    return control_pb2.EnrolRequest(**(fields | changed))


def _refusal(call) -> Refusal:
    with pytest.raises(RefusedError) as refused:
        call()
    return refused.value.refusal


def _identity(reply: control_pb2.EnrolReply, key) -> Identity:
    return Identity.from_pem(key_to_pem(key), reply.certificate_pem, reply.ca_pem)


def test_invites(authority: EnrolmentAuthority, clock: _Clock):
    made = authority.create_invite(uses=3)
    invite = parse_invite(made.invite)
    assert (invite.job, invite.pin, invite.expires_s) == ("job", authority.ca.pin, int(clock.now + DAY))
    assert (made.token_id, made.uses, made.used, made.role, made.revoked) == (
        invite.token_id,
        3,
        0,
        "worker",
        False,
    )
    (listed,) = authority.list_invites().invites
    assert listed.invite == ""
    assert listed.token_id == invite.token_id


@pytest.mark.parametrize(
    "arguments",
    [
        {"lifetime_s": -1},
        {"lifetime_s": math.nan},
        {"lifetime_s": math.inf},
        {"lifetime_s": 1e9},
        {"lifetime_s": 0.01},
        {"uses": -1},
        {"uses": 10**9},
        {"role": "owner"},
        {"role": "coordinator"},
    ],
)
def test_invites_that_cannot_be(authority: EnrolmentAuthority, arguments: dict):
    assert _refusal(lambda: authority.create_invite(**arguments)) is Refusal.MALFORMED
    assert not authority.list_invites().invites


def test_no_invite_before_it_listens(tmp_path: Path, clock: _Clock):
    authority = EnrolmentAuthority(tmp_path, "job", wall=clock)
    assert _refusal(authority.create_invite) is Refusal.BUSY
    with pytest.raises(ValueError, match="needed"):
        authority.serve_at([], ["a:1"])
    with pytest.raises(ValueError, match="no port"):
        authority.serve_at(["a"], ["a:1"])


def test_enrolment_names_the_id_of_the_key(authority: EnrolmentAuthority, clock: _Clock):
    key = new_key()
    reply = authority.enrol(_request(authority.create_invite().invite, key, clock), "192.0.2.1")
    assert reply.worker_id == key_id(key.public_key())
    assert identity_of_certificate(reply.certificate_pem) == PeerIdentity(reply.worker_id, Role.WORKER)
    assert validity(read_certificate(reply.certificate_pem)) == (clock.now - 3600, clock.now + 7 * DAY)
    assert (reply.not_after_s, reply.wall_time_s) == (clock.now + 7 * DAY, clock.now)
    assert list(reply.control_addresses) == ["train.example.org:7700"]


def test_a_restart_forgets_nothing(tmp_path: Path, clock: _Clock):
    first = _authority(tmp_path, clock)
    invite = first.create_invite(uses=1).invite
    key, other = new_key(), new_key()
    first.enrol(_request(invite, key, clock), "")
    shut_out = first.create_invite().invite
    worker_id = first.enrol(_request(shut_out, other, clock), "").worker_id
    first.revoke_invite(parse_invite(shut_out).token_id, workers=True)

    again = _authority(tmp_path, clock)
    assert again.ca.pin == first.ca.pin
    assert again.assignment_key.private_numbers() == first.assignment_key.private_numbers()
    assert again.list_invites() == first.list_invites()
    assert again.revoked_workers == {worker_id}
    assert again.is_revoked(worker_id)
    assert again.enrol(_request(invite, key, clock), "").worker_id == key_id(key.public_key())
    assert _refusal(lambda: again.enrol(_request(invite, new_key(), clock), "")) is Refusal.INVITE_USED_UP


def test_what_is_not_recorded_does_not_count(tmp_path: Path, clock: _Clock):
    class Full(MemoryJournal):
        full = False

        def append(self, records):
            if self.full:
                raise OSError(28, "No space left on device")
            super().append(records)

    journal = Full()
    authority = _authority(tmp_path, clock, journal=journal)
    invite = authority.create_invite().invite
    journal.full = True
    for call in (
        authority.create_invite,
        lambda: authority.enrol(_request(invite, new_key(), clock), ""),
        lambda: authority.revoke_invite(parse_invite(invite).token_id),
    ):
        with pytest.raises(OSError, match="No space"):
            call()
    (listed,) = authority.list_invites().invites
    assert (listed.used, listed.revoked) == (0, False)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"token_secret": "x" * 32}, Refusal.INVITE_WRONG),
        ({"token_secret": "\ud7ff" * 5000}, Refusal.INVITE_WRONG),
        ({"token_id": "x"}, Refusal.INVITE_WRONG),
        ({"job": "x" * 5000}, Refusal.JOB_MISMATCH),
        ({"protocol_max": 0, "protocol_min": 0}, Refusal.VERSION),
        ({"protocol_max": 99, "protocol_min": 98}, Refusal.VERSION),
        ({"wall_time_s": 0.0}, Refusal.CLOCK),
        ({"wall_time_s": math.nan}, Refusal.MALFORMED),
        ({"wall_time_s": math.inf}, Refusal.MALFORMED),
        ({"csr_pem": b""}, Refusal.MALFORMED),
        ({"csr_pem": b"x" * 60_000}, Refusal.MALFORMED),
    ],
)
def test_requests_that_do_not_hold(authority, clock, changed: dict, refusal: Refusal):
    request = _request(authority.create_invite(uses=1).invite, new_key(), clock, **changed)
    assert _refusal(lambda: authority.enrol(request, "192.0.2.1")) is refusal
    assert authority.list_invites().invites[0].used == 0


def test_a_flood_of_refusals_does_not_fill_the_event_log(tmp_path: Path, clock: _Clock):
    told: list[str] = []
    authority = _authority(
        tmp_path,
        clock,
        observe=lambda kind, text: told.append(kind),
        limits=EnrolmentLimits(guesses=Rate(1000, 1), joins=Rate(1000, 1)),
    )
    invite = authority.create_invite().invite
    request = _request(invite, new_key(), clock, token_secret="y" * 32)
    for _ in range(200):
        _refusal(lambda: authority.enrol(request, "192.0.2.1"))
    assert told == ["refused"] * 5


def test_one_ipv6_network_is_one_source(tmp_path: Path, clock: _Clock):
    authority = _authority(tmp_path, clock, limits=EnrolmentLimits(guesses=Rate(2, 0.001)))
    request = _request(authority.create_invite().invite, new_key(), clock, token_secret="y" * 32)
    answers = [_refusal(lambda i=i: authority.enrol(request, f"2001:db8::{i}")) for i in range(1, 4)]
    assert answers == [Refusal.INVITE_WRONG, Refusal.INVITE_WRONG, Refusal.LIMIT]
    assert _refusal(lambda: authority.enrol(request, "2001:db8:0:1::1")) is Refusal.INVITE_WRONG


def test_guessing_from_elsewhere_keeps_nobody_out(tmp_path: Path, clock: _Clock):
    authority = _authority(tmp_path, clock, limits=EnrolmentLimits(guesses=Rate(2, 0.001)))
    invite = authority.create_invite().invite
    for i in range(50):
        request = _request(invite, new_key(), clock, token_secret="y" * 32)
        _refusal(lambda request=request, i=i: authority.enrol(request, f"192.0.2.{i % 5}"))
    assert authority.enrol(_request(invite, new_key(), clock), "198.51.100.1").worker_id


# ------------------------------------------------------------------ renewal


def _joined(authority: EnrolmentAuthority, clock: _Clock) -> Identity:
    key = new_key()
    return _identity(authority.enrol(_request(authority.create_invite().invite, key, clock), ""), key)


def test_renewal_of_an_expired_certificate(authority, clock):
    identity = _joined(authority, clock)
    clock.now += 40 * DAY
    reply = authority.renew(make_renewal(identity, clock.now), "")
    assert reply.worker_id == identity.id
    assert reply.not_after_s == clock.now + 7 * DAY


def test_renewals_that_do_not_hold(authority, clock):
    identity = _joined(authority, clock)
    good = make_renewal(identity, clock.now)

    def changed(**fields) -> control_pb2.RenewRequest:
        request = control_pb2.RenewRequest()
        request.CopyFrom(good)
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    thief, stranger = new_key(), CertificateAuthority.create("job", clock.now)
    foreign = stranger.issue_identity(KEEPER, clock.now)
    for request in (
        changed(proof=b""),
        changed(proof=b"x" * 5000),
        changed(csr_pem=make_csr(thief)),
        changed(wall_time_s=clock.now + 1),  # the proof is over another moment
        changed(certificate_pem=b"rubbish"),
        changed(certificate_pem=stranger.certificate_pem),
        changed(certificate_pem=authority.ca.certificate_pem),
        make_renewal(foreign, clock.now),
        control_pb2.RenewRequest(),
    ):
        assert _refusal(lambda request=request: authority.renew(request, "")) is Refusal.NOT_YOU
    assert _refusal(lambda: authority.renew(make_renewal(identity, clock.now - 9000), "")) is Refusal.CLOCK


def test_the_owners_certificates_are_not_renewed_over_the_network(authority, clock):
    for peer in (OWNER, KEEPER, COORDINATOR):
        request = make_renewal(authority.identity(peer), clock.now)
        assert _refusal(lambda request=request: authority.renew(request, "")) is Refusal.NOT_YOU


def test_revocation(authority, clock):
    identity = _joined(authority, clock)
    token_id = authority.list_invites().invites[0].token_id
    assert authority.refuse(identity.peer) is None
    assert list(authority.revoke_invite(token_id).worker_ids) == []
    assert not authority.is_revoked(identity.id)  # the invite alone
    assert list(authority.revoke_invite(token_id[:6], workers=True).worker_ids) == [identity.id]
    reason = authority.refuse(identity.peer)
    assert reason is not None
    assert reason.refusal is Refusal.REVOKED
    assert _refusal(lambda: authority.renew(make_renewal(identity, clock.now), "")) is Refusal.REVOKED
    assert _refusal(lambda: authority.revoke_invite("ffffffffff")) is Refusal.NOT_HELD


# ------------------------------------------------------------------ the owner's own


def test_own_identities_are_renewed_at_two_thirds(authority, clock, tmp_path: Path):
    before = {peer: authority.identity(peer) for peer in (COORDINATOR, KEEPER, OWNER)}
    assert authority.renew_own() == ()
    assert Identity.load(tmp_path / "owner") == before[OWNER]
    clock.now += 5 * DAY
    assert set(authority.renew_own()) == set(before)
    for peer, old in before.items():
        assert authority.identity(peer) != old
    assert Identity.load(tmp_path / "owner") == authority.identity(OWNER)
    with pytest.raises(ValueError, match="invite"):
        authority.identity(PeerIdentity("w" + "0" * 16, Role.WORKER))


@pytest.mark.parametrize("ahead_s", [6 * DAY, 30 * DAY])
def test_certificates_made_by_a_clock_that_was_ahead_are_replaced_when_it_is_right(authority, clock, ahead_s):
    before = {peer: authority.identity(peer) for peer in (COORDINATOR, KEEPER, OWNER)}
    clock.now += ahead_s
    for peer in before:
        authority.identity(peer)
    clock.now -= ahead_s
    authority.renew_own()
    for peer in before:
        not_before_s, not_after_s = validity(read_certificate(authority.identity(peer).certificate_pem))
        assert not_before_s <= clock.now < not_after_s, "others, whose clocks never jumped, accept it at once"


def test_a_damaged_directory_is_told(tmp_path: Path, clock: _Clock):
    _authority(tmp_path, clock)
    (tmp_path / "ca" / "assignment.key").write_bytes(b"rubbish")
    with pytest.raises(UsageError, match=r"assignment\.key is damaged"):
        _authority(tmp_path, clock)


def test_the_same_key_again_and_again_is_one_use_and_one_record(tmp_path: Path, clock: _Clock):
    journal = MemoryJournal()
    authority = _authority(tmp_path, clock, journal=journal)
    invite = authority.create_invite().invite
    key = new_key()
    for _ in range(50):
        authority.enrol(_request(invite, key, clock), "192.0.2.1")
    assert authority.list_invites().invites[0].used == 1
    assert len(journal.records) == 2


def test_all_sources_together_have_a_limit_too(tmp_path: Path, clock: _Clock):
    limits = EnrolmentLimits(joins_in_all=Rate(burst=3, per_s=1))
    authority = _authority(tmp_path, clock, limits=limits)
    invite = authority.create_invite().invite
    for n in range(3):
        authority.enrol(_request(invite, new_key(), clock), f"192.0.2.{n}")
    assert _refusal(lambda: authority.enrol(_request(invite, new_key(), clock), "192.0.2.9")) is Refusal.LIMIT
    assert authority.list_invites().invites[0].used == 3
    clock.now += 1
    authority.enrol(_request(invite, new_key(), clock), "192.0.2.9")
