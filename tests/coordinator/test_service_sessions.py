"""The control port over real mTLS: who may say what, and what it costs us when somebody misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from starlings_coordinator import service, sessions
from starlings_coordinator.core.config import CoreConfig
from starlings_protos import control_pb2, control_pb2_grpc
from starlings_protos.channels import control_channel
from starlings_protos.errors import refusal_of
from starlings_protos.identity import Role
from starlings_protos.messages import Heartbeat, HeartbeatAck, Refusal, Welcome
from support.coordinator_harness import Running, ScriptedWorker, childless, until
from support.prepared_job import write_prepared_job

SESSION = "/starlings.v1.Control/Session"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    directory = write_prepared_job(tmp_path / "job", min_workers=50)
    async with childless(directory) as found:
        yield found


async def test_hello_for_another_workers_id_is_refused(running: Running) -> None:
    async with ScriptedWorker(running) as thief, ScriptedWorker(running) as victim:
        await victim.say(victim.hello())
        await victim.expect(Welcome)
        await thief.say(thief.hello(victim.worker_id))
        assert await thief.ending() == (grpc.StatusCode.PERMISSION_DENIED, str(int(Refusal.NOT_YOU)))
        # The victim's session is untouched.
        await victim.say(Heartbeat())
        await victim.expect(HeartbeatAck)


async def test_an_acknowledgement_carries_the_pace_of_the_swarm_as_it_is_now(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreConfig, "heartbeat_interval_s", lambda config, count: 2.0 * count)
    async with ScriptedWorker(running) as early, ScriptedWorker(running) as late:
        await early.say(early.hello())
        assert (await early.expect(Welcome)).heartbeat_interval_s == 2.0
        await late.say(late.hello())
        assert (await late.expect(Welcome)).heartbeat_interval_s == 4.0
        await early.say(Heartbeat())
        assert (await early.expect(HeartbeatAck)).heartbeat_interval_s == 4.0


async def test_first_message_must_be_a_hello_and_later_ones_well_formed(running: Running) -> None:
    malformed = (grpc.StatusCode.INVALID_ARGUMENT, str(int(Refusal.MALFORMED)))
    async with ScriptedWorker(running) as worker:
        await worker.say(Heartbeat())
        assert await worker.ending() == malformed
    async with ScriptedWorker(running) as worker:
        await worker.say(worker.hello())
        await worker.expect(Welcome)
        await worker.call.write(control_pb2.ToCoordinator())  # no body
        assert await worker.ending() == malformed
    async with ScriptedWorker(running) as worker:
        await worker.say(worker.hello())
        done = control_pb2.ToCoordinator()
        done.microbatch_done.key.kind = 77  # type: ignore[assignment]
        await worker.call.write(done)
        assert await worker.ending() == malformed


async def test_random_bytes_end_the_stream_and_nothing_else(running: Running) -> None:
    identity = running.worker_identity()
    async with control_channel(running.control, identity) as channel:
        for junk in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))):
            raw = channel.stream_stream(
                SESSION, request_serializer=lambda data: data, response_deserializer=lambda data: data
            )
            call: Any = raw()
            assert await _ended(call, junk) is not grpc.StatusCode.OK
    async with ScriptedWorker(running) as worker:
        await worker.say(worker.hello())
        await worker.expect(Welcome)


async def _ended(call: Any, first: Any) -> grpc.StatusCode:
    """Writes `first`, reads to the end, and returns the status."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(first)
        while await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF:
            pass
    return await asyncio.wait_for(call.code(), 10)


async def test_roles_are_kept_apart(running: Running) -> None:
    async def refusal(role: Role, method: str, request: Any) -> Refusal | None:
        async with control_channel(running.control, running.worker_identity(role)) as channel:
            try:
                await getattr(control_pb2_grpc.ControlStub(channel), method)(request)
            except grpc.aio.AioRpcError as error:
                return refusal_of(error)
        return None

    status, stop = control_pb2.StatusRequest(), control_pb2.StopRequest()
    invite = control_pb2.CreateInviteRequest()
    assert await refusal(Role.OBSERVER, "Status", status) is None
    assert await refusal(Role.OBSERVER, "Stop", stop) is Refusal.NOT_YOU
    assert await refusal(Role.OBSERVER, "CreateInvite", invite) is Refusal.NOT_YOU
    assert await refusal(Role.OBSERVER, "ListInvites", control_pb2.ListInvitesRequest()) is Refusal.NOT_YOU
    assert await refusal(Role.OBSERVER, "RevokeInvite", control_pb2.RevokeInviteRequest()) is Refusal.NOT_YOU
    assert await refusal(Role.WORKER, "Status", status) is Refusal.NOT_YOU
    stub, channel = running.owner()
    async with channel, control_channel(running.control, running.worker_identity(Role.OBSERVER)) as looking:
        for sessions in (stub, control_pb2_grpc.ControlStub(looking)):
            code = await _ended(sessions.Session(), control_pb2.ToCoordinator())
            assert code is grpc.StatusCode.PERMISSION_DENIED
        watched = await control_pb2_grpc.ControlStub(looking).Watch(status).read()
        assert watched.job == "test"


async def test_silent_stream_is_ended(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HELLO_WITHIN_S", 0.2)
    async with ScriptedWorker(running) as worker:
        code, _ = await worker.ending()
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_second_stream_of_a_worker_ends_the_first(running: Running) -> None:
    async with ScriptedWorker(running) as first:
        await first.say(first.hello())
        await first.expect(Welcome)
        async with ScriptedWorker(running, first.identity) as second:
            await second.say(second.hello())
            await second.expect(Welcome)
            assert await first.ending() == (grpc.StatusCode.ABORTED, str(int(Refusal.SUPERSEDED)))


async def test_reader_that_does_not_read_is_cut_off_and_memory_stays_flat(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every heartbeat is answered; this worker sends as many as it can and reads nothing."""
    monkeypatch.setattr(sessions, "WAITING_BYTES_LIMIT", 8 << 20)
    monkeypatch.setattr(service, "LAST_WORDS_S", 0.5)
    ended: list[sessions.WorkerSession] = []
    real_close = sessions.SessionTable.close
    monkeypatch.setattr(
        sessions.SessionTable, "close", lambda table, s: (ended.append(s), real_close(table, s))
    )
    opened: list[sessions.WorkerSession] = []
    real_open = sessions.SessionTable.open

    def open_and_tell(table: sessions.SessionTable, worker_id: Any) -> sessions.WorkerSession:
        opened.append(real_open(table, worker_id))
        return opened[-1]

    monkeypatch.setattr(sessions.SessionTable, "open", open_and_tell)
    big = control_pb2.ToWorker()
    big.lease_grant.leases.add(records=bytes(1 << 20)).key.step = 1
    async with ScriptedWorker(running) as worker:
        await worker.say(worker.hello())
        await until(lambda: opened, "the session")
        before = psutil.Process().memory_info().rss
        # More than the windows of HTTP/2 and of the kernel hold: the writer is stuck when the queue overflows.
        async with asyncio.timeout(30):
            while opened[0].ending is None:
                opened[0].send(big)
                await asyncio.sleep(0.01)
        assert opened[0].ending is not None
        assert opened[0].ending.refusal is Refusal.LIMIT
        assert psutil.Process().memory_info().rss - before < 64 << 20
        # It is over for us although the peer still does not read: within the time for last words.
        await until(lambda: len(ended) == 1, "the end of the stream", service.LAST_WORDS_S + 10)
        async with ScriptedWorker(running, worker.identity, nonce=2) as again:
            await again.say(again.hello())
            await again.expect(Welcome)
        # Once it reads, it learns why.
        code, _ = await asyncio.wait_for(worker.ending(), 20)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_two_hundred_idle_connections_harm_nobody(running: Running) -> None:
    identity = running.worker_identity()
    channels = [control_channel(running.control, identity) for _ in range(200)]
    try:
        # Connected, and not one call on them.
        await asyncio.gather(*(asyncio.wait_for(c.channel_ready(), 60) for c in channels))
        before = psutil.Process().memory_info().rss
        async with ScriptedWorker(running) as worker:
            await worker.say(worker.hello())
            await asyncio.wait_for(worker.expect(Welcome), 5)
        stub, channel = running.owner()
        async with channel:
            reply = await stub.Status(control_pb2.StatusRequest(), timeout=5)
        assert reply.phase == "gathering"
        assert reply.waiting_for
        assert psutil.Process().memory_info().rss - before < 32 << 20
    finally:
        await asyncio.gather(*(c.close() for c in channels))


async def test_no_room_is_a_coded_refusal(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: sessions.SessionTable, worker_id: Any) -> sessions.WorkerSession:
        raise sessions.TooManySessions("2048 control streams are open already")

    monkeypatch.setattr(sessions.SessionTable, "open", full)
    async with ScriptedWorker(running) as worker:
        await worker.say(worker.hello())
        assert await worker.ending() == (grpc.StatusCode.RESOURCE_EXHAUSTED, str(int(Refusal.BUSY)))
