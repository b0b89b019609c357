"""Microbatches per second that given spans reach: the node form of the linear programme, and a fast surrogate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from starlings_protos.messages import Span, WorkerId


@dataclass(frozen=True, slots=True)
class Flow:
    """`per_stage_price`: microbatches/s gained per further microbatch/s of capacity at the stage; the largest binds."""

    microbatches_per_s: float
    per_stage_price: tuple[float, ...]


def solve_flow(
    spans: Mapping[WorkerId, Span], seconds: Mapping[WorkerId, Sequence[float]], stage_count: int
) -> Flow:
    """Maximise F with sum_w x[w,s] = F for every stage and sum_s seconds[w,s] x[w,s] <= 1 for every worker (HiGHS)."""
    variables = [(w, s) for w, span in sorted(spans.items()) for s in span.stages]
    if len({s for _, s in variables}) < stage_count:
        return Flow(0.0, (0.0,) * stage_count)
    workers = sorted(spans)
    row_of = {w: i for i, w in enumerate(workers)}
    cost = np.zeros(len(variables) + 1)
    cost[-1] = -1.0
    a_eq = np.zeros((stage_count, len(variables) + 1))
    a_ub = np.zeros((len(workers), len(variables) + 1))
    for column, (w, s) in enumerate(variables):
        a_eq[s, column] = 1.0
        a_ub[row_of[w], column] = seconds[w][s]
    a_eq[:, -1] = -1.0
    answer = linprog(
        cost, A_ub=a_ub, b_ub=np.ones(len(workers)), A_eq=a_eq, b_eq=np.zeros(stage_count), method="highs"
    )
    if not answer.success:
        raise ArithmeticError(f"the planner's linear programme failed: {answer.message}")
    prices = tuple(abs(float(price)) for price in answer.eqlin.marginals)
    return Flow(float(-answer.fun), prices)


def pour(levels: Sequence[float], span: Span, seconds: Sequence[float]) -> list[float]:
    """Stage levels (microbatches/s) after one worker spent its second on its span's lowest stages: water-filling."""
    order = sorted(span.stages, key=lambda s: levels[s])
    budget_s, rising, cost_s = 1.0, [], 0.0
    level = levels[order[0]]
    for position, stage in enumerate(order):
        rising.append(stage)
        cost_s += seconds[stage]
        ceiling = levels[order[position + 1]] if position + 1 < len(order) else float("inf")
        step = min(ceiling - level, budget_s / cost_s)
        level += step
        budget_s -= step * cost_s
        if budget_s <= 1e-12:
            break
    poured = list(levels)
    for stage in rising:
        poured[stage] = level
    return poured


def surrogate(
    order: Sequence[WorkerId],
    spans: Mapping[WorkerId, Span],
    seconds: Mapping[WorkerId, Sequence[float]],
    stage_count: int,
) -> tuple[float, ...]:
    """Levels after every worker poured, sorted: compared lexicographically it has no plateaus. Never above the LP."""
    levels = [0.0] * stage_count
    # Those with the least choice first, so that the others can level out what they left.
    for w in sorted((w for w in order if w in spans), key=lambda w: len(spans[w].stages)):
        levels = pour(levels, spans[w], seconds[w])
    return tuple(sorted(levels))
