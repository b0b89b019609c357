"""Who gets which span: the planner of live jobs, and where that takes too long a rounding of the relaxed programme."""

from __future__ import annotations

import numpy as np

from starlings_coordinator.planner.cuts import balanced_cut
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.planning import STAGES_MOST
from starlings_coordinator.planner.linear.problem import IDLE, Ints, Problem, build_problem
from starlings_coordinator.planner.linear.relaxed import relax
from starlings_coordinator.planner.linear.seeds import repaired, rounded
from starlings_coordinator.planner.linear.values import option_values, stage_values
from starlings_coordinator.planner.plan import make_plan
from starlings_job.profile import Profile
from starlings_protos.messages import PlannedWorker, PlanReply, PlanRequest, Stage

# The planner of live jobs takes ten seconds for so many.
THOROUGH_MOST = 1000


def plan_of(request: PlanRequest, profile: Profile, codec: str) -> PlanReply:
    """Like `make_plan`; for more than `THOROUGH_MOST` workers without its search."""
    if len(request.workers) <= THOROUGH_MOST:
        return make_plan(request, profile)
    fleet = Fleet(request, profile)
    stages = request.stages or _cut(fleet)
    problem = build_problem(fleet, stages, codec)
    held = np.array([worker.held is not None for worker in fleet.workers])
    choice = _beside(problem, held) if held.any() else _rounded(problem)
    if choice is None:
        return PlanReply(request.request_id, impossible="the workers cannot hold every stage")
    planned = []
    for number, worker in enumerate(fleet.workers):
        option = int(choice[number])
        if option == IDLE:
            planned.append(PlannedWorker(worker.worker_id, reason="no stage fits in its memory"))
            continue
        span = problem.span_of(option)
        first, last = stages[span.first_stage].first_block, stages[span.last_stage].last_block
        holding = fleet.holding(worker.memory_bytes, first, last, len(span.stages))
        slots, recompute = (holding.slots, holding.recompute) if holding is not None else (1, True)
        planned.append(PlannedWorker(worker.worker_id, span, slots, recompute))
    return PlanReply(request.request_id, tuple(stages), tuple(planned))


def _cut(fleet: Fleet) -> tuple[Stage, ...]:
    request = fleet.request
    blocks = len(fleet.profile.blocks)
    count = request.stages_wanted or min(blocks, STAGES_MOST, request.stages_most or blocks)
    times, sizes = fleet.typical_block_seconds(), fleet.block_bytes()
    whole = sum(times), sum(sizes)
    return balanced_cut([t / whole[0] + s / whole[1] for t, s in zip(times, sizes, strict=True)], count)


def _rounded(problem: Problem) -> Ints | None:
    relaxed = relax(problem)
    if relaxed is None:
        return None
    return repaired(problem, rounded(problem, relaxed, option_values(problem, relaxed.prices), 0.5))


def _beside(problem: Problem, held: Ints) -> Ints:
    """Those who hold nothing take, one after another, what lifts the weakest stages most."""
    worth = stage_values(problem)
    choice = np.where(held, problem.starts[:-1], IDLE)
    sums = worth[:, choice[held]].sum(axis=1)
    for worker in np.flatnonzero(~held):
        own = slice(int(problem.starts[worker]), int(problem.starts[worker + 1]))
        if own.start == own.stop:
            continue
        typical = max(float(sums.mean()), 1e-300)
        levels = (sums[:, None] + worth[:, own]) / typical
        # As in `seeds.covering`, steeper: most of what it does goes where least is.
        choice[worker] = own.start + int(np.argmin(np.sum(np.maximum(levels, 1e-9) ** -8.0, axis=0)))
        sums = sums + worth[:, choice[worker]]
    return choice
