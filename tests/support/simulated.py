"""What the tests of whole swarms share: a seed is run, judged, and printed with how to see it again."""

from __future__ import annotations

from starlings_simulator.cores import simulation_of
from starlings_simulator.scenario import Scenario, draw, without_crashes_of_the_coordinator
from starlings_simulator.simulation import Outcome
from starlings_simulator.verdicts import objection


def run(seed: int, core: str = "real", *, calm: bool = False) -> Outcome:
    """Raises Violation when an invariant breaks, AssertionError when the end is wrong; both name the seed."""
    scenario = draw(seed, calm=calm)
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


def run_all(seeds: range, core: str = "real") -> list[Outcome]:
    """All of them, also after one that fails; then every failing seed is named with its reason."""
    outcomes, wrong = [], []
    for seed in seeds:
        try:
            outcomes.append(run(seed, core))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(seeds)} seeds fail\n\n" + "\n\n".join(wrong)
    return outcomes
