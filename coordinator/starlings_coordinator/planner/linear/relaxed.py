"""The linear programme with all spans at once: each site divides its time among all runs of stages that it could hold.

Every plan of the cut is a solution, so no plan is faster; and its prices and shares are where a good plan is found. A
site of several workers counts as one machine as fast as all of them, which holds any run of what any of them can hold
and all of them have the memory for: within a site passing on is free.

    maximise F = sum of f[g, a, b] with a = 0;  f >= 0: microbatches/s that g takes through stages a..b as one run
    sum of f that end with stage s = sum of f that begin with stage s+1
    sum_{a,b} seconds[g, a..b] f <= 1;  sum_{a,b} bytes up[a, b] f <= up[g];  the same down
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from starlings_coordinator.planner.linear.node_form import Prices
from starlings_coordinator.planner.linear.problem import Bools, Floats, Ints, Problem

# More players than these are put together into groups of alike ones, which gives prices but no bound by itself.
PLAYERS_MOST = 96
# How finely weights of compute, up and down are tried for the bound (`bound_at`).
WEIGHT_STEPS = 6


@dataclass(frozen=True, eq=False)
class Players:
    """`runs[g, a, b]`: whether g could hold stages a..b; `count[g]`: of how many alike sites it is the mean."""

    seconds: Floats
    runs: Bools
    up: Floats
    down: Floats
    limited: Bools
    count: Floats

    @property
    def size(self) -> int:
        return len(self.count)


def players_of(problem: Problem) -> Players:
    """One per site; the seconds of each stage are the least possible."""
    stages = problem.stages
    seconds = np.full((problem.sites, stages), np.inf)
    runs = np.zeros((problem.sites, stages, stages), bool)
    upper = np.triu(np.ones((stages, stages), bool))
    alone = problem.site_sizes[problem.site] == 1
    seconds[problem.site[alone]] = problem.least_seconds[alone]
    grid = np.arange(stages)
    runs[problem.site[alone]] = upper & (grid[None, None, :] <= problem.reach[alone][:, :, None])
    for site in np.flatnonzero(problem.site_sizes > 1):
        least = problem.least_seconds[problem.site == site]
        least = least[np.isfinite(least).any(axis=1)]
        if not len(least):
            continue
        # A worker that is twice as fast has half the weight; the cheapest weighted seconds are what a stage costs.
        typical = np.mean(np.where(np.isfinite(least), least, 0), axis=1, where=np.isfinite(least))
        weight = (1 / typical) / np.sum(1 / typical)
        seconds[site] = np.min(least * weight[:, None], axis=0)
        room = problem.memory[(problem.site == site) & problem.holdable.any(axis=1)].sum()
        state = np.concatenate([[0.0], np.cumsum(problem.state)])
        fits = state[None, 1:] - state[:-1, None] <= room
        broken = np.cumsum(np.concatenate([[0], ~np.isfinite(seconds[site])]))
        runs[site] = upper & fits & (broken[grid[None, :] + 1] == broken[grid[:, None]])
    return Players(seconds, runs, problem.up, problem.down, problem.limited, np.ones(problem.sites))


@dataclass(frozen=True, eq=False)
class Relaxed:
    """`share[g, a, b]`: what part of what g can do goes to that run. `rate` bounds every plan of the cut."""

    rate: float
    prices: Prices
    players: Players
    # Per site of the problem, its player.
    player: Ints
    share: Floats


def relax(problem: Problem) -> Relaxed | None:
    """None when some stage can be held by nobody.

    Raises:
        ArithmeticError: the solver gave up.
    """
    players = players_of(problem)
    if not np.isfinite(players.seconds).any(axis=0).all():
        return None
    player = np.arange(problem.sites)
    grouped = players
    if players.size > PLAYERS_MOST:
        grouped, player = group_alike(players)
    rate, value, share, link_worth = _solve(problem, grouped)
    nothing = np.full((problem.sites, problem.stages + 1), np.nan)
    up, down = link_worth[:, player] / grouped.count[player]
    prices = Prices(value, nothing, np.zeros(problem.workers), up, down)
    if grouped is not players:
        rate = bound_at(problem, players, value)
    return Relaxed(rate, prices, grouped, player, share)


def group_alike(players: Players) -> tuple[Players, Ints]:
    """At most PLAYERS_MOST groups by what can be held, speed and links; coarser until there are few enough."""
    able = np.isfinite(players.seconds)
    speed = np.log2(np.sum(np.where(able, 1 / players.seconds, 0), axis=1) + 1e-300)
    links = [np.log2(np.where(np.isfinite(r), r, 1.0)) for r in (players.up, players.down)]
    reach = players.runs.sum(axis=(1, 2)).astype(float)
    width = 0.125
    while True:
        keys = np.stack(
            [
                np.round(reach / (1 + 4 * width)),
                np.round(speed / width),
                *(np.where(players.limited, np.round(link / width), 1e6) for link in links),
            ],
            axis=1,
        )
        _, inverse = np.unique(keys, axis=0, return_inverse=True)
        inverse = inverse.ravel()
        if inverse.max() < PLAYERS_MOST:
            break
        width *= 1.4
    count = np.bincount(inverse).astype(float)
    # The member with the median speed stands for what a group can hold.
    order = np.argsort(speed, kind="stable")
    middle = np.array([(m := order[inverse[order] == g])[len(m) // 2] for g in range(len(count))])

    def mean(values: Floats) -> Floats:
        return np.asarray(np.bincount(inverse, values) / count)

    with np.errstate(divide="ignore"):
        relative = 2 ** (speed[middle] - np.log2(mean(2**speed)))
    return (
        Players(
            players.seconds[middle] * relative[:, None],
            players.runs[middle],
            np.where(np.isfinite(players.up[middle]), mean(players.up), np.inf),
            np.where(np.isfinite(players.down[middle]), mean(players.down), np.inf),
            players.limited[middle],
            count,
        ),
        inverse,
    )


def _run_seconds(players: Players) -> Floats:
    """[g, a, b]; what a player cannot hold costs nothing here, as `runs` excludes it."""
    able = np.where(np.isfinite(players.seconds), players.seconds, 0.0)
    elapsed = np.concatenate([np.zeros((players.size, 1)), np.cumsum(able, axis=1)], axis=1)
    return np.asarray(np.maximum(elapsed[:, None, 1:] - elapsed[:, :-1, None], 1e-12))


def _solve(problem: Problem, players: Players) -> tuple[float, Floats, Floats, Floats]:
    """F, prices between stages, shares, and what the players' links are worth ([0]: up, [1]: down)."""
    stages = problem.stages
    seconds = _run_seconds(players)
    runs = players.runs.copy()
    # Where links cost nothing, runs of one stage make up all others.
    runs[~players.limited] &= np.eye(stages, dtype=bool)
    player, first, last = np.nonzero(runs)
    column = np.arange(len(player))
    up, down = (size[first, last] for size in problem.link_bytes)
    unit = 1 / float(np.median(seconds[player, first, last]))
    rows = [player]
    columns, amounts = [column], [seconds[player, first, last] * unit]
    resources = players.size
    links = []
    for rate, size in ((players.up, up), (players.down, down)):
        there = players.limited[player] & np.isfinite(rate[player]) & (size > 0)
        names, row = np.unique(player[there], return_inverse=True)
        rows.append(resources + row)
        columns.append(column[there])
        amounts.append(size[there] * unit / rate[player[there]])
        links.append((names, np.arange(resources, resources + len(names))))
        resources += len(names)
    capacity = np.concatenate([players.count, *(players.count[names] for names, _ in links)])
    use = csr_matrix(
        (np.concatenate(amounts), (np.concatenate(rows), np.concatenate(columns))),
        shape=(resources, len(player)),
    )
    ends, begins = last < stages - 1, first > 0
    balance = csr_matrix(
        (
            np.concatenate([np.ones(ends.sum()), -np.ones(begins.sum())]),
            (np.concatenate([last[ends], first[begins] - 1]), np.concatenate([column[ends], column[begins]])),
        ),
        shape=(stages - 1, len(player)),
    )
    answer = linprog(
        -(first == 0).astype(float),
        A_ub=use,
        b_ub=capacity,
        A_eq=balance if stages > 1 else None,
        b_eq=np.zeros(stages - 1) if stages > 1 else None,
        method="highs",
    )
    if not answer.success:
        raise ArithmeticError(f"the linear programme has no answer: {answer.message}")
    value = np.ones(stages + 1)
    value[0] = 0.0
    if stages > 1:
        value[1:-1] = np.clip(1.0 + np.asarray(answer.eqlin.marginals), 0.0, 1.0)
    # What part of its scarcest resource each run takes.
    part = np.zeros(len(player))
    for row, col, amount in zip(rows, columns, amounts, strict=True):
        np.maximum.at(part, col, amount * answer.x[col] / capacity[row])
    share = np.zeros(players.runs.shape)
    share[player, first, last] = part
    worth = np.zeros((2, players.size))
    for side, (names, row_numbers) in enumerate(links):
        worth[side, names] = -np.asarray(answer.ineqlin.marginals)[row_numbers] * capacity[row_numbers] * unit
    return float(-answer.fun * unit), value, share, worth


def bound_at(problem: Problem, players: Players, value: Floats) -> float:
    """No plan of the cut is faster, whatever prices `value` are: the better the prices, the tighter.

    Lagrange: with prices at the boundaries each site is on its own, and earns at most, for any weights (c, u, d) that
    add up to 1, the best (value[b+1] - value[a]) / (c seconds + u bytes up / up + d bytes down / down) of its runs.
    """
    gain = np.maximum(value[None, 1:] - value[:-1, None], 0.0)
    player, first, last = np.nonzero(players.runs & (gain > 0))
    if not len(player):
        return 0.0
    seconds, gain = _run_seconds(players)[player, first, last], gain[first, last]
    able, begins = np.unique(player, return_index=True)
    up, down = (size[first, last] for size in problem.link_bytes)
    with np.errstate(divide="ignore", invalid="ignore"):
        up_seconds = np.where(np.isfinite(players.up), 1 / players.up, 0.0)[player] * up
        down_seconds = np.where(np.isfinite(players.down), 1 / players.down, 0.0)[player] * down
        least = np.maximum.reduceat(gain / seconds, begins)
        # Without limits on links there is nothing to weigh.
        if (players.limited & (np.isfinite(players.up) | np.isfinite(players.down))).any():
            for u in range(WEIGHT_STEPS + 1):
                for d in range(WEIGHT_STEPS + 1 - u):
                    if u + d:
                        cost = (1 - (u + d) / WEIGHT_STEPS) * seconds
                        cost += u / WEIGHT_STEPS * up_seconds + d / WEIGHT_STEPS * down_seconds
                        least = np.minimum(least, np.maximum.reduceat(gain / cost, begins))
    return float(np.sum(least * players.count[able]))


def without_compute(players: Players) -> Players:
    """As if computing took no time: what links alone allow."""
    return replace(players, seconds=np.where(np.isfinite(players.seconds), 1e-9, np.inf))
