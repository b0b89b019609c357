"""How others place workers, on the same swarm and cut, judged by the same linear programme: the best routing for each.

Spans are theirs, so that none gets stages for free that its rule would not have given it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from starlings_coordinator.planner.linear.node_form import Flow, solve
from starlings_coordinator.planner.linear.problem import IDLE, Ints, Problem
from starlings_coordinator.planner.linear.search import search

Spans = dict[int, tuple[int, int]]


def flow_of(problem: Problem, spans: Spans) -> Flow:
    """What flows when each worker holds exactly that span, in the mode of the longest option around it."""
    starts: list[int] = [0]
    first: list[int] = []
    last: list[int] = []
    mode: list[int] = []
    choice = np.full(problem.workers, IDLE)
    for worker in range(problem.workers):
        if worker in spans:
            a, b = spans[worker]
            choice[worker] = len(first)
            first.append(a)
            last.append(b)
            mode.append(int(problem.mode[_around(problem, worker, a, b)]))
        starts.append(len(first))
    arrays: list[Ints] = [np.array(values, dtype=np.int64) for values in (starts, first, last, mode)]
    exactly = replace(problem, starts=arrays[0], first=arrays[1], last=arrays[2], mode=arrays[3])
    return solve(exactly, choice)


def rate_of(problem: Problem, spans: Spans) -> float:
    """Microbatches/s of `flow_of`; 0 where a stage has no holder."""
    return flow_of(problem, spans).rate


def _around(problem: Problem, worker: int, a: int, b: int) -> int:
    """The fastest option that has stages a..b."""
    own = range(int(problem.starts[worker]), int(problem.starts[worker + 1]))
    return min(
        (o for o in own if problem.first[o] <= a and b <= problem.last[o]), key=lambda o: int(problem.mode[o])
    )


def _fits(problem: Problem, worker: int, a: int, b: int) -> bool:
    return bool(problem.reach[worker, a] >= b)


def at_random(problem: Problem, seed: int) -> Spans:
    """Whatever fits: each worker as much as it can hold from a stage drawn for it."""
    rng = random.Random(seed)
    spans = {}
    for worker in range(problem.workers):
        starts = [a for a in range(problem.stages) if problem.reach[worker, a] >= a]
        if starts:
            a = rng.choice(starts)
            spans[worker] = (a, int(problem.reach[worker, a]))
    return spans


def equal_stages(problem: Problem, seed: int) -> Spans:
    """Classic pipelines: as few equal pieces as most workers can hold, workers dealt round to them in their order.

    Who cannot hold its piece gets the next that fits.
    """
    best: Spans = {}
    for pieces in range(1, problem.stages + 1):
        edges = [round(problem.stages * k / pieces) for k in range(pieces + 1)]
        runs = [(a, b - 1) for a, b in pairwise(edges)]
        spans = {}
        for worker in range(problem.workers):
            for turn in range(pieces):
                run = runs[(worker + turn) % pieces]
                if _fits(problem, worker, *run):
                    spans[worker] = run
                    break
        if len(spans) > len(best) and len(set(spans.values())) == pieces:
            best = spans
        if len(spans) >= 0.9 * problem.workers:
            break
    return best


def whole_models(problem: Problem, seed: int) -> Spans:
    """Plain data parallelism: whoever can hold all stages does, and nobody else takes part."""
    last = problem.stages - 1
    return {w: (0, last) for w in range(problem.workers) if _fits(problem, w, 0, last)}


def _pipelines(problem: Problem, order: Sequence[int], weight: Callable[[int], float]) -> Spans:
    """Groups whose memory suffices for the model, in `order`; within one, stages in proportion to `weight`."""
    spans: Spans = {}
    group: list[int] = []
    for worker in order:
        group.append(worker)
        laid = _lay(problem, group, weight)
        if laid is not None:
            spans |= laid
            group = []
    # Who is left over strengthens the stages from the first on.
    stage = 0
    for worker in group:
        reach = int(problem.reach[worker, stage])
        if reach >= stage:
            spans[worker] = (stage, reach)
            stage = (reach + 1) % problem.stages
    return spans


def _lay(problem: Problem, group: Sequence[int], weight: Callable[[int], float]) -> Spans | None:
    """All stages in consecutive spans, each as near its share as memory allows; None where they do not suffice."""
    spans: Spans = {}
    stage = 0
    for position, worker in enumerate(group):
        if stage >= problem.stages:
            break
        rest = sum(weight(w) for w in group[position:])
        wanted = max(1, round((problem.stages - stage) * weight(worker) / rest))
        reach = int(problem.reach[worker, stage])
        if reach < stage:
            continue
        spans[worker] = (stage, min(reach, stage + wanted - 1))
        stage = spans[worker][1] + 1
    return spans if stage >= problem.stages else None


def by_memory(problem: Problem, seed: int) -> Spans:
    """Pipelines that pool just enough memory, with layers in proportion to it (FlashFlex; Ravnest's clusters)."""
    order = sorted(range(problem.workers), key=lambda w: (-problem.memory[w], w))
    random.Random(seed).shuffle(order)
    return _pipelines(problem, order, lambda w: float(problem.memory[w]))


def by_speed(problem: Problem, seed: int) -> Spans:
    """The same pipelines with layers in proportion to speed."""
    order = list(range(problem.workers))
    random.Random(seed).shuffle(order)
    return _pipelines(problem, order, lambda w: float(np.sum(1 / problem.seconds[0, w])))


def without_links(problem: Problem, seed: int) -> Spans:
    """Our own search, blind for links: the best by speed and memory that we know how to find."""
    free = np.full(problem.sites, np.inf)
    found = list(search(replace(problem, up=free, down=free), seed=seed, programmes=6))
    if not found:
        return {}
    choice = found[-1].choice
    return {
        w: (int(problem.first[choice[w]]), int(problem.last[choice[w]]))
        for w in range(problem.workers)
        if choice[w] >= 0
    }


RIVALS: dict[str, Callable[[Problem, int], Spans]] = {
    "random": at_random,
    "equal": equal_stages,
    "memory": by_memory,
    "speed": by_speed,
    "no links": without_links,
}
