"""Newcomers beside holders: spans that are held stay, memory stays hard, and the newcomer goes where it helps most."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from starlings_coordinator.planner.cuts import balanced_cut
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.plan import make_plan
from starlings_coordinator.planner.search import SECURITY_COST
from starlings_coordinator.planner.throughput import solve_flow
from starlings_protos.messages import PlanReply, PlanRequest, PlanWorker, Span, Stage, WorkerId
from support.core_world import profile

PROFILE = profile(8)
STAGES = balanced_cut([float(b.flops_per_sample) for b in PROFILE.blocks], 4)
ROOMY = 1 << 40


def worker(name: str, speed: float, memory_bytes: int = ROOMY, held: Span | None = None) -> PlanWorker:
    forward = {"layer": 0.01 / speed, "embed": 0.001 / speed, "head": 0.004 / speed}
    backward = {kind: 2 * seconds for kind, seconds in forward.items()}
    return PlanWorker(WorkerId(name), forward, backward, memory_bytes, held=held)


def request(*workers: PlanWorker, stages: tuple[Stage, ...] = STAGES) -> PlanRequest:
    return PlanRequest(1, workers, 0, 4, 4, 20.0, stages)


def room_for(first: int, last: int) -> int:
    """Memory with which a worker holds stages first..last at full speed, and not one more."""
    fleet = Fleet(request(worker("w", 1)), PROFILE)
    return fleet.need_bytes(STAGES[first].first_block, STAGES[last].last_block, 2)


def spans(reply: PlanReply) -> dict[str, Span | None]:
    return {p.worker_id: p.span for p in reply.workers}


def replicas(reply: PlanReply) -> list[int]:
    return [sum(p.span is not None and s in p.span for p in reply.workers) for s in range(len(reply.stages))]


def test_holders_keep_their_spans_and_a_newcomer_that_fits_all_takes_all() -> None:
    reply = make_plan(
        request(worker("wa", 1.0, held=Span(0, 1)), worker("wb", 0.1, held=Span(2, 3)), worker("wc", 1.0)),
        PROFILE,
    )
    assert reply.stages == STAGES
    assert spans(reply) == {"wa": Span(0, 1), "wb": Span(2, 3), "wc": Span(0, 3)}
    alone = make_plan(
        request(worker("wa", 1.0, held=Span(0, 1)), worker("wb", 0.1, held=Span(2, 3))), PROFILE
    )
    assert reply.predicted_microbatches_per_s > 2 * alone.predicted_microbatches_per_s


def test_a_small_newcomer_goes_where_the_plan_is_slow() -> None:
    small = max(room_for(s, s) for s in range(4))
    for slow in range(4):
        holders = [worker(f"w{s}", 0.1 if s == slow else 2.0, held=Span(s, s)) for s in range(4)]
        reply = make_plan(request(*holders, worker("wx", 1.0, small)), PROFILE)
        span = spans(reply)["wx"]
        assert span is not None
        assert slow in span


def test_a_stage_gets_its_second_holder_where_that_costs_next_to_nothing() -> None:
    """Stage 0 binds; a second replica of stage 3 is worth more than the last percent."""
    small = max(room_for(s, s) for s in range(4))
    one = Fleet(request(worker("w", 1)), PROFILE)
    assert one.need_bytes(STAGES[0].first_block, STAGES[1].last_block, 1, True) > small
    twice = [worker(f"w{s}{copy}", 1.0, held=Span(s, s)) for s in range(3) for copy in "ab"]
    holders = [*twice, worker("w3a", 5.0, held=Span(3, 3))]
    reply = make_plan(request(*holders, worker("wx", 0.02, small)), PROFILE)
    assert spans(reply)["wx"] == Span(3, 3)
    assert min(replicas(reply)) == 2
    # Where it would cost more, throughput wins.
    fast = make_plan(request(*holders, worker("wx", 5.0, small)), PROFILE)
    taken = spans(fast)["wx"]
    assert taken is not None
    if taken != Span(3, 3):
        alone = [
            replace(w, held=Span(3, 3)) if w.worker_id == "wx" else w
            for w in (*holders, worker("wx", 5.0, small))
        ]
        other = make_plan(request(*alone), PROFILE)
        assert other.predicted_microbatches_per_s < (1 - SECURITY_COST) * fast.predicted_microbatches_per_s


def test_a_newcomer_that_fits_nothing_says_how_much_it_lacks() -> None:
    reply = make_plan(request(worker("wa", 1.0, held=Span(0, 3)), worker("wb", 1.0, 1000)), PROFILE)
    assert spans(reply) == {"wa": Span(0, 3), "wb": None}
    assert "more memory" in next(p.reason for p in reply.workers if p.worker_id == "wb")


def test_a_holder_keeps_what_its_account_would_not_allow() -> None:
    """It holds the span: the measured memory of another day must not take it away."""
    reply = make_plan(request(worker("wa", 1.0, 1000, held=Span(0, 3)), worker("wb", 1.0)), PROFILE)
    assert spans(reply) == {"wa": Span(0, 3), "wb": Span(0, 3)}


@pytest.mark.parametrize("held", [Span(0, 4), Span(3, 2)])
def test_held_spans_need_the_cut_that_they_are_of(held: Span) -> None:
    assert "not" in make_plan(request(worker("wa", 1.0, held=held)), PROFILE).impossible
    no_cut = make_plan(request(worker("wa", 1.0, held=Span(0, 0)), stages=()), PROFILE)
    assert "wa holds stages" in no_cut.impossible


def test_a_newcomer_takes_over_a_stage_that_nobody_holds() -> None:
    reply = make_plan(request(worker("wa", 1.0, held=Span(0, 2)), worker("wb", 1.0, room_for(3, 3))), PROFILE)
    span = spans(reply)["wb"]
    assert span is not None
    assert 3 in span


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3))
# Moves of one newcomer at a time end below the best there.
@example(129, 3)
@example(11, 3)
def test_placing_is_near_the_best_within_memory_the_same_every_time(seed: int, newcomers: int) -> None:
    rng = random.Random(seed)
    bounds = sorted(rng.sample(range(1, 4), 2))
    held = [Span(0, bounds[0] - 1), Span(bounds[0], bounds[1] - 1), Span(bounds[1], 3)]
    holders = [worker(f"h{i}", rng.uniform(0.2, 1), held=span) for i, span in enumerate(held)]
    late = [
        worker(f"n{i}", rng.uniform(0.2, 1), int(rng.uniform(0.2, 1.2) * room_for(0, 3)))
        for i in range(newcomers)
    ]
    asked = request(*holders, *late)
    reply = make_plan(asked, PROFILE)
    assert make_plan(request(*reversed(asked.workers)), PROFILE) == reply
    got = spans(reply)
    assert [got[h.worker_id] for h in holders] == held
    fleet = Fleet(asked, PROFILE)
    choices = []
    for w in late:
        fitting = [
            Span(a, b)
            for a in range(4)
            for b in range(a, 4)
            if fleet.holding(w.memory_bytes, STAGES[a].first_block, STAGES[b].last_block, b - a + 1)
        ]
        assert (got[w.worker_id] is None) == (not fitting)
        assert got[w.worker_id] is None or got[w.worker_id] in fitting
        if fitting:
            choices.append([(w.worker_id, fleet._option(w, STAGES, span)) for span in fitting])
    fixed = {h.worker_id: fleet._option(h, STAGES, span) for h, span in zip(holders, held, strict=True)}
    best, safest = 0.0, 4
    every = [{**fixed, **dict(chosen)} for chosen in itertools.product(*choices)]
    if len(every) > 60:
        every = rng.sample(every, 60)
    flows = [(choice, solve_flow(choice, 4).microbatches_per_s) for choice in every]
    best = max(flow for _, flow in flows)
    assert reply.predicted_microbatches_per_s >= (1 - SECURITY_COST) * 0.98 * best
    for choice, flow in flows:
        if flow >= best * (1 - 1e-6):
            alone = [sum(s in o.span for o in choice.values()) for s in range(4)].count(1)
            safest = min(safest, alone)
    assert replicas(reply).count(1) <= safest
