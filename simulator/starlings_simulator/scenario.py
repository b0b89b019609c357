"""A run drawn from a seed: the fleet, the job, the network's manners and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from starlings_protos.messages import WorkerId
from starlings_simulator.faults import HARMLESS, Fault, FaultKind, draw_faults


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
    # Of how many steps a donor keeps the updates at most.
    updates_most: int
    # In which gradients are summed up: two for linear codecs.
    passes: int
    faults: tuple[Fault, ...]

    @property
    def calm_at_s(self) -> float:
        """When the last fault has healed, if those that wait for a moment find it at once."""
        healed = max((fault.at_s + fault.duration_s for fault in self.faults), default=0.0)
        return max(healed, *(member.starts_at_s for member in self.fleet))

    @property
    def gone_for_good(self) -> set[WorkerId]:
        kinds = (FaultKind.KILL_FOR_GOOD, FaultKind.DRAIN)
        return {fault.worker_id for fault in self.faults if fault.kind in kinds}

    @property
    def single_class(self) -> str | None:
        """The numeric class of all; None when there are several."""
        classes = {member.numeric_class for member in self.fleet}
        return min(classes) if len(classes) == 1 else None

    @property
    def harmless(self) -> bool:
        """Nothing happens to any worker, nor to what it says: all states stay where they are."""
        smooth = not (self.compute_failure or self.exchange_failure or self.load_failure or self.broken)
        return smooth and all(fault.kind in HARMLESS for fault in self.faults)

    def has(self, kind: FaultKind) -> bool:
        return any(fault.kind is kind for fault in self.faults)


def without_crashes_of_the_coordinator(scenario: Scenario) -> Scenario:
    """For a coordinator that keeps no log."""
    ends = (FaultKind.CRASH_COORDINATOR, FaultKind.RESTART_EVERYTHING, FaultKind.FREEZE_COORDINATOR)
    return replace(scenario, faults=tuple(fault for fault in scenario.faults if fault.kind not in ends))


def draw(seed: int, *, calm: bool = False, may_lose_coverage: bool | None = None) -> Scenario:
    """The scenario of a seed. One in three is a long life, one in five loses workers for good, so that
    coverage may end.
    """
    rng = random.Random(f"scenario:{seed}")
    count = rng.randint(1, 6)
    blocks = rng.randint(2, 7)
    hosts = max(1, count - rng.randint(0, 2))
    long = rng.random() < 0.28
    pace = rng.choice([1.0, 2.0, 4.0]) if long else 1.0
    fleet = tuple(
        FleetMember(
            WorkerId(f"w{index:02d}"),
            seconds_per_block=pace * rng.choice([0.01, 0.02, 0.05]) * rng.uniform(0.8, 1.2),
            numeric_class=rng.choice(["a", "a", "a", "b"]) if seed % 5 == 0 else "a",
            host_id=f"h{index % hosts}",
            starts_at_s=_start_s(rng, late=long and index > 0),
        )
        for index in range(count)
    )
    # Always drawn, so that `calm` changes nothing else.
    loses = rng.random() < 0.2 if may_lose_coverage is None else may_lose_coverage
    workers = [member.worker_id for member in fleet]
    faults = draw_faults(rng, workers, 30.0 if long else 12.0, for_good=loses)
    rough = rng.random() < 0.7
    broken = rng.choice([0.01, 0.05, 0.15]) if rough else 0.0
    duplicated = rng.choice([0.0, 0.05, 0.2]) if rough else 0.0
    rare = rng.random() < 0.3
    return Scenario(
        seed=seed,
        fleet=fleet,
        blocks=blocks,
        stages=rng.randint(1, min(4, blocks)),
        steps=rng.randint(5, 10) if long else rng.randint(2, 4),
        microbatches=rng.randint(2, 4) if long else rng.randint(2, 6),
        least_workers=rng.randint(1, max(1, count - 1)),
        broken=0.0 if calm else broken,
        duplicated=0.0 if calm else duplicated,
        compute_failure=0.0 if calm or not rare else 0.004,
        exchange_failure=0.0 if calm or not rare else 0.02,
        load_failure=0.0 if calm or not rare else 0.2,
        tied=rng.random() < 0.4,
        checkpoint_every=rng.choice([0, 1, 2, 3]),
        updates_most=rng.choice([2, 64, 64]),
        passes=rng.choice([1, 2]),
        faults=() if calm else faults,
    )


def _start_s(rng: random.Random, *, late: bool) -> float:
    """Seconds after the coordinator; one in three of a long life comes when training is under way."""
    return rng.uniform(5.0, 20.0) if late and rng.random() < 0.33 else rng.uniform(0.0, 2.0)
