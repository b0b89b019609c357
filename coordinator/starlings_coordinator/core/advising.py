"""What to ask the planner about the plan that stands, and what its answer means in words. Asking changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member, MemberState
from starlings_coordinator.core.observers import stage_words
from starlings_coordinator.core.phase import Phase
from starlings_job.optimizers import state_bytes_per_parameter
from starlings_protos.advice_messages import Advice, AdviceRequest
from starlings_protos.messages import PlanRequest, PlanWorker, WorkerId
from starlings_protos.status import Because

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Where nothing says how long a job has yet to run.
UNKNOWN_REMAINING_S = 86_400.0
WEIGHT_BYTES = 4
# Below this part of the swarm's rate, what somebody adds is lost in what estimates are off.
NOTHING_MUCH = 0.005


def remaining_s(core: Core) -> float:
    """Until the job ends, at its present rate."""
    job, rate = core.config.job, core.rates.tokens_per_s()
    left = max(0, job.steps_total * job.tokens_per_step - core.state.tokens)
    return left / rate if rate > 0 else UNKNOWN_REMAINING_S


def advice_request(core: Core, about: WorkerId | None = None) -> AdviceRequest | str:
    """The question, or why there is none to ask now. `about`: only what this worker is worth to the swarm."""
    job, state = core.config.job, core.state
    if core.phase is not Phase.TRAINING or not state.stages:
        return f"Nothing is trained just now (the job is {core.phase.value}), so there is no plan to amend."
    holders = {h.worker_id: h for h in core.holders}
    if any(h.probe is None for h in holders.values()):
        return "Some holder has not been measured since the coordinator was started: ask again in a moment."
    optimizer = state_bytes_per_parameter(job.train.optimizer, job.train.momentum)
    copied = [
        (WEIGHT_BYTES + optimizer) * sum(core.config.profile.blocks[b].parameter_count for b in stage.blocks)
        for stage in state.stages
    ]
    slowdowns = {w: core.watch.slowdown(w) for w in holders}
    plan = PlanRequest(
        0,
        tuple(holders[w].plan_worker(state.spans[w]) for w in sorted(holders)),
        job.job.seed,
        job.train.microbatch,
        job.microbatches_per_step,
        job.bytes_per_parameter,
        state.stages,
        stages_most=job.stages_most,
    )
    return AdviceRequest(
        plan,
        job.pipeline.codec,
        tuple(copied),
        remaining_s(core),
        tuple(_slower(holders[w], slowdowns[w]) for w in sorted(holders) if slowdowns[w] > 1),
        tuple(m.plan_worker() for _, m in sorted(core.members.items()) if _stands_by(m)),
        tuple(sorted(w for w, h in holders.items() if h.leaving is not None)),
        about or "",
    )


def _stands_by(member: Member) -> bool:
    return member.usable and member.state is MemberState.STANDBY


def _slower(holder: Member, factor: float) -> PlanWorker:
    """As it is now. (A thin uplink is not told from a slow device here: either keeps its stages' microbatches.)"""

    def times(seconds: Mapping[str, float]) -> dict[str, float]:
        return {kind: factor * s for kind, s in seconds.items()}

    worker = holder.plan_worker()
    return replace(
        worker,
        forward_seconds=times(worker.forward_seconds),
        backward_seconds=times(worker.backward_seconds),
    )


# ---------------------------------------------------------------- in words


def worth_words(advice: Advice, worker_id: WorkerId, microbatch_tokens: int) -> Because:
    """What a worker is worth to the swarm, from the answer to a question about it."""
    now, then = advice.rate_now * microbatch_tokens, advice.rate_then * microbatch_tokens
    mine = next((move for move in advice.moves if move.worker_id == worker_id), None)
    if mine is not None and mine.before is None and mine.after is not None:
        gain = (then - now) / now if now > 0 else 0.0
        return Because(
            "plan",
            f"The planner would give it {stage_words(mine.after)}, which would make the swarm {gain:.1%} faster "
            f"(about {now:,.0f} to {then:,.0f} tokens/s): {advice.verdict}.",
        )
    if advice.question.startswith("the swarm with "):
        return Because("plan", "The planner finds no span with which it would make the swarm faster.")
    before = advice.rate_before * microbatch_tokens
    part = (before - now) / before if before > 0 else 0.0
    if now <= 0:
        return Because("plan", "Without it some stage has no holder, and the swarm stands still.")
    if part < NOTHING_MUCH:
        return Because("plan", "Without it the swarm would be as fast, as far as the planner can tell.")
    return Because(
        "plan",
        f"Without it the swarm would be about {part:.0%} slower ({before:,.0f} to {now:,.0f} tokens/s), by what was "
        "measured.",
    )
