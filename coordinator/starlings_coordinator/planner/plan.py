"""`make_plan(request, profile) -> PlanReply`: cut, spans, slots, and the reason when there is no plan. Pure, by seed.

Memory is a hard limit; throughput is the node form of the linear programme of the design's section 5 (links are not
priced yet). Of cuts that are nearly as fast, the one with fewest stages wins: every boundary costs transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlings_coordinator.planner.cuts import balanced_cut
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.search import feasible_spans, find_spans
from starlings_coordinator.planner.throughput import Flow, solve_flow
from starlings_job.profile import Profile
from starlings_protos.messages import PlannedWorker, PlanReply, PlanRequest, Span, Stage, WorkerId

# More stages than this are not tried: the search would be slow, and boundaries cost more than balance gains.
STAGES_MOST = 24
# A cut with more stages must be this much faster per further stage.
GAIN_PER_STAGE = 0.01


@dataclass(frozen=True, slots=True)
class Candidate:
    stages: tuple[Stage, ...]
    spans: dict[WorkerId, Span]
    flow: Flow

    @property
    def score(self) -> float:
        return self.flow.microbatches_per_s * (1 - GAIN_PER_STAGE * (len(self.stages) - 1))


def make_plan(request: PlanRequest, profile: Profile) -> PlanReply:
    """The plan for these workers, or a reply whose `impossible` says with figures what is missing."""
    fleet = Fleet(request, profile)
    if not fleet.workers:
        return PlanReply(request.request_id, impossible="no worker is there")
    candidates = [_try_cut(fleet, stages) for stages in _cuts(fleet)]
    best = max(candidates, key=lambda c: (c.score, -len(c.stages)), default=None)
    if best is None or best.flow.microbatches_per_s <= 0:
        return PlanReply(request.request_id, impossible=_shortage(fleet, candidates))
    bound = sum(1 / fleet.whole_seconds(w.worker_id) for w in fleet.workers)
    return PlanReply(
        request.request_id,
        best.stages,
        tuple(_planned(fleet, best, worker.worker_id) for worker in fleet.workers),
        best.flow.microbatches_per_s,
        bound,
        _binding(best, bound),
    )


def _cuts(fleet: Fleet) -> list[tuple[Stage, ...]]:
    if fleet.request.stages:
        return [fleet.request.stages]
    costs = [float(max(1, block.flops_per_sample)) for block in fleet.profile.blocks]
    return [balanced_cut(costs, count) for count in range(1, min(len(costs), STAGES_MOST) + 1)]


def _try_cut(fleet: Fleet, stages: tuple[Stage, ...]) -> Candidate:
    seconds = {w.worker_id: fleet.stage_seconds(w.worker_id, stages) for w in fleet.workers}
    spans = find_spans(len(stages), feasible_spans(fleet, stages), seconds, fleet.request.seed)
    return Candidate(stages, spans, solve_flow(spans, seconds, len(stages)))


def _planned(fleet: Fleet, plan: Candidate, worker_id: WorkerId) -> PlannedWorker:
    span = plan.spans.get(worker_id)
    worker = next(w for w in fleet.workers if w.worker_id == worker_id)
    if span is None:
        smallest = min(fleet.need_bytes(s.first_block, s.last_block, 1, recompute=True) for s in plan.stages)
        missing = human_bytes(smallest - worker.memory_bytes)
        return PlannedWorker(worker_id, reason=f"needs {missing} more memory for the smallest stage")
    first, last = plan.stages[span.first_stage].first_block, plan.stages[span.last_stage].last_block
    holding = fleet.holding(worker, first, last)
    assert holding is not None
    return PlannedWorker(worker_id, span, holding.slots, holding.recompute, holding.memory_bytes)


def _binding(plan: Candidate, bound: float) -> str:
    if plan.flow.microbatches_per_s >= 0.97 * bound:
        return "the compute of all workers binds"
    prices = plan.flow.per_stage_price
    stage = max(range(len(prices)), key=lambda s: prices[s])
    return f"stage {stage} has too little compute: memory keeps others from holding it"


def _shortage(fleet: Fleet, candidates: Sequence[Candidate]) -> str:
    """What would have to be there: a block that fits nowhere, else the stages left over by the best covering."""
    blocks = fleet.profile.blocks
    roomiest = max(w.memory_bytes for w in fleet.workers)
    for index, block in enumerate(blocks):
        need = fleet.need_bytes(index, index, 1, recompute=True)
        if need > roomiest:
            return (
                f"needs {human_bytes(need - roomiest)} more on one worker for block {block.name} "
                f"({human_bytes(need)}; the largest worker offers {human_bytes(roomiest)})"
            )
    best: tuple[int, str] | None = None
    for candidate in candidates:
        held = {s for span in candidate.spans.values() for s in span.stages}
        missing = [s for s in range(len(candidate.stages)) if s not in held]
        if not missing:
            continue
        first, last = missing[0], missing[0]
        while last + 1 in missing:
            last += 1
        stages = candidate.stages
        need = fleet.need_bytes(stages[first].first_block, stages[last].last_block, 1, recompute=True)
        name = f"stage {first}" if first == last else f"stages {first}-{last}"
        blocks_named = f"{blocks[stages[first].first_block].name} to {blocks[stages[last].last_block].name}"
        text = f"needs {human_bytes(need)} more for {name} of {len(stages)} ({blocks_named})"
        if best is None or need < best[0]:
            best = (need, text)
    return best[1] if best is not None else "no worker can hold a stage"


def human_bytes(count: float) -> str:
    """Such as 3.1 GB; decimal units, as memory is sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{max(0, round(count))} B"
