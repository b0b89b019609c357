"""Perfect matchings whose heaviest edge is as light as possible."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching


def bottleneck_matching(weights: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.int64]]:
    """The least possible heaviest weight, and the column of each row.

    Bisection over the weights, with a maximum matching (Hopcroft and Karp) among those below each threshold. None can
    do with less than the lightest edge of each row and column, which is where it starts, and often ends.

    Args:
        weights: [n, n].
    """
    least = max(float(weights.min(axis=1).max()), float(weights.min(axis=0).max()))
    thresholds = np.unique(weights[weights >= least])
    low, high = 0, len(thresholds) - 1
    found = _matching(weights, thresholds[0])
    if found is not None:
        return float(thresholds[0]), found
    best = _matching(weights, thresholds[high])
    while high - low > 1:
        middle = (low + high) // 2
        found = _matching(weights, thresholds[middle])
        if found is None:
            low = middle
        else:
            high, best = middle, found
    assert best is not None, "all edges together hold a perfect matching"
    return float(thresholds[high]), best


def _matching(weights: npt.NDArray[np.float64], most: float) -> npt.NDArray[np.int64] | None:
    column = maximum_bipartite_matching(csr_matrix(weights <= most), perm_type="column")
    return None if (column < 0).any() else np.asarray(column, dtype=np.int64)
