"""Answers to FetchState: snapshots, and updates of committed steps, to the keeper and to late joiners.

Free of torch, because a worker that leaves serves what it wrote to its disk from a process without it. The donor goes
on training: hashing is done on another thread, and each piece of state gives way to the engine's own transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc.aio

from starlings_protos import data_pb2
from starlings_protos.errors import RefusedError
from starlings_protos.messages import Refusal
from starlings_protos.state_transfer import ServedBlock, state_frames
from starlings_worker.uplink import Uplink, give_way

Context = grpc.aio.ServicerContext[Any, Any]
BLOCKS_PER_REQUEST = 4096
# Transfers at once: more would only make each slower, and each keeps a few MiB in the library's buffers.
TRANSFERS_AT_ONCE = 8
# A reader that takes nothing for this long is given up.
STALLED_AFTER_S = 30.0


class NotHeld(Exception):
    """No snapshot of that version, no such block in it, or an update that is not kept any more."""


class NotYet(Exception):
    """The step that was asked for is not applied here yet."""


class Shelf(Protocol):
    """What can be fetched."""

    def serve(self, version: int, block: str, *, optimizer: bool) -> ServedBlock:
        """One block.

        Raises:
            NotHeld, NotYet: why not.
        """
        ...


def never_busy() -> bool:
    return False


class StateServer:
    """One per data port."""

    def __init__(
        self,
        sent: Callable[[int], None],
        busy: Callable[[], bool] = never_busy,
        stall_s: float = STALLED_AFTER_S,
        uplink: Uplink | None = None,
    ) -> None:
        """
        Args:
            sent: told of the bytes of each frame.
            busy: whether this process is sending something that others wait for.
        """
        self._sent = sent
        self._busy = busy
        self._stall_s = stall_s
        self._uplink = uplink or Uplink()
        self.transfers = 0

    async def serve(self, request: data_pb2.StateRequest, shelf: Shelf, context: Context) -> None:
        """Writes the answer to a call whose caller was checked.

        Raises:
            RefusedError: NOT_HELD; BUSY when it may be asked for again later; LIMIT when the reader stalls.
        """
        if not request.blocks:
            raise RefusedError(Refusal.NOT_HELD, "the request names no block")
        if len(request.blocks) > BLOCKS_PER_REQUEST:
            raise RefusedError(Refusal.LIMIT, f"{len(request.blocks)} blocks in one request")
        if self.transfers >= TRANSFERS_AT_ONCE:
            raise RefusedError(Refusal.BUSY, f"{self.transfers} transfers of state are under way here")
        self.transfers += 1
        try:
            blocks = self._find(request, shelf)
            await asyncio.to_thread(_hash_all, blocks)
            for frame in state_frames(blocks, request.offset):
                await give_way(self._busy)
                await self._uplink.leaves(frame.ByteSize())
                try:
                    async with asyncio.timeout(self._stall_s):
                        await context.write(frame)
                except TimeoutError:
                    raise RefusedError(Refusal.LIMIT, f"nothing was read for {self._stall_s:.0f} s") from None
                self._sent(frame.ByteSize())
        finally:
            self.transfers -= 1

    @staticmethod
    def _find(request: data_pb2.StateRequest, shelf: Shelf) -> list[ServedBlock]:
        try:
            return [
                shelf.serve(request.version, block, optimizer=request.optimizer) for block in request.blocks
            ]
        except NotHeld as error:
            raise RefusedError(Refusal.NOT_HELD, str(error)) from None
        except NotYet as error:
            raise RefusedError(Refusal.BUSY, str(error)) from None


def _hash_all(blocks: Sequence[ServedBlock]) -> None:
    for block in blocks:
        block.header()
