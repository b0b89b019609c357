"""How a group's vector is cut into parts, one per member. Pure; every member derives the same cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlings_job.apportion import apportion

# Codecs quantise in blocks, usually of 64 or 128; every part begins with a whole one. Where a codec's blocks or chunks
# are larger, the last one of a part is short, which costs a scale or some more kept values per part.
PART_MULTIPLE_ELEMENTS = 128


def cut(size: int, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Bounds [start, stop) of each member's part, by largest remainder in units of 128 elements.

    A share of 0 gets nothing; a small vector among many members may leave others with nothing too. Equal
    remainders go to the earlier member.

    Raises:
        ValueError: shares that are negative, not finite, or do not add up to 1.
    """
    if not shares or any(not math.isfinite(s) or s < 0 for s in shares):
        raise ValueError(f"shares must be finite and not negative: {list(shares)}")
    if abs(sum(shares) - 1.0) > 1e-6:
        raise ValueError(f"shares must add up to 1, not {sum(shares)}")
    units = -(-size // PART_MULTIPLE_ELEMENTS)
    counts = apportion(units, shares)
    bounds, begin = [], 0
    for count in counts:
        end = begin + count
        bounds.append((min(begin * PART_MULTIPLE_ELEMENTS, size), min(end * PART_MULTIPLE_ELEMENTS, size)))
        begin = end
    return tuple(bounds)
