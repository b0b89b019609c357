"""The cut of a vector into parts: complete, disjoint, in proportion, equal everywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_worker.parts import PART_MULTIPLE_ELEMENTS, cut

_weights = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=20).filter(
    lambda w: sum(w) > 1e-3
)


@given(st.integers(0, 10_000_000), _weights)
def test_parts_cover_the_vector_once(size: int, weights: list[float]):
    shares = [w / sum(weights) for w in weights]
    parts = cut(size, shares)
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    for (begin, end), share in zip(parts, shares, strict=True):
        assert begin % PART_MULTIPLE_ELEMENTS == 0 or begin == size
        assert abs((end - begin) - share * size) < 2 * PART_MULTIPLE_ELEMENTS + 1e-6 * size
        if share == 0:
            assert begin == end


def test_a_small_vector_leaves_late_members_with_nothing():
    assert cut(130, [0.25] * 4) == ((0, 128), (128, 130), (130, 130), (130, 130))


@pytest.mark.parametrize("shares", [[], [0.5, 0.4], [-0.5, 1.5], [float("nan"), 1.0]])
def test_bad_shares_are_refused(shares: list[float]):
    with pytest.raises(ValueError, match="shares"):
        cut(100, shares)
