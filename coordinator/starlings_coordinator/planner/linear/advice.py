"""What should become of a plan that stands, for people: each question priced, with the gain rule's reason. Pure.

Questions that make sense are asked one by one, so that each answer says what it is about: the plan as it is, holders
that are slower than measured or want to leave, workers that stand by, and one worker that somebody wants to know about.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.gain import verdict_words
from starlings_coordinator.planner.linear.amend import Answer, Outlook, price
from starlings_coordinator.planner.linear.board import Change
from starlings_coordinator.planner.linear.standing import Standing, standing
from starlings_job.profile import Profile
from starlings_protos.advice_messages import Advice, AdviceReply, AdviceRequest, AdvisedMove
from starlings_protos.messages import WorkerId

AS_IT_IS = "the plan as it is"


def advise(request: AdviceRequest, profile: Profile) -> AdviceReply:
    """
    Raises:
        ArithmeticError, ValueError: as `standing`.
    """
    plan = standing(Fleet(request.plan, profile), request.codec, np.array(request.copied_bytes))
    return AdviceReply(request.plan.request_id, tuple(_answers(request, plan)))


def _answers(request: AdviceRequest, plan: Standing) -> Iterator[Advice]:
    outlook = Outlook(request.remaining_s)
    if request.about:
        yield from _about(request, plan, outlook)
        return
    yield _advice(AS_IT_IS, price(plan, Change(), outlook))
    if request.slowed:
        yield _advice(
            f"{_names(w.worker_id for w in request.slowed)} slower than measured",
            price(plan, Change(request.slowed), outlook),
        )
    if request.leaving:
        yield _advice(
            f"{_names(iter(request.leaving))} about to leave",
            price(plan, Change(left=frozenset(request.leaving)), outlook),
        )
    if request.idle:
        yield _advice(
            f"{_names(w.worker_id for w in request.idle)} standing by",
            price(plan, Change(request.idle), outlook),
        )


def _about(request: AdviceRequest, plan: Standing, outlook: Outlook) -> Iterator[Advice]:
    """Without a holder, or with one that holds nothing."""
    about = WorkerId(request.about)
    if about in plan.holders:
        yield _advice(f"the swarm without {about}", price(plan, Change(left=frozenset((about,))), outlook))
    for worker in request.idle:
        if worker.worker_id == about:
            yield _advice(f"the swarm with {about}", price(plan, Change((worker,)), outlook))


def _advice(question: str, answer: Answer) -> Advice:
    amendment = answer.amendment
    moves = tuple(
        AdvisedMove(worker_id, before, after)
        for worker_id, (before, after) in sorted(amendment.moves.items())
    )
    return Advice(
        question,
        moves,
        amendment.rate_now,
        amendment.rate_meanwhile,
        amendment.rate_then,
        amendment.migration_bytes,
        amendment.migration_s,
        answer.made,
        verdict_words(answer.verdict) if moves else "nobody should move: no other span would make it faster",
        answer.rate_before,
    )


def _names(workers: Iterator[WorkerId]) -> str:
    names = sorted(workers)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
