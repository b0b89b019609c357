"""What a span would be worth to a worker at given prices: where to look for better choices.

With prices for microbatches between stages (`Prices.value`), every worker is a small business: it takes microbatches in
at one boundary, does its stages, and passes them on at another, as fast as its compute and its site's link allow. By
duality a move that does not raise a worker's worth at the optimal prices cannot raise F (to first order).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from starlings_coordinator.planner.linear.node_form import Prices
from starlings_coordinator.planner.linear.problem import Floats, Ints, Problem

# How a worker's scarcity is divided among compute, up and down, for worths that are never too low.
_WEIGHTS = tuple((4 - u - d, u, d) for u in range(5) for d in range(5 - u))


def run_values(
    problem: Problem, mode: int, prices: Prices, weights: tuple[Floats, Floats, Floats] | None = None
) -> Floats:
    """[w, a, b]: worth of passing all of a worker's microbatches through exactly stages a..b; -inf where b < a.

    Args:
        weights: per worker, of compute, up and down, adding up to 1: what it has of the three is made one resource by
            these weights. The best run then bounds all mixtures of runs (Lagrange); without, what is scarcest decides.
    """
    stages = problem.stages
    alone = problem.site_sizes[problem.site] == 1
    if weights is None:
        rate = problem.run_rates[mode]
    else:
        rate = 1 / np.maximum(problem.run_seconds[mode], 1e-12)
        shares = [weight[alone][:, None, None] for weight in weights]
        used = shares[0] / rate[alone]
        for share, rates, size in zip(
            shares[1:], (problem.up, problem.down), problem.link_bytes, strict=True
        ):
            used = used + share * (size / rates[problem.site[alone], None, None])
        rate[alone] = 1 / np.maximum(used, 1e-12)
    values = rate * (prices.value[None, None, 1:] - prices.value[None, :-1, None])
    shared = np.flatnonzero(~alone)
    if len(shared):
        value = site_prices(problem, prices)[problem.site[shared]]
        values[shared] = rate[shared] * (value[:, None, 1:] - value[:, :-1, None])
    values[:, np.arange(stages)[:, None] > np.arange(stages)[None, :]] = -np.inf
    return np.asarray(values)


def site_prices(problem: Problem, prices: Prices) -> Floats:
    """[g, s]: at what price the workers of a site pass on to each other a microbatch that has passed s stages.

    It lies between what others pay for one and what they ask for one, less and with what its way over the link costs.
    """
    # Worth per byte/s: `prices` has it per whole link.
    up = np.where(np.isfinite(problem.up), prices.up / np.maximum(problem.up, 1e-12), 0.0)[:, None]
    down = np.where(np.isfinite(problem.down), prices.down / np.maximum(problem.down, 1e-12), 0.0)[:, None]
    forward = np.concatenate([[0.0], problem.forward_bytes, [0.0]])[None]
    backward = np.concatenate([[0.0], problem.backward_bytes, [0.0]])[None]
    sell = prices.value[None] - up * forward - down * backward
    buy = prices.value[None] + up * backward + down * forward
    own = np.where(np.isnan(prices.site_value), prices.value[None], prices.site_value)
    return np.asarray(np.clip(own, sell, buy))


def carried_over(old: Problem, new: Problem, prices: Prices) -> Prices:
    """Prices of one problem in another with the same cut: sites are known by their names, a new one's link is free."""
    place = {name: number for number, name in enumerate(old.site_names)}
    known = np.array([place.get(name, -1) for name in new.site_names])
    up, down = (np.where(known >= 0, side[known], 0.0) for side in (prices.up, prices.down))
    site_value = np.where(known[:, None] >= 0, prices.site_value[known], np.nan)
    return Prices(prices.value, site_value, np.zeros(new.workers), up, down)


def best_within(values: Floats) -> Floats:
    """[w, a, b]: the best of all runs within stages a..b."""
    best = values.copy()
    stages = values.shape[1]
    for length in range(1, stages):
        a = np.arange(stages - length)
        b = a + length
        inner = np.maximum(best[:, a + 1, b], best[:, a, b - 1])
        best[:, a, b] = np.maximum(best[:, a, b], inner)
    return best


def stage_values(problem: Problem) -> Floats:
    """[s, o]: what option o could do of stage s at most: its worth if passing that stage were all that counts."""
    stages = problem.stages
    values = np.zeros((stages, len(problem.first)))
    for mode in np.unique(problem.mode):
        of_mode: Ints = np.flatnonzero(problem.mode == mode)
        rates = problem.run_rates[int(mode)]
        for stage in range(stages):
            there = of_mode[(problem.first[of_mode] <= stage) & (problem.last[of_mode] >= stage)]
            # The best of all runs around the stage within a..b: a falling, b rising.
            best = np.maximum.accumulate(rates[:, stage::-1, stage:], axis=1)
            best = np.maximum.accumulate(best, axis=2)
            values[stage, there] = best[
                problem.owner[there], stage - problem.first[there], problem.last[there] - stage
            ]
    return values


def option_values(problem: Problem, prices: Prices, *, sure: bool = False) -> Floats:
    """[o]: what each option would be worth to its worker, in parts of F.

    Args:
        sure: never too low, at a dozen times the effort. Else mixtures of runs are not looked at.
    """
    tried = list(_weights(problem, prices)) if sure else [None]
    worth = np.zeros(len(problem.first))
    for mode in np.unique(problem.mode):
        of_mode: Ints = np.flatnonzero(problem.mode == mode)
        place = problem.owner[of_mode], problem.first[of_mode], problem.last[of_mode]
        each = [best_within(run_values(problem, int(mode), prices, weights))[place] for weights in tried]
        worth[of_mode] = np.min(each, axis=0)
    return np.maximum(worth, 0.0)


def _weights(problem: Problem, prices: Prices) -> Iterator[tuple[Floats, Floats, Floats]]:
    """A few for all workers alike, and those that the programme itself found where it did."""
    ones = np.ones(problem.workers)
    for compute, up, down in _WEIGHTS:
        yield ones * compute / 4, ones * up / 4, ones * down / 4
    parts = np.stack([prices.compute, prices.up[problem.site], prices.down[problem.site]])
    whole = parts.sum(axis=0)
    found = np.where(whole > 0, parts / np.maximum(whole, 1e-300), [[1.0], [0.0], [0.0]])
    yield found[0], found[1], found[2]
