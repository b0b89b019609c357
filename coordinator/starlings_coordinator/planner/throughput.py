"""Microbatches per second that a choice of spans reaches: the node form of the linear programme, and a surrogate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from starlings_coordinator.planner.fleet import Option
from starlings_protos.messages import WorkerId

Choice = Mapping[WorkerId, Option]


@dataclass(frozen=True, slots=True)
class Flow:
    """`prices`: by how much more microbatches/s would rise per microbatch/s of further capacity at each stage.

    They add up to 1; the highest stages bind.
    """

    microbatches_per_s: float
    prices: tuple[float, ...]
    # Workers that a microbatch passes on average, at least: 1 when all is done within one span.
    hops: float
    # Seconds of work per second, by worker.
    load: Mapping[WorkerId, float]


def solve_flow(choice: Choice, stage_count: int) -> Flow:
    """Maximise F with sum_w x[w,s] = F for every stage and sum_s seconds[w,s] x[w,s] <= 1 for every worker (HiGHS).

    Design, section 5, without links. F is 0 when a stage has no holder.

    Raises:
        ArithmeticError: the solver gave up.
    """
    workers = sorted(choice)
    covered = {s for option in choice.values() for s in option.span.stages}
    if len(covered) < stage_count:
        return Flow(0.0, (0.0,) * stage_count, 0.0, {})
    stage_of: list[int] = []
    worker_of: list[int] = []
    seconds: list[float] = []
    lengths: list[int] = []
    for row, worker_id in enumerate(workers):
        option = choice[worker_id]
        for stage, stage_seconds in zip(option.span.stages, option.seconds, strict=True):
            stage_of.append(stage)
            worker_of.append(row)
            seconds.append(stage_seconds)
            lengths.append(len(option.span.stages))
    count = len(seconds)
    columns = np.arange(count)
    balance = csr_matrix(
        (
            np.concatenate([np.ones(count), -np.ones(stage_count)]),
            (
                np.concatenate([stage_of, np.arange(stage_count)]),
                np.concatenate([columns, np.full(stage_count, count)]),
            ),
        ),
        shape=(stage_count, count + 1),
    )
    # In units of a typical microbatch's seconds, so that the solver's absolute tolerances mean something.
    scale = float(np.median(seconds))
    capacity = csr_matrix(
        (np.asarray(seconds) / scale, (worker_of, columns)), shape=(len(workers), count + 1)
    )
    cost = np.zeros(count + 1)
    cost[-1] = -1.0
    answer = linprog(
        cost,
        A_ub=capacity,
        b_ub=np.ones(len(workers)),
        A_eq=balance,
        b_eq=np.zeros(stage_count),
        method="highs",
    )
    if not answer.success:
        raise ArithmeticError(f"the linear programme has no answer: {answer.message}")
    flow = float(-answer.fun)
    share = np.asarray(answer.x[:-1])
    load = np.bincount(worker_of, weights=share * np.asarray(seconds) / scale, minlength=len(workers))
    prices = np.abs(np.asarray(answer.eqlin.marginals))
    return Flow(
        flow / scale,
        tuple(float(p) for p in prices),
        float(np.sum(share / np.asarray(lengths)) / flow) if flow > 0 else 0.0,
        {w: float(part) for w, part in zip(workers, load, strict=True)},
    )


def pour(levels: Sequence[float], option: Option) -> list[float]:
    """Stage levels (microbatches/s) after one worker spent its second on its span's lowest stages: water-filling."""
    order = sorted(option.span.stages, key=lambda s: levels[s])
    budget_s, cost_s = 1.0, 0.0
    level = levels[order[0]]
    poured = list(levels)
    for position, stage in enumerate(order):
        cost_s += option.second_of(stage)
        ceiling = levels[order[position + 1]] if position + 1 < len(order) else float("inf")
        step = min(ceiling - level, budget_s / cost_s)
        level += step
        budget_s -= step * cost_s
        if budget_s <= 1e-12:
            for raised in order[: position + 1]:
                poured[raised] = level
            break
    return poured
