"""Whole numbers that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that add up to `total`, by largest remainder.

    A weight of 0 gets nothing. Equal remainders go to the earlier one.

    Raises:
        ValueError: weights that are negative or not finite, or all 0.
    """
    whole = math.fsum(weights)
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not (0 < whole < math.inf):
        raise ValueError(f"weights must be finite, not negative, and not all 0: {list(weights)}")
    exact = [weight / whole * total for weight in weights]
    counts = [math.floor(part) for part in exact]
    order = sorted(
        (i for i, weight in enumerate(weights) if weight > 0), key=lambda i: (counts[i] - exact[i], i)
    )
    for position in range(total - sum(counts)):
        counts[order[position % len(order)]] += 1
    return counts
