"""The owner's commands over the control port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from starlings_coordinator import owner
from starlings_coordinator.owner import trimmed
from starlings_protos import control_pb2, control_pb2_grpc
from starlings_protos.channels import enrolment_channel
from starlings_protos.errors import refusal_of
from starlings_protos.identity import Identity, PeerIdentity, Role, key_id, key_to_pem, make_csr, new_key
from starlings_protos.invite import parse_invite
from starlings_protos.messages import Refusal, Welcome
from starlings_protos.status import Event, LossPoint, StatusReply
from support.coordinator_harness import Running, ScriptedWorker, childless
from support.prepared_job import write_prepared_job


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    directory = write_prepared_job(tmp_path / "job", min_workers=50)
    async with childless(directory) as found:
        yield found


async def _joined(running: Running, invite: str) -> Identity:
    """As `starlings join` does it, without its checks."""
    parsed, key = parse_invite(invite), new_key()
    ca_pem = running.authority.certificate_pem
    async with enrolment_channel(str(parsed.addresses[0]), ca_pem) as channel:
        reply = await control_pb2_grpc.EnrolmentStub(channel).Enrol(
            control_pb2.EnrolRequest(
                token_id=parsed.token_id,
                token_secret=parsed.secret,
                csr_pem=make_csr(key),
                job=parsed.job,
                protocol_min=1,
                protocol_max=1,
                wall_time_s=time.time(),
            )
        )
    peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
    assert reply.worker_id == peer.id
    assert list(reply.control_addresses) == [running.control]
    return Identity(peer, key_to_pem(key), reply.certificate_pem, reply.ca_pem)


async def test_first_invite_lets_a_worker_in_and_revoking_it_shuts_it_out(running: Running) -> None:
    identity = await _joined(running, running.listening["invite"])
    stub, channel = running.owner()
    async with channel, ScriptedWorker(running, identity) as worker:
        await worker.say(worker.hello())
        await worker.expect(Welcome)
        listed = await stub.ListInvites(control_pb2.ListInvitesRequest())
        assert [(i.used, i.revoked) for i in listed.invites] == [(1, False)]
        assert listed.invites[0].token_id == running.listening["invite_id"]
        request = control_pb2.RevokeInviteRequest(token_id=listed.invites[0].token_id, workers=True)
        assert list((await stub.RevokeInvite(request)).worker_ids) == [identity.id]
        assert await worker.ending() == (grpc.StatusCode.PERMISSION_DENIED, str(int(Refusal.REVOKED)))
        async with ScriptedWorker(running, identity, nonce=2) as again:
            # The refusal may come before the Hello is written.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await again.say(again.hello())
            assert (await again.ending())[1] == str(int(Refusal.REVOKED))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.RevokeInvite(control_pb2.RevokeInviteRequest(token_id="ffffffffff"))
        assert refusal_of(error.value) is Refusal.NOT_HELD


async def test_created_invite_has_what_was_asked_for(running: Running) -> None:
    stub, channel = running.owner()
    async with channel:
        made = await stub.CreateInvite(
            control_pb2.CreateInviteRequest(lifetime_s=60, uses=2, role="observer")
        )
        assert (made.role, made.uses, made.used) == ("observer", 2, 0)
        assert parse_invite(made.invite).token_id == made.token_id
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.CreateInvite(control_pb2.CreateInviteRequest(role="emperor"))
        assert refusal_of(error.value) is Refusal.MALFORMED


async def test_watch_sends_news_once_and_keeps_its_interval(running: Running) -> None:
    stub, channel = running.owner()
    async with channel:
        call = stub.Watch(control_pb2.StatusRequest(interval_s=0.2))
        first = await call.read()
        assert (first.phase, first.job) == ("gathering", "test")
        assert first.waiting_for == "waiting for 50 more workers to join"
        async with ScriptedWorker(running) as worker:
            await worker.say(worker.hello())
            await worker.expect(Welcome)
            second = await asyncio.wait_for(call.read(), 10)
            assert [e.kind for e in second.events] == ["join"]
            assert [w.worker_id for w in second.workers] == [worker.worker_id]
        # The worker is gone: news again, and the join is not repeated.
        third = await asyncio.wait_for(call.read(), 10)
        assert "join" not in [e.kind for e in third.events]
        call.cancel()


async def test_stop_before_training_is_answered_with_the_phase(running: Running) -> None:
    stub, channel = running.owner()
    said: list[str] = []
    async with channel:
        # Stopping a job without a plan ends it at once, so the reason is heard on a stream that is open already.
        call = stub.Watch(control_pb2.StatusRequest(interval_s=0.05))
        await call.read()
        reply = await stub.Stop(control_pb2.StopRequest(reason="enough\x1b[31m"))
        assert reply.phase in ("gathering", "done", "failed")
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(20):
                while isinstance(status := await call.read(), control_pb2.StatusReply):
                    said += [event.text for event in status.events]
    assert "\x1b" not in " ".join(said)
    assert any("enough" in text for text in said)


async def test_watchers_are_limited_and_let_go(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "WATCHERS_LIMIT", 2)
    stub, channel = running.owner()
    request = control_pb2.StatusRequest(interval_s=0.1)
    async with channel:
        calls = [stub.Watch(request) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Watch(request).read()
        assert refusal_of(error.value) is Refusal.BUSY
        calls[0].cancel()

        async def room() -> bool:
            try:
                return bool(await stub.Watch(request).read())
            except grpc.aio.AioRpcError:
                return False

        async with asyncio.timeout(10):
            while not await room():
                await asyncio.sleep(0.05)


def _status(events: int, steps: int) -> StatusReply:
    return StatusReply(
        "job", "training", "", 0, 0, 0, 0, 0.0, 0.0, 0.0, False, (), (), 0,
        tuple(Event(i, 0.0, "join", "") for i in range(1, events + 1)),
        tuple(LossPoint(i, 0, 0.0, 0.0) for i in range(steps)),
        0, 0, 0, "", 0.0, "", "", 0,
    )  # fmt: skip


def test_only_newer_events_and_points_unless_numbers_went_back() -> None:
    def kept(after_event: int, after_step: int) -> tuple[list[int], list[int]]:
        found = trimmed(_status(events=3, steps=4), after_event, after_step)
        return [e.sequence for e in found.events], [p.step for p in found.loss_curve]

    assert kept(0, -1) == ([1, 2, 3], [0, 1, 2, 3])
    assert kept(2, 1) == ([3], [2, 3])
    assert kept(3, 3) == ([], [])
    assert kept(9, 7) == ([1, 2, 3], [0, 1, 2, 3])
    assert trimmed(_status(0, 0), 5, 5).events == ()
