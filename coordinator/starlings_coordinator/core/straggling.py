"""Who is slower than planned, by how much, and why. Pure: figures in, verdicts out.

A worker's pace is the seconds that it needs per microbatch: those of its device or those of its uplink, whichever are
more, since they overlap. What counts is how much longer they are than planned, on a logarithmic scale, smoothed over
`SMOOTH_S`, and less what the swarm as a whole is off its plan (the lower median of all: a plan that was too rosy makes
nobody a straggler, and neither does a machine room that got warm). Three colours, as fault detectors have them:

    green   as planned
    yellow  slower: it gets less work (its peers' routers see its queue, its leases shrink; its slots hold fewer steps)
    red     so slow that somebody else should hold its stages

A worse colour comes as soon as its threshold is passed, a better one when the pace was below a lower one for
`CALM_S`: a pace that wanders about a threshold changes nobody's colour every minute.

| what happens | what follows |
| --- | --- |
| no pass since the last heartbeat | nothing new is known, the verdict stays |
| a new span, or a new life | forgotten: it begins green |
| everybody is slower than planned | nobody is a straggler |
| a single holder | it is compared with itself: never a straggler |
| its results wait for room at its peers | cause QUEUE, for people; its own pace counts, so it is not blamed |
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from starlings_protos.messages import SlowedBy, WorkerId

# Time constant of the average: twice as slow is yellow after 7 s and red after 30.
SMOOTH_S = 15.0
# No single figure moves the average by more than this part of the way.
STEP_MOST = 0.3
# Figures before a verdict: the first passes warm caches up.
FIGURES_LEAST = 4
# A pace this many times the planned one is enough for the colour, and below the second it is over. Closer together
# (1.3 and 1.15) figures that wander by a fifth change a colour up to twelve times an hour.
YELLOW, YELLOW_OVER = 1.35, 1.1
RED, RED_OVER = 1.8, 1.35
CALM_S = 30.0
# Figures by which a worker says what sending is like where nothing was planned.
UPLINK_FIGURES = 8


class Colour(enum.IntEnum):
    GREEN = 0
    YELLOW = 1
    RED = 2


class Cause(enum.Enum):
    """What the time goes into."""

    NONE = ""
    COMPUTE = "compute"
    UPLINK = "uplink"
    QUEUE = "queue"
    HEAT = "heat"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a worker measured lately, and what was planned. Seconds per microbatch.

    Args:
        compute_s, planned_compute_s: its device, over the stages of its span.
        push_s: sending one result. planned_push_s: 0 where the uplink's rate is not known.
        room_s: until a peer had room for a result.
    """

    compute_s: float
    planned_compute_s: float
    push_s: float = 0.0
    planned_push_s: float = 0.0
    room_s: float = 0.0
    slowed_by: SlowedBy = SlowedBy.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Verdict:
    """`slowdown`: its pace over the planned one, less what all are off; 1 = as planned."""

    colour: Colour
    slowdown: float
    cause: Cause

    def words(self) -> str:
        """ "" when there is nothing to say."""
        if self.colour is Colour.GREEN:
            return ""
        return f"{self.slowdown:.1f}x slower than planned: {_WORDS[self.cause]}"


_WORDS = {
    Cause.NONE: "for no known reason",
    Cause.COMPUTE: "its device takes longer per microbatch",
    Cause.UPLINK: "its uplink sends slower than it did",
    Cause.QUEUE: "its peers have no room for what it computes",
    Cause.HEAT: "its device is too hot and runs at a lower clock",
    Cause.POWER: "its device is at its power limit",
}
WELL = Verdict(Colour.GREEN, 1.0, Cause.NONE)


class Pace:
    """Of one worker under one plan."""

    __slots__ = ("_at_s", "_below_s", "_count", "_figures", "_push_s", "log", "verdict")

    def __init__(self) -> None:
        # Of pace over plan, smoothed.
        self.log = 0.0
        self.verdict = WELL
        self._count = 0
        self._at_s = 0.0
        self._figures: Figures | None = None
        # What sending took at first, where nothing was planned.
        self._push_s = 0.0
        # Since when the pace was below the threshold at which the present colour is over.
        self._below_s: float | None = None

    @property
    def known(self) -> bool:
        return self._count >= FIGURES_LEAST

    def observe(self, figures: Figures, now_s: float) -> None:
        """Figures that are new. Those that make no sense are left out."""
        if not (figures.compute_s > 0 and figures.planned_compute_s > 0):
            return
        self._figures = figures
        if figures.push_s > 0 and self._count < UPLINK_FIGURES:
            self._push_s += (figures.push_s - self._push_s) / (self._count + 1)
        # A far peer's answer takes its time whatever the rate, so sending is never planned to take less than at first.
        planned_s = max(figures.planned_compute_s, figures.planned_push_s, self._push_s)
        new = math.log(max(figures.compute_s, figures.push_s) / planned_s)
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s, self._count = now_s, self._count + 1
        weight = min(STEP_MOST, 1 - math.exp(-passed_s / SMOOTH_S))
        if self._count <= FIGURES_LEAST:
            weight = max(weight, 1 / self._count)
        self.log += weight * (new - self.log)

    def judge(self, level: float, now_s: float) -> Verdict:
        """`level`: log of what the swarm as a whole is off its plan."""
        if self.known:
            slowdown = math.exp(self.log - level)
            colour = self._colour(slowdown, now_s)
            self.verdict = Verdict(colour, slowdown, self._cause(colour))
        return self.verdict

    def _colour(self, slowdown: float, now_s: float) -> Colour:
        present = self.verdict.colour
        worse = Colour.RED if slowdown >= RED else Colour.YELLOW if slowdown >= YELLOW else Colour.GREEN
        over = {Colour.RED: RED_OVER, Colour.YELLOW: YELLOW_OVER}.get(present, 0.0)
        if worse > present or slowdown >= over:
            self._below_s = None
            return max(worse, present)
        if self._below_s is None:
            self._below_s = now_s
        if now_s - self._below_s < CALM_S:
            return present
        self._below_s = None
        return Colour.YELLOW if present is Colour.RED and slowdown >= YELLOW_OVER else Colour.GREEN

    def _cause(self, colour: Colour) -> Cause:
        figures = self._figures
        if figures is None:
            return Cause.NONE
        if colour is Colour.GREEN:
            held_up = figures.room_s > max(figures.compute_s, figures.push_s)
            return Cause.QUEUE if held_up else Cause.NONE
        if figures.push_s > figures.compute_s:
            return Cause.UPLINK
        return {SlowedBy.HEAT: Cause.HEAT, SlowedBy.POWER: Cause.POWER}.get(figures.slowed_by, Cause.COMPUTE)


def swarm_level(logs: Iterable[float]) -> float:
    """The lower median: half of all may be slow, and the others are what is normal. 0 for nobody."""
    known = sorted(logs)
    return known[(len(known) - 1) // 2] if known else 0.0


class Paces:
    """All holders of a plan."""

    def __init__(self) -> None:
        self._paces: dict[WorkerId, Pace] = {}

    def keep(self, workers: Iterable[WorkerId]) -> None:
        """Of all others nothing is known any more."""
        for gone in self._paces.keys() - set(workers):
            del self._paces[gone]

    def forget(self, worker_id: WorkerId) -> None:
        self._paces.pop(worker_id, None)

    def observe(self, worker_id: WorkerId, figures: Figures, now_s: float) -> None:
        self._paces.setdefault(worker_id, Pace()).observe(figures, now_s)

    @property
    def level(self) -> float:
        return swarm_level(pace.log for pace in self._paces.values() if pace.known)

    def judge(self, now_s: float) -> dict[WorkerId, Verdict]:
        """Those whose colour has changed, by id."""
        level, changed = self.level, {}
        for worker_id, pace in sorted(self._paces.items()):
            before = pace.verdict.colour
            if (verdict := pace.judge(level, now_s)).colour is not before:
                changed[worker_id] = verdict
        return changed

    def verdict(self, worker_id: WorkerId) -> Verdict:
        pace = self._paces.get(worker_id)
        return pace.verdict if pace is not None else WELL
