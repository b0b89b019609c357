"""What a timed simulation counts: where every worker's seconds went, and what became of the job."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from starlings_protos.messages import WorkerId
from starlings_simulator.clock import Clock

# Useful work of a device, work that training with others costs, and reasons to have none.
COMPUTE = "compute"
OPTIMIZER = "optimizer"
EXCHANGE = "exchange"
STATE = "state"
START = "start"
NO_PLACE = "no place"
NO_LEASE = "no lease"
PIPELINE = "pipeline"
BARRIER = "barrier"
CAUSES = (COMPUTE, OPTIMIZER, EXCHANGE, STATE, START, NO_PLACE, NO_LEASE, PIPELINE, BARRIER)


@dataclass(frozen=True, slots=True)
class Point:
    """The job at one time: tokens acknowledged since the beginning, workers there, and holders of the plan."""

    at_s: float
    tokens: int
    workers: int
    holders: int


@dataclass(slots=True)
class Books:
    """One per simulation. A worker's time is divided among `CAUSES`: it is always in exactly one."""

    clock: Clock
    seconds: dict[WorkerId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    points: list[Point] = field(default_factory=list)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    # Of workers that are there: what they do, and since when.
    _now: dict[WorkerId, tuple[str, float]] = field(default_factory=dict)

    def begin(self, worker_id: WorkerId, cause: str) -> None:
        """From now on the worker's time goes into `cause`."""
        self._settle(worker_id)
        self._now[worker_id] = (cause, self.clock.now_s)

    def gone(self, worker_id: WorkerId) -> None:
        self._settle(worker_id)
        self._now.pop(worker_id, None)

    def close(self) -> None:
        """Account for everybody up to now."""
        for worker_id in list(self._now):
            self.begin(worker_id, self._now[worker_id][0])

    def note(self, kind: str, text: str) -> None:
        self.events.append((self.clock.now_s, kind, text))

    def present_s(self, worker_id: WorkerId) -> float:
        return sum(self.seconds[worker_id].values())

    def total(self) -> Counter[str]:
        return sum((Counter(spent) for spent in self.seconds.values()), Counter())

    def _settle(self, worker_id: WorkerId) -> None:
        if worker_id in self._now:
            cause, since_s = self._now[worker_id]
            self.seconds[worker_id][cause] += self.clock.now_s - since_s  # type: ignore[assignment]
