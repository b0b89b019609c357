"""Sets of whole numbers as sorted, disjoint, half-open ranges that do not touch: millions of samples in a few pairs."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def ranges_of(pairs: Iterable[Range]) -> Ranges:
    """Any pairs (first, end) in the one form that a set has; empty ones vanish."""
    merged: list[Range] = []
    for first, end in sorted(pairs):
        if first >= end:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def union(left: Ranges, right: Ranges) -> Ranges:
    return ranges_of((*left, *right))


def meet(left: Ranges, right: Ranges) -> Ranges:
    """What is in both."""
    found: list[Range] = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first < end:
            found.append((first, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def minus(left: Ranges, right: Ranges) -> Ranges:
    """What is in `left` alone."""
    if not left:
        return ()
    gaps: list[Range] = []
    begin = left[0][0]
    for first, end in right:
        gaps.append((begin, first))
        begin = max(begin, end)
    gaps.append((begin, max(begin, left[-1][1])))
    return meet(left, ranges_of(gaps))


def first_of(ranges: Ranges, count: int) -> Ranges:
    """The lowest `count` numbers, or all when there are fewer."""
    found: list[Range] = []
    for first, end in ranges:
        if count <= 0:
            break
        found.append((first, min(end, first + count)))
        count -= end - first
    return tuple(found)


def size(ranges: Ranges) -> int:
    return sum(end - first for first, end in ranges)
