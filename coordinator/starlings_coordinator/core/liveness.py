"""When silence becomes loss: a phi-accrual detector per worker (Hayashibara et al. 2004, section 4), pure.

The intervals between signs of life are taken as normally distributed; phi = -log10 P(an interval this long). A
floor keeps a regular worker from being accused for one late packet; it follows the interval at which the worker may
send at present, which grows and shrinks with the swarm.

From half of the floor on a silent worker is *suspect*: it gets no new work, and a word of it ends that. Peers that
cannot reach it either confirm the suspicion, and what is left of the wait shrinks with the logarithm of how many they
are: Lifeguard (Dadgar, Phillips, Currey 2018, section IV-B), which made SWIM's wrong verdicts rare at the same speed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

# phi 8 means one wrong verdict in 10^8 intervals, if the model held.
PHI_LIMIT = 8.0
WINDOW = 64
# A hung worker is known as lost after at most this many floors.
CEILING = 1.25
# A pace that has changed by more than this part of what a worker was told is told within the shorter time, and the
# clock within the longer. Answers cost more than everything else about a heartbeat.
PACE_TOLERANCE = 0.05
PACE_WITHIN_S = 10.0
# Clocks that drift apart by a tenth of a second meanwhile; assignments, which are judged by them, have 30 s of leeway.
CLOCK_WITHIN_S = 300.0


# A silence is suspicious from this part of the floor on if the statistics say so, and from the second on in any case.
SUSPECT_FROM, SUSPECT_AT = 0.5, 0.75
PHI_SUSPECT = 3.0
# So many peers that confirm a suspicion shorten the wait to its least.
CONFIRMATIONS = 3


def patience_s(least_s: float, most_s: float, confirmations: int) -> float:
    """Of a silence until its worker is given up: `most_s` when nobody confirms it, `least_s` with `CONFIRMATIONS`."""
    share = math.log(min(confirmations, CONFIRMATIONS) + 1) / math.log(CONFIRMATIONS + 1)
    return most_s - (most_s - least_s) * share


@dataclass(slots=True)
class SilenceDetector:
    """`floor_s` is of when the worker connected. Whatever the statistics say, no shorter silence is a loss, and
    `CEILING` times the floor of now is one.
    """

    floor_s: float
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

    def suspect(self, now_s: float, present_floor_s: float) -> bool:
        floor_s = max(self.floor_s, present_floor_s)
        silent_s = now_s - self.last_heard_s
        if silent_s < SUSPECT_FROM * floor_s:
            return False
        return silent_s >= SUSPECT_AT * floor_s or self.phi(now_s) >= PHI_SUSPECT

    def lost(self, now_s: float, present_floor_s: float, confirmations: int = 0) -> bool:
        """The larger of both floors counts: the worker may not have heard that it should send more often.

        Args:
            confirmations: how many peers could not reach it either since it was heard last.
        """
        floor_s = max(self.floor_s, present_floor_s)
        silent_s = now_s - self.last_heard_s
        if confirmations and silent_s >= patience_s(SUSPECT_FROM * floor_s, CEILING * floor_s, confirmations):
            return True
        if silent_s < floor_s:
            return False
        return silent_s >= CEILING * floor_s or self.phi(now_s) >= PHI_LIMIT


def worth_an_answer(quiet_s: float, told_s: float, present_s: float) -> bool:
    """Whether to acknowledge a heartbeat, `quiet_s` after the last acknowledgement, which named the pace `told_s`."""
    if quiet_s >= CLOCK_WITHIN_S:
        return True
    return quiet_s >= PACE_WITHIN_S and abs(present_s - told_s) > PACE_TOLERANCE * told_s


@dataclass(slots=True)
class SlowestBeat:
    """The longest interval that some connected worker may still keep between two heartbeats, up to `PACE_TOLERANCE`.

    A longer one holds at once. A shorter one holds when everybody has been told: an acknowledgement follows a
    heartbeat, and the worker sleeps its old interval once more.
    """

    told_s: float
    interval_s: float = 0.0
    _seen_at_s: float = 0.0
    _since_then_s: float = 0.0

    def look(self, now_s: float, present_s: float) -> float:
        """`interval_s`, when workers are told `present_s` from now on."""
        self._since_then_s = max(self._since_then_s, present_s)
        if present_s >= self.interval_s:
            self.interval_s, self._seen_at_s, self._since_then_s = present_s, now_s, 0.0
        elif now_s - self._seen_at_s > self.told_s + 2 * self.interval_s:
            self.interval_s, self._seen_at_s, self._since_then_s = self._since_then_s, now_s, present_s
        return self.interval_s

    def forgive(self, now_s: float) -> None:
        """Nobody was told anything up to now."""
        self._seen_at_s = now_s
