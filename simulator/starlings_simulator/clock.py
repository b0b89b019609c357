"""Virtual time:

a queue of calls, run one after another in order of their time, then of their being asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Call = Callable[[], None]


@dataclass(slots=True)
class Timer:
    """A call to come; `cancel` makes it a no-op."""

    call: Call | None

    def cancel(self) -> None:
        self.call = None


@dataclass(slots=True)
class Clock:
    now_s: float = 0.0
    _sequence: int = 0
    _queue: list[tuple[float, int, Timer]] = field(default_factory=list)

    def at(self, time_s: float, call: Call) -> Timer:
        """Run `call` at `time_s`, or now if that is past; equal times keep the order of asking."""
        timer = Timer(call)
        self._sequence += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._sequence, timer))
        return timer

    def after(self, delay_s: float, call: Call) -> Timer:
        return self.at(self.now_s + delay_s, call)

    def step(self) -> bool:
        """Run the next call; False when there is none."""
        while self._queue:
            time_s, _, timer = heapq.heappop(self._queue)
            if timer.call is None:
                continue
            self.now_s = time_s
            timer.call()
            return True
        return False
