"""Pretending to be a slower device: after a block of t seconds of computing, sleep t (1/s - 1); or until the block has
taken its part of a fixed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Of a microbatch's way through a model and back: a backward pass computes two products where a forward pass has one.
FORWARD_PART, BACKWARD_PART = 1 / 3, 2 / 3
# Sleeping less than this costs more than it is worth; the debt is carried over.
_SLEEP_AT_LEAST_S = 0.0005


class Throttle:
    """For one compute thread."""

    def __init__(
        self,
        relative_speed: float,
        clock: Callable[[], float] = time.thread_time,
        *,
        pass_s: float = 0.0,
    ) -> None:
        """
        Args:
            relative_speed: s, 0 < s <= 1; 0 or 1 emulate nothing.
            clock: what counts as computing, in seconds. On a CPU the processor time of the thread, so that other
                processes on the machine do not make the emulated device slower than it should be; on an accelerator,
                which works while the thread waits, elapsed time.
            pass_s: what a microbatch's way through the whole model and back takes, whatever the speed; 0 = as long as
                it does. Only blocks that say which part of it they are take that long.
        """
        if not 0.0 <= relative_speed <= 1.0:
            raise ValueError(f"relative speed {relative_speed} is outside 0..1")
        self._factor = 1.0 / relative_speed - 1.0 if relative_speed else 0.0
        self._clock = clock
        self._pass_s = pass_s
        self._debt_s = 0.0

    @property
    def active(self) -> bool:
        return self._factor > 0.0 or self._pass_s > 0.0

    @contextmanager
    def block(self, part: float = 0.0) -> Iterator[None]:
        """A block of computing on the calling thread; sleeps before it returns.

        Args:
            part: of a microbatch's way through the whole model and back.
        """
        if not self.active:
            yield
            return
        begin, begin_s = self._clock(), time.monotonic()
        try:
            yield
        finally:
            if self._pass_s and part:
                # Who was late once makes up for it soon, and not for ever.
                self._debt_s = max(
                    -self._pass_s, self._debt_s + part * self._pass_s - (time.monotonic() - begin_s)
                )
            else:
                self._debt_s += (self._clock() - begin) * self._factor
            if self._debt_s >= _SLEEP_AT_LEAST_S:
                before = time.monotonic()
                time.sleep(self._debt_s)
                self._debt_s -= time.monotonic() - before
