"""Whole swarms under faults: kills, freezes, cuts, partitions, loss, duplicates, slow links, full disks, late comers,
leavers, crashes of the coordinator.

Every seed checks the invariants after every event; a failing one prints itself, what led there, and how to replay it.
"""

from __future__ import annotations

import pytest

from starlings_coordinator.planner.plan import make_plan
from starlings_simulator.cores import profile_of, simulation_of
from starlings_simulator.faults import FaultKind, Moment
from starlings_simulator.scenario import draw
from starlings_simulator.simulation import block_names
from support.simulated import chunks, judge, losing, name_of, run, run_all

FAST, SLOW = 200, 5000


@pytest.mark.parametrize("seeds", chunks(0, FAST, 10), ids=name_of)
def test_swarms_keep_their_promises(seeds: range) -> None:
    run_all(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(1000, SLOW, 50), ids=name_of)
def test_thousands_of_swarms_keep_their_promises(seeds: range) -> None:
    run_all(seeds)


@pytest.mark.parametrize("seeds", chunks(0, 12, 6), ids=name_of)
def test_losses_in_the_middle_of_steps(seeds: range) -> None:
    """In these seeds attempts go on without the lost one, and others begin again because of it."""
    outcomes = run_all(seeds, scenario_of=losing)
    plans = [line for outcome in outcomes for line in outcome.transcript.lines() if "kind=plan" in line]
    assert sum(" goes on, " in line for line in plans) >= 3
    assert sum(" begins again" in line for line in plans) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(100, 1000, 50), ids=name_of)
def test_a_thousand_swarms_with_losses_in_the_middle_of_steps(seeds: range) -> None:
    run_all(seeds, scenario_of=losing)


def test_a_copy_that_ends_after_a_rewind_is_of_no_present_version() -> None:
    """Two numeric classes; who copies from the other one hears that the job went back before its copy is complete."""
    assert run(10780).rewinds == 1


def test_the_fast_seeds_meet_what_they_are_for() -> None:
    """A suite of calm runs would prove nothing: these seeds hold every kind of fault, in every moment."""
    faults = [fault for seed in range(FAST) for fault in draw(seed).faults]
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert {fault.moment for fault in faults} == {None, *Moment}
    assert {draw(seed).passes for seed in range(FAST)} == {1, 2}
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
    judge(scenario, simulation_of(scenario, plan=lambda request: make_plan(request, profile)).run())


def test_when_the_only_holder_of_a_stage_is_gone_for_good_the_job_says_what_it_waits_for() -> None:
    waiting = []
    for seed in range(100, 300):
        scenario = draw(seed, may_lose_coverage=True)
        if len(scenario.fleet) > 1:
            continue
        outcome = simulation_of(scenario).run()
        judge(scenario, outcome)
        if outcome.verdict == "waiting":
            waiting.append(outcome)
        if len(waiting) == 3:
            break
    assert len(waiting) == 3
    assert all("worker" in outcome.reason for outcome in waiting)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(7000, 100, 25), ids=name_of)
def test_a_hundred_swarms_with_the_stand_in(seeds: range) -> None:
    run_all(seeds, "standin")
