"""Whole swarms under faults: kills, freezes, cuts, loss, duplicates, slow links, crashes of the coordinator.

Every seed checks the invariants after every event; a failing one prints itself, what led there, and how to replay it.
"""

from __future__ import annotations

import pytest

from starlings_coordinator.planner.plan import make_plan
from starlings_simulator.cores import CORES, profile_of
from starlings_simulator.scenario import draw, without_crashes_of_the_coordinator
from starlings_simulator.simulation import Outcome, Simulation, block_names
from starlings_simulator.verdicts import objection


def run(seed: int, core: str = "real", *, calm: bool = False) -> Outcome:
    scenario = draw(seed, calm=calm)
    if core == "standin":
        scenario = without_crashes_of_the_coordinator(scenario)
    outcome = Simulation(scenario, CORES[core]).run()
    wrong = objection(scenario, outcome)
    assert not wrong, f"seed {seed}: {wrong}\n{outcome.transcript.tail()}"
    return outcome


@pytest.mark.parametrize("seed", range(50))
def test_a_swarm_keeps_its_promises(seed: int) -> None:
    run(seed)


def test_the_fast_seeds_meet_what_they_are_for() -> None:
    """A suite of calm runs would prove nothing: these seeds restart steps, rewind, and break transfers."""
    faults = {fault.kind.value for seed in range(50) for fault in draw(seed).faults}
    assert len(faults) >= 8
    outcomes = [run(seed) for seed in range(12)]
    assert sum(outcome.restarts > 0 for outcome in outcomes) >= 2
    assert sum(outcome.broken_transfers for outcome in outcomes) >= 20


@pytest.mark.parametrize("seed", range(50, 54))
def test_without_faults_nothing_is_repeated(seed: int) -> None:
    outcome = run(seed, calm=True)
    assert outcome.verdict == "done"
    assert outcome.restarts == 0
    assert outcome.rewinds == 0


@pytest.mark.parametrize("seed", range(60, 64))
def test_the_workers_keep_their_promises_to_another_coordinator(seed: int) -> None:
    """The stand-in decides otherwise than the real core: workers must not depend on its habits."""
    run(seed, "standin")


@pytest.mark.parametrize("seed", range(70, 73))
def test_with_the_real_planner(seed: int) -> None:
    scenario = draw(seed)
    profile = profile_of(scenario, block_names(scenario.blocks))
    outcome = Simulation(scenario, CORES["real"], plan=lambda request: make_plan(request, profile)).run()
    assert objection(scenario, outcome) == ""


def test_when_the_only_holder_of_a_stage_is_gone_for_good_the_job_says_what_it_waits_for() -> None:
    waiting = []
    for seed in range(100, 200):
        scenario = draw(seed, may_lose_coverage=True)
        if len(scenario.fleet) > 1:
            continue
        outcome = Simulation(scenario, CORES["real"]).run()
        assert objection(scenario, outcome) == ""
        if outcome.verdict == "waiting":
            waiting.append(outcome)
        if len(waiting) == 3:
            break
    assert len(waiting) == 3
    assert all("worker" in outcome.reason for outcome in waiting)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1600))
def test_hundreds_of_swarms_keep_their_promises(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2100))
def test_a_hundred_swarms_with_the_stand_in(seed: int) -> None:
    run(seed, "standin")
