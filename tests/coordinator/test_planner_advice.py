"""Advice about a plan that stands: each question has an answer with its reason, and asking changes nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import planner_fleets
from planner_fleets import MODELS, swarm

from starlings_coordinator.core.advising import advice_request, worth_words
from starlings_coordinator.planner.__main__ import answer
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.gain import LastReplica, TooCostly, TooLittle, Worthwhile, verdict_words
from starlings_coordinator.planner.linear.advice import AS_IT_IS, advise
from starlings_coordinator.planner.linear.planning import plan_with_links
from starlings_protos.advice_messages import AdviceReply, AdviceRequest
from starlings_protos.convert import to_proto
from starlings_protos.messages import PlanRequest, WorkerId
from starlings_protos.process_pb2 import ToPlanner
from support.streaming_world import lazy_world

PROFILE = MODELS["1.1B"]


@pytest.fixture(scope="module")
def request_() -> AdviceRequest:
    """Twelve that hold what the planner gave them, and one who stands by."""
    planner_fleets.SHARED = Path("/nothing")
    asked = swarm(13, "lab", PROFILE, 1)
    *there, newcomer = asked.workers
    asked = replace(asked, workers=tuple(there))
    *_, plan = plan_with_links(Fleet(asked, PROFILE), codec="int8:128", seed=1, programmes=10)
    held = {
        worker: plan.problem.span_of(int(option))
        for worker, option in zip(plan.problem.worker_ids, plan.found.choice, strict=True)
        if option >= 0
    }
    holders = tuple(replace(w, held=held[w.worker_id]) for w in there if w.worker_id in held)
    copied = tuple(12.0 * PROFILE.stage_parameters(s.first_block, s.last_block) for s in plan.stages)
    standing = replace(asked, stages=plan.stages, workers=holders)
    return AdviceRequest(standing, "int8:128", copied, 86_400.0, idle=(newcomer,))


def test_each_question_has_its_answer_with_a_reason(request_: AdviceRequest) -> None:
    slow = request_.plan.workers[0]
    slow = replace(
        slow,
        forward_seconds={k: 4 * s for k, s in slow.forward_seconds.items()},
        backward_seconds={k: 4 * s for k, s in slow.backward_seconds.items()},
    )
    leaving = request_.plan.workers[1].worker_id
    reply = advise(replace(request_, slowed=(slow,), leaving=(leaving,)), PROFILE)
    as_it_is, slower, left, idle = reply.advice
    assert as_it_is.question == AS_IT_IS
    assert slower.question.endswith("slower than measured")
    assert slow.worker_id in slower.question
    assert slower.rate_now < as_it_is.rate_now
    assert leaving in left.question
    assert left.rate_now < as_it_is.rate_now
    assert [move.worker_id for move in idle.moves] == [request_.idle[0].worker_id]
    assert idle.moves[0].before is None
    assert idle.worthwhile
    assert idle.migration_bytes > 0
    assert idle.rate_then > idle.rate_now
    for advice in reply.advice:
        assert advice.verdict.startswith(("worth it", "not worth it", "not possible", "nobody should move"))
        assert bool(advice.moves) or not advice.worthwhile
        assert np.isfinite([advice.rate_now, advice.rate_then, advice.migration_s]).all()


def test_one_worker_is_asked_about(request_: AdviceRequest) -> None:
    holder, newcomer = request_.plan.workers[0].worker_id, request_.idle[0].worker_id
    (without,) = advise(replace(request_, about=holder), PROFILE).advice
    assert without.rate_now < without.rate_before
    words = worth_words(without, holder, 1000).text
    assert words.startswith("Without it the swarm would be")
    (with_it,) = advise(replace(request_, about=newcomer), PROFILE).advice
    words = worth_words(with_it, newcomer, 1000).text
    assert "would make the swarm" in words
    assert "worth it" in words
    assert advise(replace(request_, about="nobody"), PROFILE).advice == ()


def test_the_planner_answers_in_its_turn_and_never_raises(request_: AdviceRequest) -> None:
    def ask(request: AdviceRequest) -> AdviceReply:
        message = ToPlanner()
        to_proto(request, message.advice)
        said = answer(message)
        assert isinstance(said, AdviceReply)
        return said

    plan = replace(request_.plan, profile_json=PROFILE.to_json())
    assert len(ask(replace(request_, plan=plan)).advice) == 2
    assert "failed" in ask(replace(request_, plan=plan, copied_bytes=(1.0,))).failure
    assert "failed" in ask(replace(request_, plan=replace(plan, profile_json=b"{"))).failure


def test_verdicts_in_words() -> None:
    assert (
        verdict_words(Worthwhile(100, 3))
        == "worth it: 100 more microbatches until then, for 3 that moving costs"
    )
    assert "stage 2 would have no holder" in verdict_words(LastReplica(2))
    assert "2.0% faster" in verdict_words(TooLittle(0.02))
    assert "would not become faster" in verdict_words(TooLittle(-0.1))
    assert "less than 1.5 times the 8" in verdict_words(TooCostly(10, 8))


def test_the_core_asks_about_the_plan_that_stands_and_changes_nothing_by_it() -> None:
    world = lazy_world()
    world.join("we", lazy=True)
    before, next_id = world.core.snapshot(), world.core.planning._request_id
    request = advice_request(world.core, WorkerId("wd"))
    assert isinstance(request, AdviceRequest)
    assert isinstance(request.plan, PlanRequest)
    assert {w.worker_id: w.held for w in request.plan.workers} == dict(world.core.state.spans)
    assert [w.worker_id for w in request.idle] == ["we"]
    assert request.about == "wd"
    assert len(request.copied_bytes) == 3
    reply = advise(request, world.config.profile)
    assert len(reply.advice) == 1
    assert (world.core.snapshot(), world.core.planning._request_id) == (before, next_id)


def test_a_job_that_does_not_train_has_no_plan_to_amend() -> None:
    from support.core_world import World, config

    world = World(config(), {"wa": (0, 2)})
    world.boot()
    assert "no plan to amend" in str(advice_request(world.core))
