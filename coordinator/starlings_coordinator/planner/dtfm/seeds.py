"""Structured first grids: neighbours by link together, in tiles of some stages by some pipelines.

Tiles of one column are whole pipelines inside a region, tiles of one row whole stages inside a region, and what lies
between mixes both: a region that holds a few consecutive stages of a few pipelines.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from starlings_coordinator.planner.dtfm.problem import DtfmProblem, Floats, Grid

# Scales at which groups are looked at, and how much farther what comes next must be.
GROUPINGS_MOST = 4
LEAP_LEAST = 0.01


def structured_grids(problem: DtfmProblem) -> list[Grid]:
    """Every tiling, each laid along the stages first and along the pipelines first, and runs packed into groups."""
    distance = problem.exchange_s + 2 * problem.transfer_s
    order, groupings = neighbours_together(distance)
    grids = [
        tiled(order, problem.stages, problem.replicas, height, width, down_first)
        for height in _divisors(problem.stages)
        for width in _divisors(problem.replicas)
        for down_first in (True, False)
    ]
    for grouping in groupings:
        for height in range(2, problem.stages):
            packed = packed_runs(grouping, problem.stages, problem.replicas, height)
            if packed is not None:
                grids.append(packed)
    return list({grid.tobytes(): grid for grid in grids}.values())


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def neighbours_together(distance: Floats) -> tuple[Grid, list[list[list[int]]]]:
    """[N]: an order in which near ones stand together, at every scale; and how they are grouped at some scales.

    These are the leaves of average linkage (UPGMA), merged along chains of nearest neighbours (Murtagh 1983), so that
    it takes N^2 steps. Of equally near ones the biggest group is taken, and groups that merge keep their orders, the
    bigger (then the earlier) first: what has nobody near comes last. A grouping is that just before merging leaps.
    """
    count = len(distance)
    far = distance.astype(float).copy()
    np.fill_diagonal(far, np.inf)
    size = np.ones(count)
    members: list[list[int]] = [[n] for n in range(count)]
    alive = np.ones(count, bool)
    chain: list[int] = []
    merges: list[tuple[float, int, int]] = []
    for _ in range(count - 1):
        if not chain:
            chain.append(int(np.where(alive, size, 0).argmax()))
        while True:
            top = chain[-1]
            least = far[top].min()
            # Means of equal distances differ by rounding.
            equal = far[top] <= least * (1 + 1e-9)
            # Of equals the one that the chain came from, or it would never turn.
            if len(chain) > 1 and equal[chain[-2]]:
                break
            chain.append(int(np.where(equal, size, 0).argmax()))
        one, two = chain.pop(), chain.pop()
        merges.append((float(far[one, two]), one, two))
        kept, gone = sorted((one, two), key=lambda n: (-size[n], members[n][0]))
        merged = (size[kept] * far[kept] + size[gone] * far[gone]) / (size[kept] + size[gone])
        merged[[kept, gone]] = np.inf
        far[kept], far[:, kept] = merged, merged
        far[gone], far[:, gone] = np.inf, np.inf
        size[kept] += size[gone]
        members[kept] = members[kept] + members[gone]
        alive[gone] = False
    order = np.array(members[int(np.flatnonzero(alive)[0])], dtype=np.int64)
    return order, _groupings(order, merges)


def _groupings(order: Grid, merges: list[tuple[float, int, int]]) -> list[list[list[int]]]:
    """The groups at the widest leaps between the distances of merges, each group and all of them in `order`."""
    merges = sorted(merges, key=lambda merge: merge[0])
    heights = np.array([height for height, _, _ in merges])
    leaps = np.diff(heights) / np.maximum(heights[1:], 1e-300)
    found = []
    for last in np.argsort(-leaps, kind="stable")[:GROUPINGS_MOST]:
        if leaps[last] <= LEAP_LEAST:
            break
        edges = np.array([(one, two) for _, one, two in merges[: last + 1]])
        graph = csr_matrix((np.ones(len(edges)), edges.T), shape=(len(order), len(order)))
        _, label = connected_components(graph, directed=False)
        groups: dict[int, list[int]] = {}
        for device in order:
            groups.setdefault(int(label[device]), []).append(int(device))
        found.append(list(groups.values()))
    return found


def packed_runs(groups: list[list[int]], stages: int, replicas: int, height: int) -> Grid | None:
    """`height` stages whose pipelines stay within groups, then the same with what is left, as high as it goes.

    None where there is no room for so many runs of that height.
    """
    left = [list(group) for group in groups]
    rows: list[Grid] = []
    while stages:
        height = min(height, stages)
        room = [len(group) // height for group in left]
        if sum(room) < replicas:
            if not rows:
                return None
            height -= 1
            continue
        # Whoever is divided without a rest first; then in the groups' own order.
        taken, wanted = [0] * len(left), replicas
        for number in sorted(range(len(left)), key=lambda n: (len(left[n]) % height, n)):
            taken[number] = min(room[number], wanted)
            wanted -= taken[number]
        runs = [
            group[k * height : (k + 1) * height]
            for group, t in zip(left, taken, strict=True)
            for k in range(t)
        ]
        rows.append(np.array(runs, dtype=np.int64).T)
        left = [group[t * height :] for group, t in zip(left, taken, strict=True)]
        stages -= height
    return np.ascontiguousarray(np.concatenate(rows))


def tiled(order: Grid, stages: int, replicas: int, height: int, width: int, down_first: bool) -> Grid:
    """Consecutive devices of `order` fill tiles of `height` stages by `width` pipelines, tile after tile."""
    tiles = order.reshape(-1, width, height)
    across, along = replicas // width, stages // height
    # [tile along, tile across, column, row] -> [row of all, column of all]
    laid = (
        tiles.reshape(across, along, width, height).transpose(1, 0, 2, 3)
        if down_first
        else tiles.reshape(along, across, width, height)
    )
    return np.ascontiguousarray(laid.transpose(0, 3, 1, 2).reshape(stages, replicas))
