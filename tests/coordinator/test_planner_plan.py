"""The planner: memory is hard, every stage is covered, fast answers near the best, the same answer every time."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator.planner.cuts import balanced_cut, candidate_cuts, stage_counts
from starlings_coordinator.planner.fleet import SLOTS_MOST, Fleet, Holding, Option, useful_slots
from starlings_coordinator.planner.plan import make_plan
from starlings_coordinator.planner.search import find_cover
from starlings_coordinator.planner.throughput import pour, solve_flow
from starlings_protos import pipes
from starlings_protos.convert import from_proto, to_proto
from starlings_protos.messages import PlanReply, PlanRequest, PlanWorker, Span, Stage, WorkerId
from starlings_protos.process_pb2 import FromPlanner, ToPlanner
from starlings_worker.core.admission import lease_room
from support.core_world import profile

PROFILE = profile(8)
PER_PARAMETER = 20.0


def worker(name: str, speed: float, memory_bytes: int) -> PlanWorker:
    forward = {"layer": 0.01 / speed, "embed": 0.001 / speed, "head": 0.004 / speed}
    backward = {kind: 2 * seconds for kind, seconds in forward.items()}
    return PlanWorker(WorkerId(name), forward, backward, memory_bytes)


def request(*workers: PlanWorker, stages: tuple[Stage, ...] = (), seed: int = 0) -> PlanRequest:
    return PlanRequest(1, workers, seed, 4, 4, PER_PARAMETER, stages)


def need(first: int, last: int) -> int:
    return Fleet(request(worker("w", 1, 1)), PROFILE).need_bytes(first, last, 2)


WHOLE = need(0, 7)


def option(first: int, seconds: list[float]) -> Option:
    return Option(Span(first, first + len(seconds) - 1), tuple(seconds), Holding(4, False, 0))


def test_a_coarse_pipeline_codec_bounds_the_number_of_stages() -> None:
    """With a bound there are fewer stages; where that leaves too little room the job waits, and says so."""
    small = [worker(f"w{i}", 1.0, need(6, 7)) for i in range(8)]
    free = make_plan(request(*small), PROFILE)
    assert len(free.stages) > 5
    bound = replace(request(*small), stages_most=5)
    assert 1 <= len(make_plan(bound, PROFILE).stages) <= 5
    tiny = [worker(f"w{i}", 1.0, need(7, 7)) for i in range(8)]
    reply = make_plan(replace(request(*tiny), stages_most=2), PROFILE)
    assert not reply.stages
    assert "[pipeline] codec bears 2 stages at most" in reply.impossible
    # A cut that was trained with stays.
    cut = make_plan(request(*small), PROFILE).stages
    assert make_plan(replace(request(*small, stages=cut), stages_most=5), PROFILE).stages == cut


def test_the_owner_may_fix_how_many_stages_there_are() -> None:
    """The planner still says where to cut and who holds what, and names the key where too little memory is there."""
    roomy = [worker(f"w{i}", 1.0 + i, 1 << 40) for i in range(3)]
    assert len(make_plan(request(*roomy), PROFILE).stages) == 1
    for count in (1, 2, 5, 8):
        reply = make_plan(replace(request(*roomy), stages_wanted=count), PROFILE)
        assert len(reply.stages) == count
        assert [b for stage in reply.stages for b in stage.blocks] == list(range(8))
        assert all(p.span == Span(0, count - 1) for p in reply.workers)
    small = [worker(f"w{i}", 1.0, need(6, 7)) for i in range(8)]
    assert not make_plan(request(*small), PROFILE).impossible
    refused = make_plan(replace(request(*small), stages_wanted=2), PROFILE).impossible
    assert re.match(r"needs [0-9.]+ [kM]?B more on one worker for stage [01] \(", refused), refused
    assert refused.endswith("; [pipeline] stages fixes 2: more of them need less memory each")
    tiny = [worker(f"w{i}", 1.0, need(6, 7) // 50) for i in range(3)]
    refused = make_plan(replace(request(*tiny), stages_wanted=8), PROFILE).impossible
    assert "more on one worker" in refused
    assert "[pipeline]" not in refused, "blocks are never cut: no other number would help"


def test_one_roomy_worker_holds_the_whole_model_in_one_stage() -> None:
    reply = make_plan(request(worker("wa", 1.0, 1 << 40)), PROFILE)
    assert reply.stages == (Stage(0, 7),)
    assert reply.workers[0].span == Span(0, 0)
    assert reply.predicted_microbatches_per_s == pytest.approx(reply.bound_microbatches_per_s, rel=1e-6)
    assert reply.workers[0].slots >= 2
    assert not reply.workers[0].recompute
    assert reply.binding == "compute of all workers"


def test_unlike_workers_get_unlike_spans_near_the_bound() -> None:
    reply = make_plan(
        request(
            worker("wa", 1.0, WHOLE),
            worker("wb", 0.5, int(0.6 * WHOLE)),
            worker("wc", 0.5, int(0.6 * WHOLE)),
            worker("wd", 0.25, int(0.45 * WHOLE)),
        ),
        PROFILE,
    )
    spans = [p.span for p in reply.workers if p.span is not None]
    assert len(spans) == 4
    assert len(set(spans)) >= 3
    assert max(len(span.stages) for span in spans) > 1
    assert reply.predicted_microbatches_per_s >= 0.9 * reply.bound_microbatches_per_s


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.2)), min_size=1, max_size=6))
def test_plans_cover_every_stage_within_memory_or_say_what_is_missing(
    sizes: list[tuple[float, float]],
) -> None:
    workers = [worker(f"w{i}", speed, int(share * WHOLE)) for i, (speed, share) in enumerate(sizes)]
    reply = make_plan(request(*workers), PROFILE)
    assert make_plan(request(*reversed(workers)), PROFILE) == reply
    if reply.impossible:
        assert "needs" in reply.impossible
        assert reply.stages == ()
        return
    assert [b for stage in reply.stages for b in stage.blocks] == list(range(8))
    held = {s for p in reply.workers if p.span is not None for s in p.span.stages}
    assert held == set(range(len(reply.stages)))
    fleet = Fleet(request(*workers), PROFILE)
    for planned, given_worker in zip(reply.workers, sorted(workers, key=lambda w: w.worker_id), strict=True):
        if planned.span is None:
            assert "needs" in planned.reason
            continue
        first = reply.stages[planned.span.first_stage].first_block
        last = reply.stages[planned.span.last_stage].last_block
        used = fleet.need_bytes(first, last, planned.slots, planned.recompute)
        assert used <= planned.memory_bytes <= given_worker.memory_bytes
        assert 1 <= planned.slots <= SLOTS_MOST
    assert 0 < reply.predicted_microbatches_per_s <= reply.bound_microbatches_per_s * (1 + 1e-9)


def test_a_plan_is_found_whenever_single_blocks_fit_somewhere() -> None:
    """Small devices need a fine cut; each holds a few blocks."""
    room = need(3, 4)
    reply = make_plan(request(*[worker(f"w{i}", 1.0, room) for i in range(6)]), PROFILE)
    assert not reply.impossible
    assert len(reply.stages) >= 3


def test_the_shortage_is_named_with_figures() -> None:
    short = make_plan(request(worker("wa", 1.0, need(0, 4))), PROFILE)
    assert short.impossible.startswith("needs ")
    assert "more for stage" in short.impossible
    tiny = make_plan(request(worker("wa", 1.0, 1000)), PROFILE)
    assert "more on one worker for block" in tiny.impossible
    unmeasured = make_plan(request(PlanWorker(WorkerId("wa"), {}, {}, 1 << 40)), PROFILE)
    assert "did not measure" in unmeasured.impossible


def test_a_worker_that_fits_nothing_stands_by_with_the_reason() -> None:
    reply = make_plan(request(worker("wa", 1.0, WHOLE), worker("wb", 1.0, 1000)), PROFILE)
    assert reply.workers[1].span is None
    assert "more memory" in reply.workers[1].reason


def test_a_given_cut_is_kept() -> None:
    stages = (Stage(0, 1), Stage(2, 6), Stage(7, 7))
    reply = make_plan(request(worker("wa", 1.0, 1 << 40), stages=stages), PROFILE)
    assert reply.stages == stages


def test_search_is_near_brute_force_over_all_spans_of_a_cut() -> None:
    rng = random.Random(3)
    stages = balanced_cut([float(b.flops_per_sample) for b in PROFILE.blocks], 4)
    for case in range(4):
        workers = [worker(f"w{i}", rng.uniform(0.2, 1), int(rng.uniform(0.3, 1.0) * WHOLE)) for i in range(3)]
        fixed = request(*workers, stages=stages, seed=case)
        fleet = Fleet(fixed, PROFILE)
        every = []
        for w in workers:
            spans = [Span(a, b) for a in range(4) for b in range(a, 4)]
            fitting = [
                s
                for s in spans
                if fleet.holding(
                    w.memory_bytes,
                    stages[s.first_stage].first_block,
                    stages[s.last_stage].last_block,
                    len(s.stages),
                )
            ]
            every.append([fleet._option(w, stages, s) for s in fitting])
        best = max(
            solve_flow({w.worker_id: o for w, o in zip(workers, chosen, strict=True)}, 4).microbatches_per_s
            for chosen in itertools.product(*every)
        )
        reply = make_plan(fixed, PROFILE)
        assert bool(reply.impossible) == (best == 0)
        assert reply.predicted_microbatches_per_s >= 0.98 * best, (case, best)


def test_covers_are_found_where_the_greedy_order_fails() -> None:
    """The only way: the worker that reaches far must not begin at the left."""
    options = {
        WorkerId("wa"): (option(0, [0.1, 0.1]), option(1, [0.1, 0.1])),
        WorkerId("wb"): (option(0, [0.1]),),
    }
    cover = find_cover(options, 3, 0)
    assert cover is not None
    assert {w: o.span for w, o in cover.items()} == {"wb": Span(0, 0), "wa": Span(1, 2)}
    assert find_cover({WorkerId("wb"): options[WorkerId("wb")]}, 3, 0) is None
    many = {WorkerId(f"w{i:02d}"): (option(i, [0.1]),) for i in range(20)}
    cover = find_cover(many, 20, 0)
    assert cover is not None
    assert len(cover) == 20


def test_throughput_is_no_plain_maximum() -> None:
    """Two workers that hold both stages and one that holds one: 1/2 + 1/2 of each, and the third helps."""
    both = option(0, [1.0, 1.0])
    assert solve_flow({WorkerId("a"): both, WorkerId("b"): both}, 2).microbatches_per_s == pytest.approx(1.0)
    third = {WorkerId("a"): both, WorkerId("b"): both, WorkerId("c"): option(1, [1.0])}
    flow = solve_flow(third, 2)
    assert flow.microbatches_per_s == pytest.approx(1.5)
    assert sum(flow.prices) == pytest.approx(1.0)
    assert all(load <= 1 + 1e-9 for load in flow.load.values())
    assert solve_flow({WorkerId("c"): option(1, [1.0])}, 2).microbatches_per_s == 0.0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 5), min_size=3, max_size=3), st.lists(st.floats(0.05, 2), min_size=3, max_size=3)
)
def test_pouring_spends_exactly_a_second_on_the_lowest_levels(
    levels: list[float], seconds: list[float]
) -> None:
    after = pour(levels, option(0, seconds))
    spent = sum((b - a) * s for a, b, s in zip(levels, after, seconds, strict=True))
    assert spent == pytest.approx(1.0)
    raised = [b for a, b in zip(levels, after, strict=True) if b > a]
    assert max(raised) == pytest.approx(min(after))


def test_balanced_cuts_equal_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(20):
        costs = [rng.uniform(0.1, 3) for _ in range(7)]
        for count in range(1, 8):
            cut = balanced_cut(costs, count)
            assert len(cut) == count
            assert [b for stage in cut for b in stage.blocks] == list(range(7))
            largest = max(sum(costs[b] for b in stage.blocks) for stage in cut)
            brute = min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *bounds, 7)))
                for bounds in itertools.combinations(range(1, 7), count - 1)
            )
            assert largest == pytest.approx(brute)


def test_cuts_to_try_are_few_and_reach_single_blocks() -> None:
    assert stage_counts(1) == [1]
    assert stage_counts(8) == list(range(1, 9))
    assert stage_counts(100)[-1] == 100
    assert len(stage_counts(100)) < 25
    cuts = candidate_cuts([1.0] * 8, [5.0, *[1.0] * 6, 5.0])
    assert [len(cut) for cut in cuts] == sorted(len(cut) for cut in cuts)
    assert len(set(cuts)) == len(cuts)


@given(st.integers(1, 8), st.integers(1, 10))
def test_useful_slots_let_the_most_microbatches_enter(slots: int, stages: int) -> None:
    span = Span(0, stages - 1)
    chosen = useful_slots(slots, stages)
    assert 1 <= chosen <= slots
    assert lease_room(chosen, 0, span) == max(lease_room(fewer, 0, span) for fewer in range(1, slots + 1))


def test_the_planner_process_answers_over_its_pipe_also_to_nonsense() -> None:
    good, bad = ToPlanner(), ToPlanner()
    to_proto(request(worker("wa", 1.0, 1 << 40)), good.plan)
    good.plan.profile_json = PROFILE.to_json()
    bad.CopyFrom(good)
    bad.plan.profile_json = b"{"
    worse = ToPlanner()
    worse.CopyFrom(good)
    worse.plan.workers[0].memory_bytes = 2**64 - 1
    worse.plan.stages.add(first_block=5, last_block=900)
    sent = b"".join(map(pipes.pack, (bad, worse, good)))
    command = [sys.executable, "-m", "starlings_coordinator.planner"]
    done = subprocess.run(command, input=sent, capture_output=True, timeout=60, check=True)
    replies, rest = [], done.stdout
    while rest:
        length = int.from_bytes(rest[:4], "big")
        replies.append(from_proto(pipes.parse(rest[4 : 4 + length], FromPlanner).plan, PlanReply))
        rest = rest[4 + length :]
    assert "unreadable" in replies[0].impossible
    assert replies[1].impossible
    assert replies[2].workers[0].span == Span(0, 0)
