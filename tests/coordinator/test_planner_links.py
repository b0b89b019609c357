"""Plans with links: the programme against its definition, bounds that hold, choices near the best there is."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import planner_fleets
from planner_exact import best_choice
from planner_fleets import MODELS, swarm

from starlings_coordinator.planner.cuts import balanced_cut
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.bounds import Bounds, binding_words, reason_words
from starlings_coordinator.planner.linear.node_form import Prices, solve
from starlings_coordinator.planner.linear.planning import LinkPlan, plan_with_links
from starlings_coordinator.planner.linear.problem import MODES, Ints, Problem, build_problem
from starlings_coordinator.planner.linear.relaxed import bound_at, players_of, relax
from starlings_coordinator.planner.linear.search import search
from starlings_coordinator.planner.linear.values import option_values, stage_values
from starlings_protos.messages import WorkerId

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def own_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same swarms on every machine, whatever lies beside the repository."""
    monkeypatch.setattr(planner_fleets, "SHARED", tmp_path_factory.getbasetemp() / "nothing")


def drawn(seed: int, workers: int, stages: int, sites: int = 0, *, limited: bool = True) -> Problem:
    """Workers of unlike speeds and spans; `sites`: how many share their links, 0 for one each."""
    rng = np.random.default_rng(seed)
    site = np.arange(workers)
    if sites:
        site = np.unique(rng.integers(0, sites, workers), return_inverse=True)[1]
    count = int(site.max()) + 1
    up = rng.lognormal(1, 1, count) if limited else np.full(count, np.inf)
    starts, first, last = [0], [], []
    for _ in range(workers):
        length = int(rng.integers(1, stages // 2 + 2))
        first += range(stages - length + 1)
        last += range(length - 1, stages)
        starts.append(len(first))
    return Problem(
        tuple(WorkerId(f"w{n}") for n in range(workers)),
        rng.lognormal(0, 0.6, (1, workers, 1)) * rng.uniform(0.5, 1.5, (1, 1, stages)) / stages,
        rng.uniform(0.5, 1.5, stages - 1),
        rng.uniform(0.5, 1.5, stages - 1),
        site,
        tuple(f"s{n}" for n in range(count)),
        up,
        up * 3,
        np.ones(workers),
        np.zeros(stages),
        *(np.array(values, dtype=np.int64) for values in (starts, first, last)),
        np.zeros(len(first), dtype=np.int64),
    )


def random_choice(problem: Problem, seed: int) -> Ints:
    rng = random.Random(seed)
    return np.array([rng.randrange(problem.starts[w], problem.starts[w + 1]) for w in range(problem.workers)])


def last_plan(fleet: Fleet, programmes: int = 12, seed: int = 0) -> LinkPlan:
    *_, plan = plan_with_links(fleet, codec="int8:128", seed=seed, programmes=programmes)
    return plan


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(2, 6), st.integers(2, 4), st.integers(0, 3))
def test_search_is_within_one_percent_of_the_best_there_is(
    seed: int, workers: int, stages: int, sites: int
) -> None:
    """The exact programme is written from the definition, with pairs of workers: it judges the node form too."""
    problem = drawn(seed, workers, stages, sites)
    relaxed = relax(problem)
    best, choice = best_choice(problem)
    if relaxed is None:
        assert best == 0
        return
    assert relaxed.rate >= best * (1 - 1e-6)
    assert bound_at(problem, players_of(problem), relaxed.prices.value) >= best * (1 - 1e-6)
    assert solve(problem, choice).rate == pytest.approx(best, rel=1e-5, abs=1e-9)
    found = list(search(problem, seed=0, programmes=80, relaxed=relaxed))
    assert (found[-1].rate if found else 0.0) >= 0.99 * best


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 4))
def test_prices_account_for_all_of_the_flow_and_loads_stay_within_what_there_is(
    seed: int, sites: int
) -> None:
    problem = drawn(seed, 12, 4, sites)
    choice = random_choice(problem, seed)
    flow = solve(problem, choice)
    if flow.prices is None:
        assert flow.rate == 0
        assert not problem.covered(choice).all()
        return
    prices = flow.prices
    assert prices.compute.sum() + prices.up.sum() + prices.down.sum() == pytest.approx(flow.rate, rel=1e-6)
    assert flow.load(problem).max() <= 1 + 1e-6
    assert (flow.up_bytes_per_s(problem) <= problem.up * (1 + 1e-6)).all()
    assert (flow.down_bytes_per_s(problem) <= problem.down * (1 + 1e-6)).all()
    through = np.bincount(flow.entries.stage, flow.share, minlength=problem.stages)
    assert through == pytest.approx(np.full(problem.stages, flow.rate), rel=1e-6)
    if not sites:
        # Alone behind its link, what a span is worth is what its worker and its link are paid.
        worths = option_values(problem, prices)[choice]
        assert worths.sum() <= flow.rate * (1 + 1e-6)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 3), st.floats(0.01, 100))
def test_what_must_not_change_the_flow_and_what_must_not_lower_it(
    seed: int, sites: int, factor: float
) -> None:
    problem = drawn(seed, 8, 3, sites)
    choice = random_choice(problem, seed)
    rate = solve(problem, choice).rate
    # All twice as fast, links too: twice the flow.
    faster = replace(
        problem, seconds=problem.seconds / factor, up=problem.up * factor, down=problem.down * factor
    )
    assert solve(faster, choice).rate == pytest.approx(rate * factor, rel=1e-5)
    # Smaller messages are as good as faster links.
    smaller = replace(
        problem, forward_bytes=problem.forward_bytes / factor, backward_bytes=problem.backward_bytes / factor
    )
    wider = replace(problem, up=problem.up * factor, down=problem.down * factor)
    assert solve(smaller, choice).rate == pytest.approx(solve(wider, choice).rate, rel=1e-5)
    # One worker fewer is never faster, nor is a slower link; links without limit are never slower.
    fewer = choice.copy()
    fewer[seed % 8] = -1
    assert solve(problem, fewer).rate <= rate * (1 + 1e-6)
    assert solve(replace(problem, up=problem.up * 0.5), choice).rate <= rate * (1 + 1e-6)
    free = replace(problem, up=np.full_like(problem.up, np.inf), down=np.full_like(problem.down, np.inf))
    assert solve(free, choice).rate >= rate * (1 - 1e-6)


def test_links_within_a_site_are_free() -> None:
    """Two halves behind one slow line are as fast as without it; behind two lines the line decides."""
    problem = drawn(1, 2, 2)
    halves = replace(
        problem,
        seconds=np.full((1, 2, 2), 0.1),
        starts=np.array([0, 1, 2]),
        first=np.array([0, 1]),
        last=np.array([0, 1]),
        mode=np.zeros(2, dtype=np.int64),
        forward_bytes=np.ones(1),
        backward_bytes=np.ones(1),
        up=np.array([2.0, 2.0]),
        down=np.array([9.0, 9.0]),
    )
    choice = np.array([0, 1])
    assert solve(halves, choice).rate == pytest.approx(2.0)
    together = replace(
        halves, site=np.zeros(2, dtype=np.int64), site_names=("s0",), up=halves.up[:1], down=halves.down[:1]
    )
    assert solve(together, choice).rate == pytest.approx(10.0)
    bounds = Bounds(10.0, 10.0, 2.0, 2.0)
    assert binding_words(halves, solve(halves, choice), bounds).startswith("uplink")
    assert binding_words(together, solve(together, choice), bounds) == "compute of all workers"
    assert "uplink of 0.0 Mbit/s is full" in reason_words(halves, 0, 0, solve(halves, choice))


@pytest.mark.parametrize("model", ["1.1B", "6.7B"])
def test_options_are_those_of_the_fleet(model: str) -> None:
    fleet = Fleet(swarm(24, "homes", MODELS[model], 3), MODELS[model])
    for count in (3, 8, 20):
        stages = balanced_cut(fleet.block_bytes(), count)
        problem = build_problem(fleet, stages, "int8:128")
        for number, worker in enumerate(fleet.workers):
            expected = {
                (o.span, MODES.index((o.holding.recompute, o.holding.slots == 1)))
                for o in fleet.options(worker, stages)
            }
            own = range(problem.starts[number], problem.starts[number + 1])
            assert {(problem.span_of(o), int(problem.mode[o])) for o in own} == expected


@pytest.mark.parametrize(("workers", "model"), [(16, "3.4B"), (64, "6.7B")])
def test_where_links_do_not_bind_plans_reach_the_bound(workers: int, model: str) -> None:
    plan = last_plan(Fleet(swarm(workers, "lab", MODELS[model], 1), MODELS[model]), 24)
    assert plan.found.rate >= 0.97 * plan.bounds.memory
    assert plan.bounds.memory <= plan.bounds.compute * (1 + 1e-9)


def test_plans_behind_home_lines_keep_to_memory_and_say_what_binds() -> None:
    profile = MODELS["3.4B"]
    fleet = Fleet(swarm(32, "homes", profile, 2), profile)
    plan = last_plan(fleet)
    problem, found = plan.problem, plan.found
    assert problem.covered(found.choice).all()
    assert 0.7 < plan.part_of_bound <= 1 + 1e-9
    assert found.rate <= plan.bounds.uplink * (1 + 1e-6)
    assert "%" in plan.binding
    for number, worker in enumerate(fleet.workers):
        option = int(found.choice[number])
        assert reason_words(problem, number, option, found.flow)
        if option >= 0:
            span = problem.span_of(option)
            first, last = plan.stages[span.first_stage].first_block, plan.stages[span.last_stage].last_block
            assert fleet.least_bytes(first, last) <= worker.memory_bytes


def test_equal_requests_give_equal_plans_in_any_order_and_more_programmes_never_worse_ones() -> None:
    profile = MODELS["1.1B"]
    request = swarm(12, "mixed", profile, 4)
    one = last_plan(Fleet(request, profile))
    shuffled = replace(request, workers=tuple(random.Random(1).sample(request.workers, 12)))
    two = last_plan(Fleet(shuffled, profile))
    assert np.array_equal(one.found.choice, two.found.choice)
    assert one.stages == two.stages
    assert last_plan(Fleet(request, profile), 40).found.rate >= one.found.rate
    assert [
        p.found.rate for p in plan_with_links(Fleet(request, profile), codec="exact", seed=0, programmes=9)
    ] == (
        sorted(
            p.found.rate
            for p in plan_with_links(Fleet(request, profile), codec="exact", seed=0, programmes=9)
        )
    )


def test_nothing_is_planned_where_a_block_fits_nowhere() -> None:
    request = swarm(4, "lab", MODELS["65B"], 1)
    small = replace(request, workers=tuple(replace(w, memory_bytes=10**9) for w in request.workers))
    assert list(plan_with_links(Fleet(small, MODELS["65B"]), codec="exact", seed=0, programmes=5)) == []


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.booleans(), st.sampled_from([0, 3]))
def test_what_each_option_can_do_of_a_stage_is_its_worth_where_only_that_stage_counts(
    seed: int, limited: bool, sites: int
) -> None:
    problem = drawn(seed, 5, 6, sites, limited=limited)
    zeros = np.zeros(problem.sites)
    nothing = np.full((problem.sites, problem.stages + 1), np.nan)
    table = stage_values(problem)
    for stage in range(problem.stages):
        value = (np.arange(problem.stages + 1) > stage).astype(float)
        prices = Prices(value, nothing, np.zeros(problem.workers), zeros, zeros)
        np.testing.assert_allclose(table[stage], option_values(problem, prices))


def test_seconds_of_all_workers_at_once_are_those_of_each() -> None:
    profile = MODELS["1.1B"]
    fleet = Fleet(swarm(5, "mixed", profile, 3), profile)
    stages = balanced_cut(fleet.block_bytes(), 4)
    for recompute, one_slot in MODES:
        table = fleet.seconds_table(stages, recompute, one_slot)
        for row, worker in zip(table, fleet.workers, strict=True):
            each = [fleet.stage_seconds(worker.worker_id, stage, recompute, one_slot) for stage in stages]
            assert row == pytest.approx(each)
