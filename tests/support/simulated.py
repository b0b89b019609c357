"""What the tests of whole swarms share: a seed is run, judged, and printed with how to see it again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from starlings_protos.messages import WorkerId
from starlings_simulator.cores import simulation_of
from starlings_simulator.faults import Fault, FaultKind, Moment
from starlings_simulator.scenario import FleetMember, Scenario, draw, without_crashes_of_the_coordinator
from starlings_simulator.simulation import Outcome, Violation
from starlings_simulator.verdicts import objection

WORKERS = tuple(WorkerId(f"w{index:02d}") for index in range(4))


def run(
    seed: int, core: str = "real", *, calm: bool = False, scenario_of: Callable[[int], Scenario] | None = None
) -> Outcome:
    """Raises Violation when an invariant breaks, AssertionError when the end is wrong; both name the seed."""
    scenario = draw(seed, calm=calm) if scenario_of is None else scenario_of(seed)
    if core == "standin":
        scenario = without_crashes_of_the_coordinator(scenario)
    outcome = simulation_of(scenario, core).run()
    judge(scenario, outcome)
    return outcome


def judge(scenario: Scenario, outcome: Outcome) -> None:
    wrong = objection(scenario, outcome)
    seed = scenario.seed
    assert not wrong, (
        f"seed {seed}: {wrong}\n"
        f"replay with: python -m starlings_simulator.replay --seed {seed}\n{outcome.transcript.tail()}"
    )


def chunks(first: int, count: int, size: int) -> list[range]:
    """Seeds in portions that can be spread over processes."""
    return [range(low, min(low + size, first + count)) for low in range(first, first + count, size)]


def name_of(seeds: range) -> str:
    return f"{seeds[0]}-{seeds[-1]}"


def run_all(
    seeds: range, core: str = "real", scenario_of: Callable[[int], Scenario] | None = None
) -> list[Outcome]:
    """All of them, also after one that fails; then every failing seed is named with its reason."""
    outcomes, wrong = [], []
    for seed in seeds:
        try:
            outcomes.append(run(seed, core, scenario_of=scenario_of))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(seeds)} seeds fail\n\n" + "\n\n".join(wrong)
    return outcomes


def replicated(seed: int, *faults: Fault, steps: int = 9) -> Scenario:
    """Four workers that hold everything, on a good network, and steps of about four seconds."""
    fleet = tuple(FleetMember(w, 0.4 + 0.02 * index, "a", w, 0.2 * index) for index, w in enumerate(WORKERS))
    return replace(
        draw(seed, calm=True),
        fleet=fleet,
        blocks=3,
        stages=1,
        steps=steps,
        microbatches=4,
        least_workers=1,
        faults=faults,
        updates_most=64,
    )


def losing(seed: int) -> Scenario:
    """Pipelines with long steps of many microbatches, in the middle of which engines crash, hosts die and streams are
    cut: losses are heard of while much is under way.
    """
    rng = random.Random(f"losing:{seed}")
    workers = [WorkerId(f"w{index:02d}") for index in range(rng.randint(4, 6))]
    pace_s = rng.choice([0.03, 0.08, 0.16])
    fleet = tuple(
        FleetMember(w, pace_s * rng.uniform(0.7, 1.4), "a", w, rng.uniform(0.0, 1.0)) for w in workers
    )
    kinds = [
        FaultKind.KILL_ENGINE,
        FaultKind.KILL_ENGINE,
        FaultKind.KILL,
        FaultKind.CUT_CONTROL,
        FaultKind.KILL,
    ]
    faults = [
        Fault(
            rng.uniform(4.0, 30.0),
            rng.choice(kinds),
            rng.choice(workers),
            rng.uniform(0.5, 6.0),
            rng.choice([None, Moment.FORWARD, Moment.COMMITTED]),
        )
        for _ in range(rng.randint(4, 9))
    ]
    return replace(
        draw(seed, calm=True),
        fleet=fleet,
        blocks=rng.randint(3, 5),
        stages=rng.randint(2, 3),
        steps=rng.randint(3, 5),
        microbatches=rng.randint(6, 10),
        least_workers=2,
        broken=rng.choice([0.0, 0.02, 0.1]),
        duplicated=rng.choice([0.0, 0.3]),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        updates_most=64,
    )


def behind_a_partition(seed: int) -> Scenario:
    """An engine ends just after its host was cut off: that is heard of when there is a new engine already."""
    rng = random.Random(f"behind a partition:{seed}")
    at_s, duration_s = rng.uniform(5.0, 10.0), rng.uniform(8.0, 20.0)
    partition = Fault(at_s, FaultKind.PARTITION, WORKERS[0], duration_s, side=WORKERS[:2])
    crash = Fault(at_s + rng.uniform(0.1, 3.0), FaultKind.KILL_ENGINE, WORKERS[0], 0.0)
    return replicated(seed, partition, crash)


def rough(seed: int) -> Scenario:
    """Networks are worse here than elsewhere: one transfer in four breaks somewhere, half of them are repeated."""
    return replace(draw(seed), broken=0.25, duplicated=0.5)


def seeds_from(hint: int, count: int = 200) -> Iterator[int]:
    """A seed that is known to be good for something, then the others of the fast suite."""
    yield hint
    yield from (seed for seed in range(count) if seed != hint)


def first_that_notices(scenarios: Iterable[Scenario]) -> tuple[int, str] | None:
    """The first seed whose run breaks an invariant or ends wrongly, and how."""
    for scenario in scenarios:
        seed = scenario.seed
        try:
            outcome = simulation_of(scenario).run()
        except Violation as violation:
            return seed, str(violation.cause)
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            return seed, repr(error)
        wrong = objection(scenario, outcome)
        if wrong:
            return seed, wrong
    return None
