"""Many committed blocks from several donors at once: spread over them, resumed from another one, bounded in memory.

    await fetch_blocks(Fetcher(...), blocks, place_of, done, at_once=3)

Each block is one `BlockInbox`; a broken transfer goes on at its byte with whoever is the best donor then, and only a
tensor whose hash is wrong is fetched again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from starlings_protos import data_pb2
from starlings_protos.state_transfer import (
    CHUNK_BYTES,
    BlockInbox,
    OpenTransfer,
    Place,
    StateTransferError,
)

# A donor that failed this often with one block, without getting anywhere, is not asked for it again.
TRIES_PER_DONOR = 3
# Pauses after a failure of everybody, and while donors are busy, seconds.
PAUSE_FIRST_S = 0.1
PAUSE_MOST_S = 2.0


class DonorBusy(StateTransferError):
    """The donor has it, or will have it, but cannot serve it now."""


class DonorLacks(StateTransferError):
    """The donor does not have it and will not."""


@dataclass(slots=True)
class Donor:
    """Who may be asked. `may_have`: false when the donor surely lacks a block, such as one outside its span."""

    id: str
    open: OpenTransfer
    may_have: Callable[[str], bool] = lambda _: True
    # Asked only when nobody else is left: the keeper, on the owner's small machine.
    last_resort: bool = False


@dataclass(slots=True)
class Fetcher:
    """Fetches blocks of one version. `donors` is asked at every choice: the plan may name others meanwhile."""

    donors: Callable[[], Sequence[Donor]]
    version: int
    optimizer: bool
    # No block is larger.
    limit_bytes: int
    rng: random.Random
    # Told of each transfer that broke: donor and why.
    on_failure: Callable[[str, str, Exception], None]
    # How long busy donors are waited for, per block, seconds.
    patience_s: float = 60.0
    _active: Counter[str] = field(default_factory=Counter)
    # Bytes by donor, so that the load is spread; failures by donor, so that a bad one is asked last.
    _bytes: Counter[str] = field(default_factory=Counter)
    _failures: Counter[str] = field(default_factory=Counter)

    async def block(self, name: str, place: Place | None = None) -> BlockInbox:
        """One block, complete and verified.

        Raises:
            StateTransferError: no donor could deliver it; the message says who failed how.
        """
        inbox = BlockInbox(self.version, name, self.limit_bytes, place)
        tries: Counter[str] = Counter()
        busy: Counter[str] = Counter()
        reasons: dict[str, str] = {}
        waited_s, pause_s = 0.0, PAUSE_FIRST_S
        while not inbox.complete:
            donor = self._choose(name, tries, busy)
            if donor is None:
                raise StateTransferError(self._nobody(name, reasons))
            before = inbox.offset
            try:
                await self._transfer(donor, inbox, name)
            except DonorBusy as error:
                reasons[donor.id] = str(error)
                busy[donor.id] += 1
                if waited_s >= self.patience_s:
                    raise StateTransferError(self._nobody(name, reasons)) from None
                await asyncio.sleep(pause_s)
                waited_s, pause_s = waited_s + pause_s, min(PAUSE_MOST_S, 2 * pause_s)
            except Exception as error:
                reasons[donor.id] = str(error)
                self._failures[donor.id] += 1
                self.on_failure(donor.id, name, error)
                if isinstance(error, DonorLacks):
                    tries[donor.id] = TRIES_PER_DONOR
                elif inbox.offset < before + CHUNK_BYTES:
                    tries[donor.id] += 1
        return inbox

    async def _transfer(self, donor: Donor, inbox: BlockInbox, name: str) -> None:
        request = data_pb2.StateRequest(
            version=self.version, blocks=[name], optimizer=self.optimizer, offset=inbox.offset
        )
        inbox.begin_transfer()
        self._active[donor.id] += 1
        transfer = donor.open(request)
        try:
            async for frame in transfer:
                inbox.feed(frame)
                self._bytes[donor.id] += len(frame.chunk)
            if not inbox.complete:
                raise StateTransferError(f"the transfer ended after {inbox.offset} bytes")
        finally:
            self._active[donor.id] -= 1
            # A call that was given up must not go on in the background.
            if isinstance(transfer, AsyncGenerator):
                await transfer.aclose()

    def _choose(self, block: str, tries: Counter[str], busy: Counter[str]) -> Donor | None:
        """Of those that may have it: who failed least, serves least at present, and has served least so far."""
        left = [d for d in self.donors() if d.may_have(block) and tries[d.id] < TRIES_PER_DONOR]
        left = [d for d in left if not d.last_resort] or left
        return min(
            left,
            key=lambda d: (
                tries[d.id] + busy[d.id],
                self._failures[d.id] > 0,
                self._active[d.id],
                self._bytes[d.id] // CHUNK_BYTES,
                self.rng.random(),
            ),
            default=None,
        )

    def _nobody(self, block: str, reasons: dict[str, str]) -> str:
        said = "; ".join(f"{donor}: {why}" for donor, why in reasons.items()) or "none was named"
        return f"no donor has {block} at version {self.version}: {said}"


async def fetch_blocks(
    fetcher: Fetcher,
    blocks: Iterable[str],
    place_of: Callable[[str], Place | None],
    done: Callable[[str, BlockInbox], Awaitable[None]],
    *,
    at_once: int,
) -> None:
    """All blocks, at most `at_once` at a time; `done` is awaited with each complete one.

    Raises:
        StateTransferError: a block could not be had; the others are given up. Also what `done` raises.
    """
    left = list(blocks)[::-1]

    async def work() -> None:
        while left:
            name = left.pop()
            await done(name, await fetcher.block(name, place_of(name)))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(left))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
