"""Amendments priced by duals: what they say against the programme itself, what they cost, and when nobody moves."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import planner_fleets
from planner_fleets import MODELS, swarm

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.gain import TooLittle, Worthwhile
from starlings_coordinator.planner.linear.amend import Outlook, amended, confirm, price
from starlings_coordinator.planner.linear.board import Board, Change
from starlings_coordinator.planner.linear.migration import LEAST_SHARE, Links, Taking, migrate
from starlings_coordinator.planner.linear.planning import plan_with_links
from starlings_coordinator.planner.linear.standing import Standing, standing
from starlings_protos.messages import PlanWorker, WorkerId

PROFILE = MODELS["1.1B"]
DAY = Outlook(86_400.0)


@pytest.fixture(autouse=True)
def own_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same swarms on every machine, whatever lies beside the repository."""
    monkeypatch.setattr(planner_fleets, "SHARED", tmp_path_factory.getbasetemp() / "nothing")


def planned(kind: str, count: int = 12, seed: int = 1) -> tuple[Standing, PlanWorker]:
    """A plan that stands, and one who is not there yet."""
    request = swarm(count + 1, kind, PROFILE, seed)
    *there, newcomer = request.workers
    request = replace(request, workers=tuple(there))
    *_, plan = plan_with_links(Fleet(request, PROFILE), codec="int8:128", seed=seed, programmes=10)
    held = {
        worker: plan.problem.span_of(int(option))
        for worker, option in zip(plan.problem.worker_ids, plan.found.choice, strict=True)
        if option >= 0
    }
    request = replace(
        request, stages=plan.stages, workers=tuple(replace(w, held=held.get(w.worker_id)) for w in there)
    )
    copied = [12.0 * PROFILE.stage_parameters(s.first_block, s.last_block) for s in plan.stages]
    found = standing(Fleet(request, PROFILE), "int8:128", np.array(copied))
    assert found.rate == pytest.approx(plan.found.rate)
    assert found.holders == held
    return found, newcomer


def scarcest(plan: Standing) -> WorkerId:
    assert plan.flow.prices is not None
    return plan.problem.worker_ids[int(np.argmax(plan.flow.prices.compute))]


def slower(plan: Standing, worker_id: WorkerId, factor: float) -> PlanWorker:
    worker = next(w for w in plan.fleet.workers if w.worker_id == worker_id)
    return replace(
        worker,
        forward_seconds={kind: factor * s for kind, s in worker.forward_seconds.items()},
        backward_seconds={kind: factor * s for kind, s in worker.backward_seconds.items()},
    )


@pytest.mark.parametrize("kind", ["lab", "homes", "mixed"])
def test_prices_are_never_below_what_the_programme_says_by_much(kind: str) -> None:
    """A priced rate is a bound (weak duality), up to worths that leave mixtures of runs out."""
    plan, newcomer = planned(kind)
    changes = (
        Change((newcomer,)),
        Change(left=frozenset({scarcest(plan)})),
        Change((slower(plan, scarcest(plan), 3.0),)),
    )
    for change in changes:
        answer = price(plan, change, DAY)
        solved, after = confirm(plan, change, answer, DAY)
        assert answer.rate_before == plan.rate
        assert answer.amendment.rate_now >= 0.95 * solved.amendment.rate_now
        assert answer.amendment.rate_then >= 0.95 * solved.amendment.rate_then
        assert after.rate == pytest.approx(
            solved.amendment.rate_then if solved.made else solved.amendment.rate_now
        )


@pytest.mark.parametrize("kind", ["lab", "homes"])
def test_a_newcomer_takes_a_place_and_moves_nobody(kind: str) -> None:
    plan, newcomer = planned(kind)
    answer = price(plan, Change((newcomer,)), DAY)
    ((worker_id, (before, span)),) = answer.amendment.moves.items()
    assert (worker_id, before) == (newcomer.worker_id, None)
    assert span is not None
    assert isinstance(answer.verdict, Worthwhile)
    assert answer.amendment.migration_bytes == plan.copied[list(span.stages)].sum()
    assert answer.amendment.migration_s > 0
    solved, after = confirm(plan, Change((newcomer,)), answer, DAY)
    assert solved.made
    assert after.holders == plan.holders | {newcomer.worker_id: span}
    assert after.rate > plan.rate


def test_the_place_that_is_priced_best_is_nearly_the_best_there_is() -> None:
    plan, newcomer = planned("lab", count=8)
    change = Change((newcomer,))
    solved, _ = confirm(plan, change, price(plan, change, DAY), DAY)
    own = plan.problem_of([newcomer])
    rates = []
    for option in range(len(own.first)):
        moves = {newcomer.worker_id: (None, own.span_of(option))}
        rates.append(amended(plan, change, moves).rate)
    assert solved.amendment.rate_then >= plan.rate + 0.8 * (max(rates) - plan.rate)


def test_a_stage_that_falls_bare_is_taken_by_somebody_who_leaves_none_bare() -> None:
    plan, _ = planned("lab", count=10)
    covered = plan.problem.covered(plan.choice)
    holders = plan.holders
    # All who hold the stage with fewest holders leave.
    bare = int(np.argmin(covered))
    gone = frozenset(worker_id for worker_id, span in holders.items() if bare in span)
    assert len(gone) < len(holders)
    change = Change(left=gone)
    board = Board(plan, change)
    assert board.rate() == 0.0
    answer = price(plan, change, DAY)
    assert answer.made, answer
    assert amended(plan, change, answer.amendment.moves).rate > 0
    # Its state is nowhere but at the owner's, whose link then says how long it takes.
    slow = price(plan, change, replace(DAY, keeper_bytes_per_s=1e6))
    assert slow.amendment.migration_s > answer.amendment.migration_s


def test_whoever_leaves_soon_or_a_job_that_ends_soon_justifies_no_move() -> None:
    plan, newcomer = planned("homes")
    change = Change((newcomer,))
    assert price(plan, change, DAY).made
    assert not price(plan, change, Outlook(60.0)).made
    leaving = replace(DAY, lifetimes_s={newcomer.worker_id: 60.0})
    assert not price(plan, change, leaving).made


def test_nothing_moves_where_nothing_happened() -> None:
    plan, _ = planned("lab")
    answer = price(plan, Change(), DAY)
    assert not answer.made
    assert isinstance(answer.verdict, TooLittle)
    assert answer.amendment.rate_now == pytest.approx(plan.rate)


def links(count: int, up: float, up_used: float = 0.0, worth: float = 0.0) -> Links:
    same = np.full(count, 1.0)
    return Links(up * same, 4 * up * same, up_used * same, 0 * same, worth * same, 0 * same)


def test_copies_come_from_all_donors_and_only_what_is_taken_from_training_costs() -> None:
    copied = np.array([100.0, 300.0])
    one = migrate(links(4, 10.0), [Taking(0, [1])], {1: [1]}, copied)
    assert (one.bytes, one.seconds, one.lost) == (300.0, 30.0, 0.0)
    two = migrate(links(4, 10.0), [Taking(0, [1])], {1: [1, 2]}, copied)
    # Two uplinks of 10 send half each; the downlink of 40 takes less time.
    assert two.seconds == pytest.approx(15.0)
    assert migrate(links(4, 10.0), [Taking(0, [0, 1])], {0: [0], 1: [0]}, copied).seconds == 0.0
    busy = migrate(links(4, 10.0, 10.0, worth=2.0), [Taking(0, [1])], {1: [1]}, copied)
    assert busy.seconds == pytest.approx(300 / (LEAST_SHARE * 10))
    assert busy.lost == pytest.approx(LEAST_SHARE * 2.0)
