"""What goes wrong in a run, and when: at a time, or in the very moment in which somebody does something."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from starlings_protos.messages import WorkerId


class FaultKind(enum.Enum):
    KILL = "kill"
    KILL_FOR_GOOD = "kill for good"
    KILL_ENGINE = "kill engine"
    FREEZE = "freeze"
    CUT_CONTROL = "cut control"
    CUT_PEERS = "cut peers"
    # Two halves that hear nothing of each other; the coordinator is with those that `side` does not name.
    PARTITION = "partition"
    # In order, for good or for a while.
    DRAIN = "drain"
    LEAVE = "leave and come back"
    CRASH_COORDINATOR = "crash of the coordinator"
    FREEZE_COORDINATOR = "freeze of the coordinator"
    # A power cut: the coordinator and every worker end at once, and come back from log and checkpoints.
    RESTART_EVERYTHING = "restart of everything"
    SLOW = "slow network"
    DISK_FULL = "disk full"
    # A wall clock jumps by a month; the monotonic one goes on.
    WALL_JUMP = "jump of a wall clock"


class Moment(enum.Enum):
    """Something that a fault may wait for, so that it strikes in the middle of it."""

    FORWARD = "in a forward pass"
    BACKWARD = "in a backward pass"
    EXCHANGE = "in the exchange"
    PREPARED = "between Prepared and the commit"
    COMMITTED = "between the commit and the optimizer's end"
    LOAD = "while it loads"
    OBSERVE = "while it copies a version, to join"
    REPLAY = "while it replays a step, to join"
    DONATE = "while another copies a version from it"
    # The coordinator has written the record, and nobody has heard of it.
    COMMIT_WRITTEN = "when a commit is written"
    PLAN_WRITTEN = "when a plan is written"


OF_WORKERS = (
    Moment.FORWARD,
    Moment.BACKWARD,
    Moment.EXCHANGE,
    Moment.PREPARED,
    Moment.COMMITTED,
    Moment.LOAD,
    Moment.OBSERVE,
    Moment.REPLAY,
    Moment.DONATE,
)
OF_THE_COORDINATOR = (Moment.COMMIT_WRITTEN, Moment.PLAN_WRITTEN)


@dataclass(frozen=True, slots=True)
class Fault:
    """`duration_s`: until the worker is started again, thawed, or reachable again.

    With a `moment` the fault lies in wait from `at_s` on and hits whoever comes to that moment first.
    """

    at_s: float
    kind: FaultKind
    worker_id: WorkerId
    duration_s: float
    moment: Moment | None = None
    side: tuple[WorkerId, ...] = ()

    def words(self) -> str:
        text = f"{self.kind.value} for {self.duration_s:.1f} s"
        if self.side:
            text += f": {', '.join(self.side)} on the other side"
        return f"{text}, {self.moment.value}" if self.moment is not None else text


HEALING = (
    FaultKind.KILL,
    FaultKind.KILL_ENGINE,
    FaultKind.FREEZE,
    FaultKind.CUT_CONTROL,
    FaultKind.CUT_PEERS,
    FaultKind.SLOW,
    FaultKind.PARTITION,
    FaultKind.LEAVE,
    FaultKind.DISK_FULL,
    FaultKind.WALL_JUMP,
)
# Faults that leave every state where it is: nobody has a reason to go back to a checkpoint.
HARMLESS = (
    FaultKind.CRASH_COORDINATOR,
    FaultKind.SLOW,
    FaultKind.DISK_FULL,
    FaultKind.WALL_JUMP,
)
FREEZES_S = (5.0, 20.0, 60.0)


def _duration_s(rng: random.Random, kind: FaultKind) -> float:
    if kind is FaultKind.PARTITION:
        return rng.uniform(5.0, 40.0)
    if kind is FaultKind.FREEZE and rng.random() < 0.4:
        return rng.choice(FREEZES_S)
    return rng.uniform(0.2, 4.0) if rng.random() < 0.6 else rng.uniform(5.0, 20.0)


def draw_fault(rng: random.Random, kind: FaultKind, workers: Sequence[WorkerId], until_s: float) -> Fault:
    """One fault of that kind between 1.5 s and `until_s`. Half of the kills wait for a moment."""
    worker_id = rng.choice(workers)
    at_s, duration_s = rng.uniform(1.5, until_s), _duration_s(rng, kind)
    moment, side = None, tuple[WorkerId, ...]()
    if kind in (FaultKind.KILL, FaultKind.KILL_ENGINE, FaultKind.FREEZE) and rng.random() < 0.6:
        moment = rng.choice(OF_WORKERS)
    if kind is FaultKind.CRASH_COORDINATOR and rng.random() < 0.6:
        moment = rng.choice(OF_THE_COORDINATOR)
    if kind is FaultKind.PARTITION:
        side = tuple(sorted(rng.sample(list(workers), max(1, len(workers) // 2))))
    return Fault(at_s, kind, worker_id, duration_s, moment, side)


def _behind_a_partition(rng: random.Random, workers: Sequence[WorkerId], until_s: float) -> list[Fault]:
    """Something happens on the other side, and the coordinator hears of it late, or on a stream that is over."""
    partition = draw_fault(rng, FaultKind.PARTITION, workers, until_s)
    kind = rng.choice([FaultKind.KILL_ENGINE, FaultKind.KILL_ENGINE, FaultKind.KILL, FaultKind.LEAVE])
    at_s = partition.at_s + rng.uniform(0.1, 0.9) * partition.duration_s
    return [partition, Fault(at_s, kind, rng.choice(partition.side), rng.uniform(0.2, 4.0))]


def draw_faults(
    rng: random.Random, workers: Sequence[WorkerId], until_s: float, *, for_good: bool
) -> tuple[Fault, ...]:
    """What happens to a fleet, in order of time. `for_good`: somebody leaves and never comes back."""
    kinds = [rng.choice(HEALING) for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8]))]
    if rng.random() < 0.3:
        kinds += [FaultKind.CRASH_COORDINATOR] * rng.choice([1, 1, 2, 3])
    if rng.random() < 0.08:
        kinds.append(FaultKind.FREEZE_COORDINATOR)
    if rng.random() < 0.1:
        kinds.append(FaultKind.RESTART_EVERYTHING)
    if for_good:
        kinds.append(rng.choice([FaultKind.KILL_FOR_GOOD, FaultKind.DRAIN]))
    faults = [draw_fault(rng, kind, workers, until_s) for kind in kinds]
    if rng.random() < 0.12:
        faults += _behind_a_partition(rng, workers, until_s)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
