"""The owner's side of the control plane: one request, or a stream of status replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from starlings.directories import control_address
from starlings_protos import channels, connect, control_pb2, control_pb2_grpc
from starlings_protos.errors import StarlingsError, Unreachable, refused_error
from starlings_protos.identity import Identity
from starlings_protos.invite import parse_address

T = TypeVar("T")
# A coordinator answers within milliseconds, unless its disk is very slow.
ANSWER_WITHIN_S = 15.0


class OwnerClient:
    """Speaks with the coordinator of the job in a directory, with the owner certificate that lies there.

    Raises:
        UsageError: the directory has no owner certificate.
        Unreachable: the coordinator does not run, or not where it last did; says the phase.
        RefusedError: it said no.
    """

    def __init__(self, job_directory: Path) -> None:
        self._address = control_address(job_directory)
        self._identity = Identity.load(job_directory / "owner")
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = channels.control_channel(self._address, self._identity)
        self._stub = control_pb2_grpc.ControlStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def status(self, after_event: int = 0) -> control_pb2.StatusReply:
        return await self._ask(self._stub.Status, control_pb2.StatusRequest(after_event=after_event))

    async def watch(self, *, interval_s: float) -> AsyncIterator[control_pb2.StatusReply]:
        """Replies as things change; ends when the coordinator ends the stream."""
        call = self._stub.Watch(control_pb2.StatusRequest(interval_s=interval_s))
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error) from None
        finally:
            call.cancel()

    async def stop(self, reason: str) -> control_pb2.StopReply:
        return await self._ask(self._stub.Stop, control_pb2.StopRequest(reason=reason))

    async def why(self, worker: str) -> control_pb2.WhyReply:
        return await self._ask(self._stub.Why, control_pb2.WhyRequest(worker=worker))

    async def advise(self) -> control_pb2.AdviceGiven:
        return await self._ask(self._stub.Advise, control_pb2.AdviceWanted())

    async def pause(self, reason: str) -> control_pb2.CommandReply:
        return await self._ask(self._stub.Pause, control_pb2.PauseRequest(reason=reason))

    async def resume(self) -> control_pb2.CommandReply:
        return await self._ask(self._stub.Resume, control_pb2.ResumeRequest())

    async def drain(self, worker: str, reason: str) -> control_pb2.CommandReply:
        return await self._ask(self._stub.Drain, control_pb2.DrainRequest(worker=worker, reason=reason))

    async def evict(self, worker: str, for_s: float, reason: str, *, force: bool) -> control_pb2.CommandReply:
        """`for_s`: 0 for as long as the owner wants."""
        request = control_pb2.EvictRequest(worker=worker, for_s=for_s, reason=reason, force=force)
        return await self._ask(self._stub.Evict, request)

    async def readmit(self, worker: str) -> control_pb2.CommandReply:
        return await self._ask(self._stub.Evict, control_pb2.EvictRequest(worker=worker, readmit=True))

    async def create_invite(self, lifetime_s: float, uses: int, role: str) -> control_pb2.Invite:
        request = control_pb2.CreateInviteRequest(lifetime_s=lifetime_s, uses=uses, role=role)
        return await self._ask(self._stub.CreateInvite, request)

    async def list_invites(self) -> control_pb2.InviteList:
        return await self._ask(self._stub.ListInvites, control_pb2.ListInvitesRequest())

    async def revoke_invite(self, token_id: str, workers: bool) -> control_pb2.RevokeInviteReply:
        request = control_pb2.RevokeInviteRequest(token_id=token_id, workers=workers)
        return await self._ask(self._stub.RevokeInvite, request)

    async def _ask(self, method: Callable[..., Awaitable[T]], request: Message) -> T:
        try:
            answer: T = await method(request, timeout=ANSWER_WITHIN_S)
            return answer
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error) from None

    async def _explain(self, error: grpc.aio.AioRpcError) -> StarlingsError:
        """What a failed call means to the owner."""
        refused = refused_error(error)
        if refused is not None:
            return refused
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return await connect.diagnose(parse_address(self._address), self._identity)
        return Unreachable(
            f"The coordinator's answer was cut short ({error.code().name}: {error.details()}). Try again."
        )
