"""The control port's gRPC service: workers' streams, and the owner's commands by delegation to `owner.py`.

A stream's first message is a Hello for the very id that the certificate names. From then on everything a worker says
is an event for the core, and everything it is told comes out of its session's bounded queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import grpc

from starlings_coordinator.clock import Clock
from starlings_coordinator.core.events import WorkerConnected, WorkerDisconnected, WorkerSaid
from starlings_coordinator.core.liveness import worth_an_answer
from starlings_coordinator.descriptors import shortage
from starlings_coordinator.intake import received
from starlings_coordinator.loop import CoreLoop
from starlings_coordinator.owner import OwnerDesk
from starlings_coordinator.rates import Rate, Throttle
from starlings_coordinator.reach.desk import ReachDesk
from starlings_coordinator.sessions import Ending, SessionTable, TooManySessions, WorkerSession
from starlings_protos import control_pb2, control_pb2_grpc
from starlings_protos.errors import RefusedError, abort, abort_with
from starlings_protos.identity import PeerIdentity
from starlings_protos.messages import Heartbeat, Hello, PeerUnreachable, Refusal, WorkerId
from starlings_protos.peers import Context, peer_host, peer_identity
from starlings_protos.reach_messages import ReachReport
from starlings_protos.telemetry import Telemetry

R = TypeVar("R")

# From the opening of a stream to its Hello.
HELLO_WITHIN_S = 10.0
# What one worker may say; beyond it is read more slowly. Small steps of a small model need some tens of messages
# a second.
MESSAGES = Rate(burst=2000, per_s=200)
BYTES = Rate(burst=8 << 20, per_s=1 << 20)
# What still waits when a session ends is sent for this long at most.
LAST_WORDS_S = 5.0


class ControlService(control_pb2_grpc.ControlServicer):
    """Roles and revoked certificates are checked by `peers.RoleGuard` before any method here runs."""

    def __init__(
        self,
        loop: CoreLoop,
        sessions: SessionTable,
        owner: OwnerDesk,
        clock: Clock,
        heartbeat_interval_s: Callable[[], float],
        reach: ReachDesk | None = None,
    ) -> None:
        self._loop = loop
        self._sessions = sessions
        self._owner = owner
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s
        self._reach = reach

    # ------------------------------------------------------------------ workers

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[control_pb2.ToCoordinator], context: Context
    ) -> None:
        try:
            identity = peer_identity(context)
            hello = await self._hello(context, identity)
            if short := shortage():
                raise RefusedError(Refusal.LIMIT, f"The coordinator has no room for another worker: {short}.")
            session = self._sessions.open(hello.worker_id)
        except RefusedError as error:
            await abort_with(context, error)
        except TooManySessions as error:
            await abort(context, Refusal.BUSY, f"The coordinator has no room: {error}.")
        try:
            await self._loop.post(WorkerConnected(session.number, hello))
            ending = await self._serve(session, context)
        finally:
            session.end(Ending(None, "the stream is over"))
            self._sessions.close(session)
            if self._reach is not None:
                self._reach.closed(session)
            await asyncio.shield(self._loop.post(WorkerDisconnected(session.number, session.worker_id)))
        # A peer that does not read gets its status when it does: gRPC cannot reset a stream from this side. Until then
        # this costs the one message that is on its way.
        with self._sessions.lingering(session):
            if ending.refusal is not None:
                await abort(context, ending.refusal, ending.message)
            if ending.leaving:
                await context.abort(grpc.StatusCode.UNAVAILABLE, ending.message)

    async def _hello(self, context: Context, identity: PeerIdentity) -> Hello:
        """The stream's first message, checked against the certificate. Raises RefusedError."""
        try:
            first = await asyncio.wait_for(context.read(), HELLO_WITHIN_S)
        except TimeoutError:
            raise RefusedError(
                Refusal.MALFORMED, f"No Hello within {HELLO_WITHIN_S:.0f} s of opening the stream."
            ) from None
        if not isinstance(first, control_pb2.ToCoordinator):
            raise RefusedError(Refusal.MALFORMED, "The stream ended before its Hello.")
        hello = received(first)
        if not isinstance(hello, Hello):
            raise RefusedError(Refusal.MALFORMED, "The first message of a stream must be a Hello.")
        if hello.worker_id != identity.id:
            raise RefusedError(
                Refusal.NOT_YOU,
                f"The certificate is {identity.id}'s, the Hello names {hello.worker_id[:40]!r}.",
            )
        return hello

    async def _serve(self, session: WorkerSession, context: Context) -> Ending:
        """Reads and writes until one side ends the stream; returns why."""
        reading = asyncio.create_task(self._read(session, context))
        writing = asyncio.create_task(self._write(session, context))
        tasks = (reading, writing)
        try:
            await asyncio.wait((*tasks, session.ended), return_when=asyncio.FIRST_COMPLETED)
            if session.ending is not None and not writing.done():
                # What waits in the queue, above all the reason, is still worth sending; to a reader who reads.
                await asyncio.wait({writing}, timeout=LAST_WORDS_S)
            return session.ending or Ending(None, "the worker ended the stream")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: WorkerSession, context: Context) -> None:
        worker_id = WorkerId(session.worker_id)
        now_s = self._clock.monotonic_s()
        messages, octets = Throttle(MESSAGES, now_s), Throttle(BYTES, now_s)
        while isinstance(message := await context.read(), control_pb2.ToCoordinator):
            if session.ending is not None:
                return
            now_s = self._clock.monotonic_s()
            pause_s = max(messages.take(1, now_s), octets.take(message.ByteSize(), now_s))
            if pause_s > 0:
                # Meanwhile it is held up by flow control, and the others are served.
                await asyncio.sleep(pause_s)
            try:
                record = received(message)
            except RefusedError as error:
                session.end(Ending(error.refusal, str(error)))
                return
            said = WorkerSaid(session.number, worker_id, record)
            if isinstance(record, Heartbeat):
                self._acknowledge(session, now_s)
                self._loop.post_sign(said)
            elif isinstance(record, Telemetry):
                self._loop.post_sign(said)
            elif isinstance(record, ReachReport):
                if self._reach is not None:
                    self._reach.reported(session, peer_host(context), record)
            else:
                if isinstance(record, PeerUnreachable) and self._reach is not None:
                    self._reach.doubted(record.worker_id)
                await self._loop.post(said)

    def _acknowledge(self, session: WorkerSession, now_s: float) -> None:
        """The first heartbeat of a stream, and later those whose answer says something."""
        interval_s = self._heartbeat_interval_s()
        if worth_an_answer(now_s - session.acknowledged_at_s, session.told_interval_s, interval_s):
            session.acknowledged_at_s, session.told_interval_s = now_s, interval_s
            ack = control_pb2.HeartbeatAck(
                wall_time_s=self._clock.now().wall_s, heartbeat_interval_s=interval_s
            )
            session.send(control_pb2.ToWorker(heartbeat_ack=ack), may_drop=True)

    async def _write(self, session: WorkerSession, context: Context) -> None:
        while (message := await session.next()) is not None:
            await context.write(message)

    # ------------------------------------------------------------------ owner

    async def Status(self, request: control_pb2.StatusRequest, context: Context) -> control_pb2.StatusReply:
        return self._owner.reply(request)

    async def Watch(
        self, request: control_pb2.StatusRequest, context: Context
    ) -> AsyncIterator[control_pb2.StatusReply]:
        try:
            async with aclosing(self._owner.watch(request)) as replies:
                async for reply in replies:
                    yield reply
        except RefusedError as error:
            await abort_with(context, error)

    async def Stop(self, request: control_pb2.StopRequest, context: Context) -> control_pb2.StopReply:
        return await self._owner.stop(request)

    async def Why(self, request: control_pb2.WhyRequest, context: Context) -> control_pb2.WhyReply:
        return await _answered(self._owner.why(request), context)

    async def Advise(self, request: control_pb2.AdviceWanted, context: Context) -> control_pb2.AdviceGiven:
        return await _answered(self._owner.advise(request), context)

    async def Pause(self, request: control_pb2.PauseRequest, context: Context) -> control_pb2.CommandReply:
        return await _answered(self._owner.pause(request), context)

    async def Resume(self, request: control_pb2.ResumeRequest, context: Context) -> control_pb2.CommandReply:
        return await _answered(self._owner.resume(request), context)

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.CommandReply:
        return await _answered(self._owner.drain(request), context)

    async def Evict(self, request: control_pb2.EvictRequest, context: Context) -> control_pb2.CommandReply:
        return await _answered(self._owner.evict(request), context)

    async def CreateInvite(
        self, request: control_pb2.CreateInviteRequest, context: Context
    ) -> control_pb2.Invite:
        return await _answered(self._owner.create_invite(request), context)

    async def ListInvites(
        self, request: control_pb2.ListInvitesRequest, context: Context
    ) -> control_pb2.InviteList:
        return self._owner.list_invites()

    async def RevokeInvite(
        self, request: control_pb2.RevokeInviteRequest, context: Context
    ) -> control_pb2.RevokeInviteReply:
        return await _answered(self._owner.revoke_invite(request), context)


async def _answered(answer: Awaitable[R], context: Context) -> R:
    """The answer, or the coded reason why there is none."""
    try:
        return await answer
    except RefusedError as error:
        refused = error
    except OSError as error:
        refused = RefusedError(
            Refusal.BUSY, f"The coordinator cannot record this ({error.strerror}): free some disk space."
        )
    await abort_with(context, refused)
