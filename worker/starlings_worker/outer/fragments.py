"""Which part of a group's vector a slot exchanges. Pure: every replica finds the same cut from the same shapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Protocol


class Placed(Protocol):
    """A tensor's place in the vector: elements [start, stop)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


Bounds = tuple[int, int]


def cut_into_fragments(tensors: Sequence[Placed], fragments: int) -> tuple[Bounds, ...]:
    """The bounds [begin, end) of `fragments` contiguous parts of the vector, as equal in size as rows allow.

    A cut falls between two tensors, or between two rows of a tensor with two or more dimensions: block codecs scale
    along rows, and a row that is cut in two is encoded differently than a whole one. Part k ends at the allowed place
    nearest to (k + 1) / fragments of the vector; the lower one of two.

    Args:
        tensors: in the vector's order, without gaps (`FlatVector.slots`).

    Raises:
        ValueError: the vector has fewer places to cut at.
    """
    if fragments < 1:
        raise ValueError("a vector has at least one fragment")
    places = _places(tensors)
    size = tensors[-1].stop if tensors else 0
    if len(places) < fragments - 1 or size < fragments:
        raise ValueError(
            f"a vector of {size} elements can be cut at {len(places)} places, which makes {len(places) + 1} fragments "
            f"at most, not {fragments}; write fewer fragments"
        )
    cuts = [0]
    first = 0
    for number in range(1, fragments):
        # Leave a place for each cut that is still to come.
        last = len(places) - (fragments - 1 - number) - 1
        at = _nearest(places, number * size, fragments, first, last)
        cuts.append(places[at])
        first = at + 1
    cuts.append(size)
    return tuple(pairwise(cuts))


def fragment_of_slot(slot: int, fragments: int) -> int:
    """Fragments take turns: slot k exchanges fragment k mod P."""
    return slot % fragments


def _places(tensors: Sequence[Placed]) -> list[int]:
    """Where the vector may be cut, ascending, without its ends."""
    size = tensors[-1].stop if tensors else 0
    places: list[int] = []
    for tensor in tensors:
        row = prod(tensor.shape[1:]) if len(tensor.shape) >= 2 else tensor.stop - tensor.start
        places += range(tensor.start, tensor.stop, max(1, row))
    return sorted({place for place in places if 0 < place < size})


def _nearest(places: Sequence[int], numerator: int, denominator: int, first: int, last: int) -> int:
    """Index of the place in places[first : last + 1] nearest to numerator / denominator, in whole numbers."""
    right = bisect_left(places, numerator, first, last, key=lambda place: place * denominator)
    left = max(first, right - 1)
    distance_left = abs(places[left] * denominator - numerator)
    return left if distance_left <= abs(places[right] * denominator - numerator) else right
