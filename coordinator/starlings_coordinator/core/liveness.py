"""When silence becomes loss: a phi-accrual detector per worker (Hayashibara et al. 2004, section 4), pure.

The intervals between signs of life are taken as normally distributed; phi = -log10 P(an interval this long). A
floor keeps a
regular worker from being accused for one late packet.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

# phi 8 means one wrong verdict in 10^8 intervals, if the model held.
PHI_LIMIT = 8.0
WINDOW = 64


@dataclass(slots=True)
class SilenceDetector:
    """`floor_s` and `ceiling_s` bound the verdict from both sides, whatever the statistics say."""

    floor_s: float
    ceiling_s: float
    last_heard_s: float
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def heard(self, now_s: float) -> None:
        self.intervals_s.append(max(0.0, now_s - self.last_heard_s))
        self.last_heard_s = now_s

    def forgive(self, now_s: float) -> None:
        """The coordinator itself was asleep: silence up to now proves nothing."""
        self.last_heard_s = now_s

    def phi(self, now_s: float) -> float:
        if len(self.intervals_s) < 4:
            return 0.0
        count = len(self.intervals_s)
        mean_s = sum(self.intervals_s) / count
        variance = sum((x - mean_s) ** 2 for x in self.intervals_s) / count
        deviation_s = max(math.sqrt(variance), 0.25 * mean_s, 0.05)
        tail = 0.5 * math.erfc((now_s - self.last_heard_s - mean_s) / (deviation_s * math.sqrt(2)))
        return -math.log10(max(tail, 1e-300))

    def lost(self, now_s: float) -> bool:
        silent_s = now_s - self.last_heard_s
        if silent_s < self.floor_s:
            return False
        return silent_s >= self.ceiling_s or self.phi(now_s) >= PHI_LIMIT
