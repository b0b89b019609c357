"""Token buckets: what slows a source down, against the plain functions that say what is meant."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator.rates import Bucket, Rate, Throttle, taken, wait_s

RATE = Rate(burst=20, per_s=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.5, 40)), max_size=60))
def test_a_throttle_is_a_bucket_whose_debts_are_slept_off(takes: list[tuple[float, float]]) -> None:
    now_s, bucket = 100.0, Bucket(RATE.burst, 100.0)
    throttle = Throttle(RATE, now_s)
    for later_s, amount in takes:
        now_s += later_s
        pause_s = throttle.take(amount, now_s)
        amount = min(amount, RATE.burst)
        assert abs(pause_s - wait_s(bucket, RATE, now_s, amount)) < 1e-6
        now_s += pause_s
        bucket = taken(bucket, RATE, now_s, amount)


def test_who_never_waits_gets_no_more_than_the_rate() -> None:
    throttle = Throttle(RATE, 0.0)
    # Asked a hundred times at once: the pauses add up to what a hundred cost beyond the burst.
    assert [throttle.take(1, 0.0) for _ in range(100)][-1] == (100 - RATE.burst) / RATE.per_s
    assert throttle.take(1, 20.0) == 0.25
