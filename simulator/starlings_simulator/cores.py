"""Which coordinator a simulation runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlings_simulator.coordinator import CoordinatorCore
from starlings_simulator.scenario import Scenario
from starlings_simulator.standin import StandIn

SAMPLES_PER_MICROBATCH = 2


def standin_core(
    scenario: Scenario, names: tuple[str, ...], count_targets: Callable[[Sequence[int]], int]
) -> CoordinatorCore:
    return StandIn(
        scenario.steps,
        scenario.microbatches,
        SAMPLES_PER_MICROBATCH,
        count_targets,
        scenario.least_workers,
        tied=scenario.tied,
    )


CORES = {"standin": standin_core}
