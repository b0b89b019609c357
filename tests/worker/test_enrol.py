"""Joining a real enrolment port: what works, and each way in which it is refused, within a second."""

from __future__ import annotations

import asyncio
import socket
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from starlings_coordinator.enrolment import EnrolmentLimits
from starlings_coordinator.rates import Rate
from starlings_protos.errors import (
    ClockSkewed,
    Phase,
    RefusedError,
    Unreachable,
    UsageError,
)
from starlings_protos.identity import Role, identity_of_certificate, read_certificate, validity
from starlings_protos.invite import Address
from starlings_protos.messages import Refusal
from starlings_worker.enrol import enrol, ensure_membership, keep_renewed, renew
from starlings_worker.membership import Membership
from support.enrolment_server import MovableClock, enrolment_world

DAY = 86400.0
# The promise is a second; the margin is for machines that run other tests meanwhile.
WITHIN_S = 3.0


async def _refused(refusal: Refusal, exit_code: int, awaitable, says: str) -> str:
    """The message. The refusal came at once: a tenth of a second on an idle machine."""
    started = time.monotonic()
    with pytest.raises(RefusedError, match=says) as refused:
        await awaitable
    assert time.monotonic() - started < WITHIN_S
    assert (refused.value.refusal, refused.value.exit_code) == (refusal, exit_code)
    return str(refused.value)


async def test_joining(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        enrolled = await ensure_membership(tmp_path / "worker", world.invite())
        membership = enrolled.membership
        assert identity_of_certificate(membership.identity.certificate_pem).id == membership.worker_id
        assert membership.identity.peer.role is Role.WORKER
        assert membership.control_addresses == (
            Address("127.0.0.1", 7700),
            Address("train.example.org", 7700),
        )
        assert abs(enrolled.skew_s) < 5
        assert enrolled.notice is None
        assert Membership.load(tmp_path / "worker") == membership
        assert ("join", f"{membership.worker_id} joined from 127.0.0.1") in world.events
        files = {p.name: p for p in (tmp_path / "worker").iterdir()}
        assert sorted(files) == ["ca.pem", "id.key", "id.pem", "worker.toml"]
        if sys.platform != "win32":
            assert {stat.S_IMODE(p.stat().st_mode) for p in files.values()} == {0o600}


async def test_an_observer(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        world.authority.serve_at(
            [f"127.0.0.1:{world.port}"], ["127.0.0.1:7700"], "mqtts://bus.example.org:8883"
        )
        invite = world.invite(role="observer")
        membership = (await ensure_membership(tmp_path / "o", invite, role=Role.OBSERVER)).membership
        assert membership.identity.peer.role is Role.OBSERVER
        assert membership.worker_id.startswith("o")
        assert membership.bus_url == "mqtts://bus.example.org:8883"
        assert Membership.load(tmp_path / "o") == membership
        assert ("join", f"{membership.worker_id} may look on, from 127.0.0.1") in world.events
        with pytest.raises(UsageError, match="identity of the observer"):
            await ensure_membership(tmp_path / "o", invite)


async def test_an_invite_makes_nothing_but_what_it_is_for_and_is_not_used_up_by_trying(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        looking, working = world.invite(role="observer", uses=1), world.invite(uses=1)
        await _refused(Refusal.INVITE_WRONG, 4, enrol(looking, tmp_path / "w"), "starlings watch")
        as_observer = enrol(working, tmp_path / "o", role=Role.OBSERVER)
        await _refused(Refusal.INVITE_WRONG, 4, as_observer, "starlings join.*--role observer")
        assert (await enrol(looking, tmp_path / "o", role=Role.OBSERVER)).membership.worker_id.startswith("o")
        assert (await enrol(working, tmp_path / "w")).membership.worker_id.startswith("w")


async def test_a_member_needs_neither_network_nor_a_valid_invite(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite()
        membership = (await ensure_membership(tmp_path / "worker", invite)).membership
    stale = replace(invite, expires_s=int(time.time()) - 10)
    assert (await ensure_membership(tmp_path / "worker", stale)).membership == membership
    assert (await ensure_membership(tmp_path / "worker", None)).membership == membership


async def test_the_same_key_is_the_same_worker_and_uses_the_invite_once(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite(uses=1)
        first = (await enrol(invite, tmp_path / "worker")).membership
        (tmp_path / "worker" / "id.pem").unlink()
        again = (await ensure_membership(tmp_path / "worker", invite)).membership
        assert again.worker_id == first.worker_id
        assert world.authority.list_invites().invites[0].used == 1
        assert [kind for kind, _ in world.events] == ["join"]


# ------------------------------------------------------------------ refusals


async def test_an_expired_invite_is_not_even_tried(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite(expires_s=int(time.time()) - 3600)
        message = await _refused(
            Refusal.INVITE_EXPIRED, 5, enrol(invite, tmp_path / "w"), r"expired at 20\d\d-"
        )
        assert "1 h ago by this machine's clock" in message
        assert "ask the owner for a new one" in message
        assert not (tmp_path / "w").exists()
        assert world.events == []


async def test_expired_by_the_coordinators_clock(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite(lifetime_s=60)
        world.clock.offset_s = 600
        await _refused(
            Refusal.INVITE_EXPIRED, 5, enrol(invite, tmp_path / "w"), "expired at .* Ask the owner"
        )


async def test_a_wrong_secret_and_an_unknown_token(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        for invite in (world.invite(secret="A" * 32), world.invite(token_id="0" * 10)):
            await _refused(
                Refusal.INVITE_WRONG, 4, enrol(invite, tmp_path / "w"), "does not know this invite"
            )
        assert [kind for kind, _ in world.events] == ["refused"] * 2
        assert "A" * 32 not in str(world.events)


async def test_used_up(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite(uses=1)
        await enrol(invite, tmp_path / "first")
        await _refused(Refusal.INVITE_USED_UP, 6, enrol(invite, tmp_path / "second"), "used once and was")


async def test_a_revoked_invite_and_a_revoked_worker(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite()
        joined = (await enrol(invite, tmp_path / "w")).membership
        reply = world.authority.revoke_invite(invite.token_id, workers=True)
        assert list(reply.worker_ids) == [joined.worker_id]
        await _refused(Refusal.REVOKED, 7, enrol(invite, tmp_path / "other"), "revoked this invite")
        # Not with another invite either, and not by renewal.
        await _refused(Refusal.REVOKED, 7, enrol(world.invite(), tmp_path / "w"), "shut out")
        await _refused(Refusal.REVOKED, 7, renew(joined, tmp_path / "w"), "shut out")


async def test_another_job(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        await _refused(Refusal.JOB_MISMATCH, 8, enrol(world.invite(job="other"), tmp_path / "w"), "'other'")


async def test_a_protocol_from_another_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("starlings_worker.enrol.PROTOCOL_MIN", 0)
    monkeypatch.setattr("starlings_worker.enrol.PROTOCOL_MAX", 0)
    async with enrolment_world(tmp_path / "job") as world:
        await _refused(Refusal.VERSION, 8, enrol(world.invite(), tmp_path / "w"), "uv tool upgrade starlings")


async def test_guessing_is_slowed_down_but_keeps_nobody_else_out(tmp_path: Path):
    limits = EnrolmentLimits(guesses=Rate(burst=3, per_s=0.01))
    async with enrolment_world(tmp_path / "job", limits=limits) as world:
        guess = world.invite(secret="B" * 32)
        for _ in range(3):
            await _refused(Refusal.INVITE_WRONG, 4, enrol(guess, tmp_path / "w"), "does not know")
        await _refused(Refusal.LIMIT, 14, enrol(guess, tmp_path / "w"), r"wait \d+ s")
        # Behind the same address, with a real invite.
        assert (await enrol(world.invite(), tmp_path / "w")).membership.worker_id


async def test_a_crowd_behind_one_address_gets_in_with_patience(tmp_path: Path):
    async with enrolment_world(tmp_path / "job", limits=EnrolmentLimits(joins=Rate(1, 2))) as world:
        invite = world.invite()
        crowd = (ensure_membership(tmp_path / name, invite) for name in "abc")
        joined = await asyncio.gather(*crowd)
        assert len({e.membership.worker_id for e in joined}) == 3


async def test_uses_are_never_exceeded_however_many_come_at_once(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite(uses=3)
        outcomes = await asyncio.gather(
            *(enrol(invite, tmp_path / str(i)) for i in range(8)), return_exceptions=True
        )
        refused = [o for o in outcomes if isinstance(o, RefusedError)]
        assert [o.refusal for o in refused] == [Refusal.INVITE_USED_UP] * 5


async def test_a_coordinator_that_moved(tmp_path: Path):
    """A member that is given an invite with new addresses learns where everything is now, and uses no token up."""
    async with enrolment_world(tmp_path / "job") as world:
        old = (await enrol(world.invite(), tmp_path / "w")).membership
    async with enrolment_world(tmp_path / "job") as world:
        world.authority.serve_at([f"127.0.0.1:{world.port}"], ["moved.example.org:7700"])
        moved = (await ensure_membership(tmp_path / "w", world.invite(uses=1))).membership
        assert moved.worker_id == old.worker_id
        assert moved.control_addresses == (Address("moved.example.org", 7700),)
        assert moved.enrolment_addresses[0] == Address("127.0.0.1", world.port)
        assert world.authority.list_invites().invites[-1].used == 0


async def test_joins_have_a_rate(tmp_path: Path):
    async with enrolment_world(tmp_path / "job", limits=EnrolmentLimits(joins=Rate(2, 0.01))) as world:
        invite = world.invite()
        for name in "ab":
            await enrol(invite, tmp_path / name)
        await _refused(Refusal.LIMIT, 14, enrol(invite, tmp_path / "c"), "Too many tries from 127.0.0.1")


async def test_sixteen_at_once(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite()
        joined = await asyncio.gather(*(enrol(invite, tmp_path / str(i)) for i in range(16)))
        assert len({e.membership.worker_id for e in joined}) == 16
        assert world.authority.list_invites().invites[0].used == 16


# ------------------------------------------------------------------ clocks


@pytest.mark.parametrize("offset_s", [-600.0, 600.0])
async def test_ten_minutes_off_joins_and_says_so(tmp_path: Path, offset_s: float):
    async with enrolment_world(tmp_path / "job") as world:
        enrolled = await enrol(world.invite(), tmp_path / "w", wall=MovableClock(offset_s))
        assert enrolled.skew_s == pytest.approx(offset_s, abs=5)
        assert "10 min ahead" in enrolled.notice or "10 min behind" in enrolled.notice


@pytest.mark.parametrize(
    ("offset_s", "says"), [(-7200.0, "2 h behind"), (3 * DAY, "3 days ahead"), (float("nan"), "no number")]
)
async def test_too_far_off(tmp_path: Path, offset_s: float, says: str):
    async with enrolment_world(tmp_path / "job", offset_s=-DAY) as world:
        world.clock.offset_s = 0  # the CA is a day old
        invite = world.invite(lifetime_s=30 * DAY)
        code = (Refusal.MALFORMED, 1) if offset_s != offset_s else (Refusal.CLOCK, 15)
        await _refused(*code, enrol(invite, tmp_path / "w", wall=MovableClock(offset_s)), says)


async def test_a_clock_before_the_jobs_own_first_moment(tmp_path: Path):
    """TLS would only have said that a certificate is not yet valid."""
    async with enrolment_world(tmp_path / "job") as world:
        with pytest.raises(ClockSkewed, match=r"at least (1 h|59 min|60 min) behind") as skewed:
            await enrol(world.invite(), tmp_path / "w", wall=MovableClock(-7200.0))
        assert skewed.value.exit_code == 15


# ------------------------------------------------------------------ renewal


async def test_an_expired_certificate_is_renewed_by_its_key(tmp_path: Path):
    async with enrolment_world(tmp_path / "job", offset_s=-30 * DAY) as world:
        old = (await enrol(world.invite(), tmp_path / "w", wall=world.clock)).membership
        assert old.identity.not_after_s < time.time()
        world.clock.offset_s = 0
        renewed = (await ensure_membership(tmp_path / "w", None)).membership
        assert renewed.worker_id == old.worker_id
        assert renewed.identity.key_pem == old.identity.key_pem
        assert validity(read_certificate(renewed.identity.certificate_pem))[1] > time.time() + 6 * DAY
        assert Membership.load(tmp_path / "w") == renewed


async def test_due_but_unreachable_is_no_reason_to_stop(tmp_path: Path):
    async with enrolment_world(tmp_path / "job", offset_s=-5 * DAY) as world:
        old = (await enrol(world.invite(), tmp_path / "w", wall=world.clock)).membership
    found = await ensure_membership(tmp_path / "w", None)
    assert found.membership == old
    assert "could not be renewed yet. Cannot reach 127.0.0.1" in found.notice
    with pytest.raises(Unreachable):  # but once it has expired
        await ensure_membership(tmp_path / "w", None, wall=MovableClock(3 * DAY))


async def test_it_is_renewed_while_the_worker_works(tmp_path: Path):
    async with enrolment_world(tmp_path / "job", offset_s=-5 * DAY) as world:
        old = (await enrol(world.invite(), tmp_path / "w", wall=world.clock)).membership
        world.clock.offset_s = 0
        delivered: asyncio.Queue[Membership] = asyncio.Queue()
        looks = asyncio.Semaphore(1)
        task = asyncio.create_task(
            keep_renewed(old, tmp_path / "w", delivered.put_nowait, sleep=lambda s: looks.acquire())
        )
        renewed = await asyncio.wait_for(delivered.get(), 10)
        assert renewed.identity.not_after_s > time.time() + 6 * DAY
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_renewing_goes_on_through_failures_until_revoked(tmp_path: Path):
    async with enrolment_world(tmp_path / "job", offset_s=-5 * DAY) as world:
        invite = world.invite()
        old = (await enrol(invite, tmp_path / "w", wall=world.clock)).membership
        world.clock.offset_s = 0
        reports: list[str] = []
        gone = replace(old, enrolment_addresses=(Address("127.0.0.1", _free_port()),))

        async def sleep(_: float) -> None:
            if len(reports) == 2:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await keep_renewed(gone, tmp_path / "w", print, sleep=sleep, report=reports.append)
        assert all("TCP failed" in text for text in reports)
        world.authority.revoke_invite(invite.token_id, workers=True)
        with pytest.raises(RefusedError) as refused:
            await keep_renewed(old, tmp_path / "w", print, sleep=lambda s: asyncio.sleep(0))
        assert refused.value.refusal is Refusal.REVOKED


# ------------------------------------------------------------------ directories and addresses


async def test_a_directory_of_another_job(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        await enrol(world.invite(), tmp_path / "w")
        with pytest.raises(UsageError, match="belongs to the job 'job'"):
            await ensure_membership(tmp_path / "w", world.invite(job="other"))


async def test_a_job_set_up_anew_under_the_same_name(tmp_path: Path):
    async with enrolment_world(tmp_path / "old") as world:
        old = (await enrol(world.invite(), tmp_path / "w")).membership
    async with enrolment_world(tmp_path / "new") as world:
        new = (await ensure_membership(tmp_path / "w", world.invite())).membership
        assert new.worker_id == old.worker_id
        assert new.pin != old.pin


async def test_nothing_to_go_by(tmp_path: Path):
    with pytest.raises(UsageError, match="give an invite"):
        await ensure_membership(tmp_path, None)


async def test_damaged_files(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        await enrol(world.invite(), tmp_path / "w")
    (tmp_path / "w" / "worker.toml").write_text("job = 3")
    with pytest.raises(UsageError, match="damaged"):
        await ensure_membership(tmp_path / "w", None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_the_second_address_works(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        addresses = (Address("127.0.0.1", _free_port()), Address("127.0.0.1", world.port))
        membership = (await enrol(world.invite(addresses=addresses), tmp_path / "w")).membership
        # What worked is tried first next time.
        assert membership.enrolment_addresses == (addresses[1], addresses[0])


async def test_nobody_there(tmp_path: Path):
    async with enrolment_world(tmp_path / "job") as world:
        port = _free_port()
        with pytest.raises(Unreachable) as failed:
            await enrol(
                world.invite(addresses=(Address("127.0.0.1", port), Address("no-such-host.invalid", 7701))),
                tmp_path / "w",
            )
        error = failed.value
        assert (error.exit_code, error.phase, error.port) == (3, Phase.TCP, port)
        assert f"127.0.0.1 port {port}" in str(error)
        assert "no-such-host.invalid:7701 (DNS)" in str(error)
        assert "Check that the coordinator is running" in str(error)


async def test_a_full_disk_of_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with enrolment_world(tmp_path / "job") as world:
        invite = world.invite()

        def full(records):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(world.authority._book._journal, "append", full)
        await _refused(Refusal.BUSY, 3, enrol(invite, tmp_path / "w"), "No space left on device")
        assert world.authority.list_invites().invites[0].used == 0
