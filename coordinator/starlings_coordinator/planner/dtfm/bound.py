"""What COMM-COST no placement goes below.

Two arguments, each about graphs of fast links:

- If a boundary is crossed within t seconds, all its pipelines stay within components of the graph G(t) of pairs with
  transfers of at most t. With j slower boundaries the stages fall into j + 1 runs of lengths L_1..L_{j+1}; inside run i
  each of the D pipelines lies in one component with at least L_i devices. Which j allow that at all is counted, and
  PIPELINEP = 2 * integral over t of (boundaries slower than t).
- If DATAP is at most T, devices of a stage are joined in the graph H(T) of pairs that could share a stage at that cost.
  Stages lie within its components, so neighbouring stages in different ones cost what the links between these do: at
  least a spanning tree of the components, as the order of the stages visits them all.

The bound is the least over T of T and the better of both arguments for PIPELINEP.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from starlings_coordinator.planner.dtfm.problem import DtfmProblem, Floats

# Runs of this many stages are enumerated exactly: 627 ways for 20.
ENUMERATED_MOST = 20
# Distinct costs beyond these are looked at in steps, which only loosens the bound.
LEVELS_MOST = 64


def lower_bound_s(problem: DtfmProblem) -> float:
    shared = sharing_s(problem)
    least = float(np.where(np.eye(problem.devices, dtype=bool), np.inf, shared).min(axis=1).max())
    if problem.replicas == 1:
        shared, least = np.zeros_like(shared), 0.0
    apart = pipelines_s(problem)
    levels = _levels(shared, least)
    best = np.inf
    # DATAP lies in [level, following): whatever pairs cost less than `following` may share stages.
    for level, following in zip(levels, [*levels[1:], np.inf], strict=True):
        if level >= best:
            break
        count, component = connected_components(csr_matrix(shared < following), directed=False)
        if (np.bincount(component) % problem.replicas).any():
            continue
        best = min(best, level + max(apart, 2 * _tree_s(problem, count, component)))
    return float(best)


def sharing_s(problem: DtfmProblem) -> Floats:
    """[d, e]: DATAP is at least that if d and e share a stage; the others of the stage are their nearest."""
    others = problem.replicas - 2
    if others < 0:
        return problem.exchange_s
    sums = np.cumsum(np.sort(problem.exchange_s, axis=1), axis=1)
    # The first of a sorted row is the device itself, with 0.
    near = sums[:, others]
    ranks = np.sort(problem.exchange_s, axis=1)[:, others]
    # If e is among the nearest it must not count twice.
    rest = np.where(
        problem.exchange_s <= ranks[:, None], sums[:, [others + 1]], near[:, None] + problem.exchange_s
    )
    return np.asarray(np.maximum(rest, rest.T))


def _levels(values: Floats, least: float) -> list[float]:
    distinct = np.unique(values[values > least])
    if len(distinct) > LEVELS_MOST:
        distinct = distinct[np.linspace(0, len(distinct) - 1, LEVELS_MOST).astype(int)]
    return [least, *map(float, distinct)]


def _tree_s(problem: DtfmProblem, count: int, component: Floats) -> float:
    """The lightest tree that joins the components."""
    if count == 1:
        return 0.0
    order = np.argsort(component, kind="stable")
    edges = np.flatnonzero(np.diff(component[order], prepend=-1))
    between = np.minimum.reduceat(problem.transfer_s[np.ix_(order, order)], edges, axis=0)
    between = np.minimum.reduceat(between, edges, axis=1)
    # A weight of 0 would be no edge: a little is added and taken away again.
    np.fill_diagonal(between, 0.0)
    tiny = 1e-9
    return float(minimum_spanning_tree(csr_matrix(between + tiny)).sum()) - tiny * (count - 1)


def pipelines_s(problem: DtfmProblem) -> float:
    """Of PIPELINEP, from the sizes of the components of G(t)."""
    if problem.stages == 1:
        return 0.0
    beside = ~np.eye(problem.devices, dtype=bool)
    levels = np.unique(problem.transfer_s[beside])
    if len(levels) > LEVELS_MOST:
        levels = levels[np.linspace(0, len(levels) - 1, LEVELS_MOST).astype(int)]
    # Below the fastest link all boundaries are slow.
    total = (problem.stages - 1) * float(levels[0])
    for level, following in pairwise(levels):
        # Between two levels that were looked at, nothing below `following` is faster than it.
        _, component = connected_components(
            csr_matrix((problem.transfer_s < following) & beside), directed=False
        )
        slow = slow_boundaries(np.bincount(component), problem.stages, problem.replicas)
        if not slow:
            break
        total += slow * float(following - level)
    return 2 * total


def slow_boundaries(sizes: np.ndarray, stages: int, replicas: int) -> int:
    """The least number of boundaries between components of these sizes, as far as counting tells."""
    if stages > ENUMERATED_MOST:
        return _by_small_ones(sizes, stages, replicas)
    for runs in range(1, stages + 1):
        for lengths in _partitions(stages, runs, stages):
            if _possible(sizes, lengths, replicas):
                return runs - 1
    raise AssertionError("single stages are always possible")


def _partitions(total: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if 1 <= total <= most:
            yield (total,)
        return
    for first in range(min(most, total - parts + 1), 0, -1):
        for rest in _partitions(total - first, parts - 1, first):
            yield (first, *rest)


def _possible(sizes: np.ndarray, lengths: tuple[int, ...], replicas: int) -> bool:
    """Necessary only: each run finds room, small components suffice for short runs, and each size is a sum of runs."""
    for length in set(lengths):
        if int((sizes // length).sum()) < replicas * lengths.count(length):
            return False
        in_shorter = replicas * sum(n for n in lengths if n < length)
        if int(sizes[sizes < length].sum()) > in_shorter:
            return False
    largest = int(sizes.max())
    reached = np.zeros(largest + 1, bool)
    reached[0] = True
    for length in set(lengths):
        for start in range(length, largest + 1):
            reached[start] |= reached[start - length]
    return bool(reached[sizes].all())


def _by_small_ones(sizes: np.ndarray, stages: int, replicas: int) -> int:
    """What lies in components smaller than n needs runs shorter than n, for any n."""
    slow = 0
    for size in np.unique(sizes[sizes < stages]):
        held = -(-int(sizes[sizes <= size].sum()) // replicas)
        runs = -(-held // int(size))
        # A run more for the rest of the stages.
        slow = max(slow, runs - (held >= stages))
    return slow
