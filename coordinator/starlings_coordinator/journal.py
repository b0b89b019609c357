"""Records on their way to the store: when a commit happens, and when a snapshot replaces the log.

A turn's records are one commit. Commits are spaced so that a slow disk (an SD card syncs in tens of milliseconds) is
not kept busy all the time, and a fast one delays nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlings_coordinator.clock import Clock
from starlings_coordinator.store import Saved, Store

T = TypeVar("T")

# No commit waits longer than this for others to share it.
LONGEST_SPACING_S = 0.05
# The disk syncs for at most one part in this many of the time, as long as the limit above allows.
SPACING_PER_COMMIT = 4.0
# One slow sync should not slow the next hundred: weight of the newest duration in the mean.
_MEAN_WEIGHT = 0.2
SNAPSHOT_AFTER_ENTRIES = 5000
SNAPSHOT_AFTER_BYTES = 4 << 20


def commit_spacing_s(mean_commit_s: float) -> float:
    """Least time between the beginnings of two commits, given how long one takes."""
    return min(LONGEST_SPACING_S, SPACING_PER_COMMIT * mean_commit_s)


class Journal:
    """The store behind one thread of its own, so that a syncing disk does not stop the event loop."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="store")
        self._mean_commit_s = 0.0
        self._last_begin_s = float("-inf")

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def load(self) -> Saved:
        return await self._in_thread(self._store.load)

    async def spacing(self) -> None:
        """Waits until the next commit may begin; events that arrive meanwhile share it."""
        wait_s = self._last_begin_s + commit_spacing_s(self._mean_commit_s) - self._monotonic_s()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def commit(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Durable on return. Raises StoreError, and then nothing of `records` is stored."""
        wall_s = self._clock.now().wall_s
        self._last_begin_s = self._monotonic_s()
        await self._in_thread(lambda: self._store.append(records, wall_s))
        took_s = self._monotonic_s() - self._last_begin_s
        self._mean_commit_s += _MEAN_WEIGHT * (took_s - self._mean_commit_s)

    @property
    def wants_snapshot(self) -> bool:
        return (
            self._store.log_entries >= SNAPSHOT_AFTER_ENTRIES or self._store.log_bytes >= SNAPSHOT_AFTER_BYTES
        )

    @property
    def has_entries(self) -> bool:
        return self._store.log_entries > 0

    async def snapshot(self, payload: bytes) -> None:
        """`payload` must include every committed record. Raises StoreError; the log is then as it was."""
        wall_s = self._clock.now().wall_s
        await self._in_thread(lambda: self._store.write_snapshot(payload, wall_s))

    async def close(self) -> None:
        await self._in_thread(self._store.close)
        self._thread.shutdown()

    def _monotonic_s(self) -> float:
        return self._clock.now().monotonic_s
