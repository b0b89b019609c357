"""The order of stages: the shortest open path through all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Up to so many stages the path is the shortest there is.
EXACT_MOST = 12


def best_order(cost: npt.NDArray[np.float64]) -> list[int]:
    """A path through all places of a symmetric cost matrix; the shortest up to EXACT_MOST, else good.

    Held and Karp, "A dynamic programming approach to sequencing problems" (1962); beyond, nearest neighbours from each
    place, the best of them improved by reversals (2-opt).
    """
    places = len(cost)
    if places < 3:
        return list(range(places))
    return _shortest(cost) if places <= EXACT_MOST else _improved(cost, _nearest(cost))


def path_cost(cost: npt.NDArray[np.float64], order: Sequence[int]) -> float:
    return float(cost[list(order[:-1]), list(order[1:])].sum())


def _shortest(cost: npt.NDArray[np.float64]) -> list[int]:
    """length[members, last]: of the shortest path through a set of places that ends at one of them."""
    places = len(cost)
    length = np.full((1 << places, places), np.inf)
    came = np.full((1 << places, places), -1)
    length[1 << np.arange(places), np.arange(places)] = 0.0
    for members in range(1, 1 << places):
        ends = length[members]
        through = ends[:, None] + cost
        best = through.argmin(axis=0)
        for place in range(places):
            grown = members | 1 << place
            if grown != members and through[best[place], place] < length[grown, place]:
                length[grown, place], came[grown, place] = through[best[place], place], best[place]
    members = (1 << places) - 1
    place = int(length[members].argmin())
    order = [place]
    while came[members, place] >= 0:
        members, place = members ^ 1 << place, int(came[members, place])
        order.append(place)
    return order


def _nearest(cost: npt.NDArray[np.float64]) -> list[int]:
    paths = []
    for start in range(len(cost)):
        order, left = [start], set(range(len(cost))) - {start}
        while left:
            order.append(min(left, key=lambda place: (cost[order[-1], place], place)))
            left.remove(order[-1])
        paths.append(order)
    return min(paths, key=lambda order: path_cost(cost, order))


def _improved(cost: npt.NDArray[np.float64], order: list[int]) -> list[int]:
    best, improved = path_cost(cost, order), True
    while improved:
        improved = False
        for a in range(len(order)):
            for b in range(a + 1, len(order)):
                turned = order[:a] + order[a : b + 1][::-1] + order[b + 1 :]
                length = path_cost(cost, turned)
                if length < best * (1 - 1e-12):
                    order, best, improved = turned, length, True
    return order
