"""Spans for a given cut: greedy covering, the fastest worker first, then local search. Deterministic."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.throughput import pour, surrogate
from starlings_protos.messages import Span, Stage, WorkerId

# Surrogate evaluations of the local search; each costs about 5 us per worker.
EVALUATIONS_MOST = 20_000


def feasible_spans(fleet: Fleet, stages: Sequence[Stage]) -> dict[WorkerId, tuple[Span, ...]]:
    """Every run of stages that fits a worker's memory, longest first."""
    found: dict[WorkerId, tuple[Span, ...]] = {}
    for worker in fleet.workers:
        spans = []
        for first in range(len(stages)):
            for last in range(first, len(stages)):
                if fleet.holding(worker, stages[first].first_block, stages[last].last_block) is None:
                    break
                spans.append(Span(first, last))
        found[worker.worker_id] = tuple(sorted(spans, key=lambda s: (-len(s.stages), s.first_stage)))
    return found


def find_spans(
    stage_count: int,
    feasible: Mapping[WorkerId, Sequence[Span]],
    seconds: Mapping[WorkerId, Sequence[float]],
    seed: int,
) -> dict[WorkerId, Span]:
    """The best spans found; they may leave a stage uncovered when no order of covering works."""
    able = [w for w in sorted(feasible) if feasible[w]]
    fast_first = sorted(able, key=lambda w: (sum(seconds[w]), w))
    roomy_first = sorted(able, key=lambda w: (-max(len(s.stages) for s in feasible[w]), sum(seconds[w]), w))
    narrow_first = sorted(able, key=lambda w: (len(feasible[w]), sum(seconds[w]), w))
    best: dict[WorkerId, Span] = {}
    best_key: tuple[float, ...] = ()
    for order in (fast_first, roomy_first, narrow_first):
        spans = _improve(_cover(order, stage_count, feasible, seconds), stage_count, feasible, seconds, seed)
        key = surrogate(able, spans, seconds, stage_count)
        if key > best_key:
            best, best_key = spans, key
    return best


def _cover(
    order: Sequence[WorkerId],
    stage_count: int,
    feasible: Mapping[WorkerId, Sequence[Span]],
    seconds: Mapping[WorkerId, Sequence[float]],
) -> dict[WorkerId, Span]:
    """Each worker in turn takes the span that lifts the lowest stages most; the longest of equals."""
    levels = [0.0] * stage_count
    spans: dict[WorkerId, Span] = {}
    for w in order:
        chosen = max(feasible[w], key=lambda span: (sorted(pour(levels, span, seconds[w])), len(span.stages)))
        spans[w] = chosen
        levels = pour(levels, chosen, seconds[w])
    return spans


def _improve(
    spans: dict[WorkerId, Span],
    stage_count: int,
    feasible: Mapping[WorkerId, Sequence[Span]],
    seconds: Mapping[WorkerId, Sequence[float]],
    seed: int,
) -> dict[WorkerId, Span]:
    """Move one worker's span at a time while that raises the sorted levels."""
    workers = sorted(spans)
    rng = random.Random(seed)
    budget = EVALUATIONS_MOST // max(1, len(workers))
    key = surrogate(workers, spans, seconds, stage_count)
    moved = True
    while moved and budget > 0:
        moved = False
        rng.shuffle(workers)
        for w in workers:
            for span in feasible[w]:
                if span == spans[w] or budget <= 0:
                    continue
                budget -= 1
                trial = {**spans, w: span}
                trial_key = surrogate(workers, trial, seconds, stage_count)
                if trial_key > key:
                    spans, key, moved = trial, trial_key, True
    return spans
