"""The cut of a vector into fragments: the same everywhere, as equal as rows allow, and nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_worker.outer.fragments import cut_into_fragments, fragment_of_slot


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    start: int
    stop: int


def laid_out(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    tensors, position = [], 0
    for shape in shapes:
        tensors.append(Tensor(shape, position, position + prod(shape)))
        position += prod(shape)
    return tensors


def allowed_places(tensors: list[Tensor]) -> set[int]:
    places: set[int] = set()
    for tensor in tensors:
        places |= {tensor.start, tensor.stop}
        if len(tensor.shape) >= 2:
            places |= set(range(tensor.start, tensor.stop, max(1, prod(tensor.shape[1:]))))
    return places


shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 30), st.integers(1, 20)),
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 9))
def test_fragments_cover_the_vector_and_are_cut_between_rows(
    given_shapes: list[tuple[int, ...]], count: int
) -> None:
    tensors = laid_out(given_shapes)
    size, places = tensors[-1].stop, allowed_places(tensors)
    if len(places - {0, size}) < count - 1:
        with pytest.raises(ValueError, match="fewer fragments"):
            cut_into_fragments(tensors, count)
        return
    bounds = cut_into_fragments(tensors, count)
    assert len(bounds) == count
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(begin < end for begin, end in bounds)
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert {place for bound in bounds for place in bound} <= places
    assert cut_into_fragments(laid_out(given_shapes), count) == bounds


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 400), st.integers(1, 64), st.integers(1, 8))
def test_fragments_of_even_rows_differ_by_a_row_at_most(rows: int, row: int, count: int) -> None:
    sizes = [end - begin for begin, end in cut_into_fragments(laid_out([(rows, row)]), count)]
    assert max(sizes) - min(sizes) <= row


def test_a_cut_takes_the_nearest_place() -> None:
    assert cut_into_fragments(laid_out([(10,), (3, 4), (20,)]), 2) == ((0, 22), (22, 42))
    assert cut_into_fragments(laid_out([(4,), (100,), (4,)]), 3) == ((0, 4), (4, 104), (104, 108))


def test_fragments_take_turns() -> None:
    assert [fragment_of_slot(slot, 3) for slot in range(7)] == [0, 1, 2, 0, 1, 2, 0]
