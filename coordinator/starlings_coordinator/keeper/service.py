"""The keeper's data port: `FetchState` for workers that load a span. Everything else of the data plane is not here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from starlings_coordinator.keeper.library import NotHeld, StateLibrary
from starlings_protos import data_pb2, data_pb2_grpc
from starlings_protos.assignments import assignment_from_metadata, verify_assignment
from starlings_protos.errors import RefusedError, abort, abort_with
from starlings_protos.messages import Refusal
from starlings_protos.peers import peer_identity
from starlings_protos.state_transfer import state_frames

BLOCKS_LIMIT = 4096
# Transfers at once: they share one uplink, and each holds one block. More wait for their turn.
TRANSFERS_AT_ONCE = 8
# Beyond these, workers are told to come back later.
WAITING_TRANSFERS_LIMIT = 256
# A reader that takes nothing for this long gives its place to another; it may resume by offset.
STALLED_AFTER_S = 60.0

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Admission:
    """Who may fetch: workers with a valid assignment of this job, and no life older than the newest seen."""

    def __init__(self, job: str, assignment_key_der: bytes) -> None:
        self._job = job
        self._key_der = assignment_key_der
        self._incarnations: dict[str, int] = {}

    def check(self, context: Context, now_wall_s: float) -> str:
        """The caller's id.

        Raises:
            RefusedError: NOT_YOU or ASSIGNMENT.
        """
        caller = peer_identity(context)
        signed = assignment_from_metadata(context.invocation_metadata())
        claim = verify_assignment(
            self._key_der, signed, worker_id=caller.id, job=self._job, now_wall_s=now_wall_s
        )
        if claim.incarnation < self._incarnations.get(caller.id, 0):
            raise RefusedError(Refusal.ASSIGNMENT, "The assignment is of an earlier life of this worker.")
        self._incarnations[caller.id] = claim.incarnation
        return caller.id


class KeeperService(data_pb2_grpc.DataServicer):
    def __init__(
        self,
        library: StateLibrary,
        admission: Admission,
        *,
        now_wall_s: Callable[[], float],
        stalled_after_s: float = STALLED_AFTER_S,
    ) -> None:
        """`now_wall_s`: seconds since 1970 by the coordinator's clock."""
        self._now_wall_s = now_wall_s
        self._library = library
        self._admission = admission
        self._stalled_after_s = stalled_after_s
        self._places = asyncio.Semaphore(TRANSFERS_AT_ONCE)
        self._waiting = 0

    async def Forward(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def Backward(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def Contribute(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def Aggregate(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def Pair(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def Group(self, request_iterator: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def TellPair(self, request: object, context: Context) -> data_pb2.Receipt:
        return await _not_here(context)

    async def FetchState(  # type: ignore[override]
        self, request: data_pb2.StateRequest, context: Context
    ) -> None:
        """Not a generator: writing ourselves is what lets a stalled reader be noticed."""
        try:
            caller = self._admission.check(context, self._now_wall_s())
            _check_request(request)
        except RefusedError as error:
            await abort_with(context, error)
        if self._waiting >= WAITING_TRANSFERS_LIMIT:
            await abort(context, Refusal.BUSY, "The keeper has too many transfers waiting; try again later.")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            refused = await self._send_blocks(request, context)
        finally:
            # Before the status is sent: a reader that has stalled takes that only when it reads again.
            self._places.release()
        if refused is not None:
            logger.warning("transfer to %s: %s", caller, refused)
            await abort_with(context, refused)

    async def _send_blocks(self, request: data_pb2.StateRequest, context: Context) -> RefusedError | None:
        """Why the transfer could not be completed, if it could not."""
        skip = request.offset
        for block in request.blocks:
            try:
                served = await asyncio.to_thread(
                    self._library.served, request.version, block, optimizer=request.optimizer
                )
            except NotHeld as error:
                return RefusedError(Refusal.NOT_HELD, f"The keeper cannot serve this: {error}.")
            for frame in state_frames([served], skip):
                try:
                    await asyncio.wait_for(context.write(frame), self._stalled_after_s)
                except TimeoutError:
                    return RefusedError(Refusal.LIMIT, f"Nothing was read for {self._stalled_after_s:.0f} s.")
            skip = max(0, skip - served.header().total_bytes)
        return None


async def _not_here(context: Context) -> NoReturn:
    await abort(context, Refusal.NOT_HELD, "The keeper holds no stage: it serves committed state only.")


def _check_request(request: data_pb2.StateRequest) -> None:
    """Raises RefusedError."""
    if not 1 <= len(request.blocks) <= BLOCKS_LIMIT:
        raise RefusedError(Refusal.LIMIT, f"{len(request.blocks)} blocks; 1 to {BLOCKS_LIMIT} are allowed.")
    if any(len(block) > 128 for block in request.blocks):
        raise RefusedError(Refusal.LIMIT, "A block's name is too long.")
