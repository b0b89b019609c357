"""Placements by COMM-COST: structured grids, then swaps where the cost arises. Any-time, by seed, no clock.

What stages a placement has decides its cost, since they are arranged in the best way: where the evaluations suffice for
all ways to divide the devices among stages, all are looked at.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from starlings_coordinator.planner.dtfm.problem import DtfmProblem, Floats, Grid
from starlings_coordinator.planner.dtfm.seeds import structured_grids

# Of the structured grids, those that are arranged and improved.
IMPROVED = 4
# How much the evenness of boundaries and exchanges counts beside the cost, so that no two grids are equal by chance.
EVENNESS = 1e-3
# Swaps that are evaluated together.
SWAPS = 64
# Batches without a gain after which a grid is left.
QUIET_MOST = 6


@dataclass(frozen=True, eq=False)
class Placement:
    """`grid[k, r]`: who holds stage k of pipeline r. `evaluations`: grids that were evaluated until it was found."""

    grid: Grid
    cost_s: float
    evaluations: int


def search(problem: DtfmProblem, *, seed: int, evaluations: int) -> Iterator[Placement]:
    """Better and better placements, each whole by itself; the last is the answer. Equal arguments, equal answers.

    Args:
        evaluations: placements whose cost is computed at most, the first apart.
    """
    rng = random.Random(seed)
    spent = 0
    best: Placement | None = None

    def better(grid: Grid) -> Placement | None:
        cost_s = problem.grid_cost_s(grid)
        if best is not None and cost_s >= best.cost_s * (1 - 1e-12):
            return None
        return Placement(grid, cost_s, spent)

    # An arrangement takes about as long as evaluating as many grids as it matches pairs of stages.
    arranging = 1 + problem.stages * (problem.stages - 1) // 2
    if divisions(problem.stages, problem.replicas) * arranging <= evaluations:
        for rows in _divided(problem.stages, tuple(range(problem.devices))):
            spent += arranging
            if (found := better(problem.arranged(np.array(rows)))) is not None:
                best = found
                yield best
        return
    grids = structured_grids(problem)
    grids = grids[: max(1, evaluations)]
    spent += len(grids)
    ranked = sorted(grids, key=problem.grid_cost_s)[:IMPROVED]
    arranged = []
    for grid in ranked:
        spent += arranging
        arranged.append(problem.arranged(grid))
        if (found := better(arranged[-1])) is not None:
            best = found
            yield best
        if spent >= evaluations:
            return
    arranged.sort(key=problem.grid_cost_s)
    while spent < evaluations:
        for start in arranged:
            grid, used = _swapped(problem, start, rng, evaluations - spent)
            spent += used + arranging
            grid = problem.arranged(grid)
            if (found := better(grid)) is not None:
                best = found
                yield best
        assert best is not None
        arranged = [_shaken(problem, best.grid, rng)]


def divisions(stages: int, replicas: int) -> int:
    """In how many ways stages * replicas devices are divided among stages whose order does not matter."""
    orders = math.prod([math.factorial(replicas)] * stages) * math.factorial(stages)
    return math.factorial(stages * replicas) // orders


def _divided(stages: int, devices: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All of them, as rows."""
    if stages == 0:
        yield []
        return
    first, others = devices[0], devices[1:]
    for beside in itertools.combinations(others, len(devices) // stages - 1):
        left = tuple(device for device in others if device not in beside)
        for rows in _divided(stages - 1, left):
            yield [(first, *beside), *rows]


def _swapped(problem: DtfmProblem, grid: Grid, rng: random.Random, evaluations: int) -> tuple[Grid, int]:
    """Swaps of a device where the cost arises with others, as long as they gain; and how many were evaluated."""
    grid = grid.copy()
    sums = problem.exchange_s[grid[:, :, None], grid[:, None, :]].sum(axis=2)
    level = _level(problem, sums[None], problem.transfer_s[grid[:-1], grid[1:]][None])[0]
    used = quiet = 0
    while used < evaluations and quiet < QUIET_MOST:
        row, column = _critical(problem, grid, sums, rng)
        places = [p for p in range(problem.devices) if p // problem.replicas != row]
        if not places:
            break
        if len(places) > SWAPS:
            places = sorted(rng.sample(places, SWAPS))
        rows, columns = np.divmod(np.array(places), problem.replicas)
        levels = _levels_of_swaps(problem, grid, sums, row, column, rows, columns)
        used += len(places)
        chosen = int(levels.argmin())
        if levels[chosen] >= level * (1 - 1e-9):
            quiet += 1
            continue
        quiet, level = 0, float(levels[chosen])
        other = rows[chosen], columns[chosen]
        grid[row, column], grid[other] = grid[other], grid[row, column]
        for changed in (row, int(other[0])):
            sums[changed] = problem.exchange_s[np.ix_(grid[changed], grid[changed])].sum(axis=1)
    return grid, used


def _critical(problem: DtfmProblem, grid: Grid, sums: Floats, rng: random.Random) -> tuple[int, int]:
    """A device at the most expensive exchange, at the slowest transfer of a boundary, or anywhere: which, by chance."""
    kind = rng.random()
    if problem.stages > 1 and kind < 0.5:
        transfers = problem.transfer_s[grid[:-1], grid[1:]]
        slowest = transfers.max(axis=1)
        boundary = rng.choices(range(len(slowest)), [float(s) + 1e-12 for s in slowest])[0]
        ties = np.flatnonzero(transfers[boundary] >= slowest[boundary])
        return boundary + rng.randrange(2), int(rng.choice(list(ties)))
    if kind < 0.8:
        ties = np.flatnonzero(sums.ravel() >= sums.max())
        return divmod(int(rng.choice(list(ties))), problem.replicas)
    return rng.randrange(problem.stages), rng.randrange(problem.replicas)


def _levels_of_swaps(
    problem: DtfmProblem, grid: Grid, sums: Floats, row: int, column: int, rows: Grid, columns: Grid
) -> Floats:
    """[c]: the level of `grid` after the device at (row, column) changes places with that at (rows[c], columns[c])."""
    count = np.arange(len(rows))
    one, others = grid[row, column], grid[rows, columns]
    grids = np.broadcast_to(grid, (len(rows), *grid.shape)).copy()
    grids[:, row, column] = others
    grids[count, rows, columns] = one
    exchange = problem.exchange_s
    after = np.broadcast_to(sums, grids.shape).copy()
    after[:, row] += exchange[others][:, grid[row]] - exchange[one, grid[row]]
    after[:, row, column] = exchange[others][:, grid[row]].sum(axis=1) - exchange[others, one]
    after[count, rows] += exchange[one][grid[rows]] - exchange[others[:, None], grid[rows]]
    after[count, rows, columns] = exchange[one][grid[rows]].sum(axis=1) - exchange[one, others]
    return _level(problem, after, problem.transfer_s[grids[:, :-1], grids[:, 1:]])


def _level(problem: DtfmProblem, sums: Floats, transfers: Floats) -> Floats:
    """[c]: the cost of grids, and a little of the mean squares, which tells grids with equal maxima apart."""
    exchange_s = sums.max(axis=(1, 2))
    level = exchange_s + EVENNESS * np.sqrt(np.mean(sums**2, axis=(1, 2)))
    if problem.stages > 1:
        pipeline_s = 2 * transfers.max(axis=2).sum(axis=1)
        level += pipeline_s + EVENNESS * 2 * problem.stages * np.sqrt(np.mean(transfers**2, axis=(1, 2)))
    return np.asarray(level)


def _shaken(problem: DtfmProblem, grid: Grid, rng: random.Random) -> Grid:
    """A few devices, or two whole blocks of a pipeline, in each other's places."""
    grid = grid.copy()
    for _ in range(rng.randint(1, 3)):
        height = rng.randint(1, max(1, problem.stages // 2))
        one, two = (rng.randrange(problem.stages - height + 1) for _ in range(2))
        left, right = (rng.randrange(problem.replicas) for _ in range(2))
        if abs(one - two) < height and one != two:
            two = one
        upper, lower = slice(one, one + height), slice(two, two + height)
        grid[upper, left], grid[lower, right] = grid[lower, right].copy(), grid[upper, left].copy()
    return grid
