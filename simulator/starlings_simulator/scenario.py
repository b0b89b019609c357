"""A run drawn from a seed: the fleet, the job, the network's manners and what goes wrong when."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace

from starlings_protos.messages import WorkerId


class FaultKind(enum.Enum):
    KILL = "kill"
    KILL_FOR_GOOD = "kill for good"
    KILL_ENGINE = "kill engine"
    FREEZE = "freeze"
    CUT_CONTROL = "cut control"
    CUT_PEERS = "cut peers"
    DRAIN = "drain"
    CRASH_COORDINATOR = "crash of the coordinator"
    SLOW = "slow network"


@dataclass(frozen=True, slots=True)
class Fault:
    """`duration_s`: until the worker is started again, thawed, or reachable again."""

    at_s: float
    kind: FaultKind
    worker_id: WorkerId
    duration_s: float


@dataclass(frozen=True, slots=True)
class FleetMember:
    worker_id: WorkerId
    seconds_per_block: float
    numeric_class: str
    host_id: str
    starts_at_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation depends on. `least_workers`: fewer cannot hold the model."""

    seed: int
    fleet: tuple[FleetMember, ...]
    blocks: int
    stages: int
    steps: int
    microbatches: int
    least_workers: int
    broken: float
    duplicated: float
    compute_failure: float
    exchange_failure: float
    load_failure: float
    tied: bool
    checkpoint_every: int
    faults: tuple[Fault, ...]

    @property
    def calm_at_s(self) -> float:
        """When the last fault has healed."""
        return max((fault.at_s + fault.duration_s for fault in self.faults), default=0.0)

    @property
    def gone_for_good(self) -> set[WorkerId]:
        kinds = (FaultKind.KILL_FOR_GOOD, FaultKind.DRAIN)
        return {fault.worker_id for fault in self.faults if fault.kind in kinds}


def without_crashes_of_the_coordinator(scenario: Scenario) -> Scenario:
    """For a coordinator that keeps no log."""
    kept = tuple(fault for fault in scenario.faults if fault.kind is not FaultKind.CRASH_COORDINATOR)
    return replace(scenario, faults=kept)


HEALING = (
    FaultKind.KILL,
    FaultKind.KILL_ENGINE,
    FaultKind.FREEZE,
    FaultKind.CUT_CONTROL,
    FaultKind.CUT_PEERS,
    FaultKind.SLOW,
)


def draw(seed: int, *, calm: bool = False, may_lose_coverage: bool | None = None) -> Scenario:
    """The scenario of a seed. One in five loses workers for good, so that coverage may end."""
    rng = random.Random(f"scenario:{seed}")
    count = rng.randint(1, 6)
    blocks = rng.randint(2, 7)
    hosts = max(1, count - rng.randint(0, 2))
    fleet = tuple(
        FleetMember(
            WorkerId(f"w{index:02d}"),
            seconds_per_block=rng.choice([0.01, 0.02, 0.05]) * rng.uniform(0.8, 1.2),
            numeric_class=rng.choice(["a", "a", "a", "b"]) if seed % 5 == 0 else "a",
            host_id=f"h{index % hosts}",
            starts_at_s=rng.uniform(0.0, 2.0),
        )
        for index in range(count)
    )
    # Always drawn, so that `calm` changes nothing else.
    loses = rng.random() < 0.2 if may_lose_coverage is None else may_lose_coverage
    faults = _faults(rng, fleet, for_good=loses)
    rough = rng.random() < 0.7
    broken = rng.choice([0.01, 0.05, 0.15]) if rough else 0.0
    duplicated = rng.choice([0.0, 0.05, 0.2]) if rough else 0.0
    rare = rng.random() < 0.3
    return Scenario(
        seed=seed,
        fleet=fleet,
        blocks=blocks,
        stages=rng.randint(1, min(4, blocks)),
        steps=rng.randint(2, 4),
        microbatches=rng.randint(2, 8),
        least_workers=rng.randint(1, max(1, count - 1)),
        broken=0.0 if calm else broken,
        duplicated=0.0 if calm else duplicated,
        compute_failure=0.0 if calm or not rare else 0.004,
        exchange_failure=0.0 if calm or not rare else 0.02,
        load_failure=0.0 if calm or not rare else 0.2,
        tied=rng.random() < 0.4,
        checkpoint_every=rng.choice([0, 1, 2]),
        faults=() if calm else faults,
    )


def _faults(rng: random.Random, fleet: tuple[FleetMember, ...], *, for_good: bool) -> tuple[Fault, ...]:
    faults = []
    for _ in range(rng.choice([0, 1, 2, 3, 5, 9])):
        kind = rng.choice(HEALING)
        duration_s = rng.uniform(0.2, 4.0) if rng.random() < 0.6 else rng.uniform(5.0, 20.0)
        faults.append(Fault(rng.uniform(1.5, 12.0), kind, rng.choice(fleet).worker_id, duration_s))
    if rng.random() < 0.15:
        at_s, duration_s = rng.uniform(2.0, 15.0), rng.uniform(0.5, 8.0)
        faults.append(Fault(at_s, FaultKind.CRASH_COORDINATOR, fleet[0].worker_id, duration_s))
    if for_good:
        kind = rng.choice([FaultKind.KILL_FOR_GOOD, FaultKind.DRAIN])
        faults.append(Fault(rng.uniform(2.0, 15.0), kind, rng.choice(fleet).worker_id, 0.0))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
