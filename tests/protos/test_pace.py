"""A sender that drips bytes is bounded as a whole, not only between two pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starlings_protos.pace import Pace


def test_frozen_and_dripping_senders_are_given_up() -> None:
    pace = Pace(between_s=10.0, grace_s=30.0, least_bytes_per_s=1000.0)
    assert pace.wait_s(0.0, 0) == 10.0
    assert pace.wait_s(25.0, 0) == 5.0
    assert pace.wait_s(31.0, 0) == 0.0
    assert pace.wait_s(31.0, 100_000) == 10.0


@given(st.lists(st.tuples(st.floats(0, 9.9), st.integers(0, 5000)), max_size=200))
def test_no_transfer_outlives_its_bytes(pieces: list[tuple[float, int]]) -> None:
    pace, elapsed_s, received = Pace(10.0), 0.0, 0
    for pause_s, count in pieces:
        if pause_s > pace.wait_s(elapsed_s, received):
            break
        elapsed_s, received = elapsed_s + pause_s, received + count
    assert elapsed_s <= pace.grace_s + received / pace.least_bytes_per_s + 1e-6
