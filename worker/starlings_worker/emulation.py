"""Pretending to be a slower device: after a block of t seconds of computing, sleep t (1/s - 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Sleeping less than this costs more than it is worth; the debt is carried over.
_SLEEP_AT_LEAST_S = 0.0005


class Throttle:
    """For one compute thread."""

    def __init__(self, relative_speed: float, clock: Callable[[], float] = time.thread_time) -> None:
        """
        Args:
            relative_speed: s, 0 < s <= 1; 0 or 1 emulate nothing.
            clock: what counts as computing, in seconds. On a CPU the processor time of the thread, so that other
                processes on the machine do not make the emulated device slower than it should be; on an accelerator,
                which works while the thread waits, elapsed time.
        """
        if not 0.0 <= relative_speed <= 1.0:
            raise ValueError(f"relative speed {relative_speed} is outside 0..1")
        self._factor = 1.0 / relative_speed - 1.0 if relative_speed else 0.0
        self._clock = clock
        self._debt_s = 0.0

    @property
    def active(self) -> bool:
        return self._factor > 0.0

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block of computing on the calling thread; sleeps before it returns."""
        if not self.active:
            yield
            return
        begin = self._clock()
        try:
            yield
        finally:
            self._debt_s += (self._clock() - begin) * self._factor
            if self._debt_s >= _SLEEP_AT_LEAST_S:
                before = time.monotonic()
                time.sleep(self._debt_s)
                self._debt_s -= time.monotonic() - before
