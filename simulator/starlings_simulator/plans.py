"""A planner for simulations:

any plan that covers every stage, drawn from a seed, so that unlike spans meet.
"""

from __future__ import annotations

import random
from itertools import pairwise

from starlings_protos.messages import PlannedWorker, PlanReply, PlanRequest, Span, Stage


def cut(block_count: int, stage_count: int, rng: random.Random) -> tuple[Stage, ...]:
    """`stage_count` contiguous runs of at least one block."""
    bounds = [0, *sorted(rng.sample(range(1, block_count), stage_count - 1)), block_count]
    return tuple(Stage(low, high - 1) for low, high in pairwise(bounds))


def cover(worker_count: int, stage_count: int, rng: random.Random) -> list[Span]:
    """One span per worker; every stage is in some span. Uncovered stages are added to the span nearest by."""
    spans = []
    for _ in range(worker_count):
        first = rng.randrange(stage_count)
        spans.append([first, min(stage_count - 1, first + rng.randrange(3))])
    for stage in range(stage_count):
        if any(first <= stage <= last for first, last in spans):
            continue
        gap = [max(first - stage, stage - last) for first, last in spans]
        nearest = spans[gap.index(min(gap))]
        nearest[0], nearest[1] = min(nearest[0], stage), max(nearest[1], stage)
    return [Span(first, last) for first, last in spans]


def draw_plan(request: PlanRequest, block_count: int, stages_wanted: int, least_workers: int) -> PlanReply:
    """Deterministic in the request. Impossible with fewer than `least_workers` workers."""
    workers = sorted(request.workers, key=lambda worker: worker.worker_id)
    if len(workers) < least_workers:
        missing = least_workers - len(workers)
        return PlanReply(request.request_id, impossible=f"needs {missing} more worker{'s' * (missing > 1)}")
    rng = random.Random(f"{request.seed}:{request.request_id}:{len(workers)}")
    stages = request.stages or cut(block_count, min(stages_wanted, block_count), rng)
    spans = cover(len(workers), len(stages), rng)
    planned = []
    for worker, span in zip(workers, spans, strict=True):
        span = worker.held or span
        # Sometimes fewer slots than stages: then nothing leaves inside the span.
        slots = rng.choice([1, len(span.stages), len(span.stages) + 1, len(span.stages) + 3])
        planned.append(PlannedWorker(worker.worker_id, span, slots))
    return PlanReply(request.request_id, stages, tuple(planned), 1.0, 1.0, "compute")
