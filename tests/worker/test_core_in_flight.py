"""How many microbatches a worker keeps under way: a pipeline of known speed and length, played by hand."""

from __future__ import annotations

import heapq
import random

import pytest

from starlings_worker.core.in_flight import RATE_ROUNDS, ROUND_LEAST, InFlight, most_by_age


class Pipeline:
    """The leader's device, then a way, then a device that may be slower, then the way back."""

    def __init__(self, own_s: float, way_s: float, far_s: float, seed: int = 1) -> None:
        self.own_s, self.way_s, self.far_s = own_s, way_s, far_s
        self._rng = random.Random(seed)
        self.limit = InFlight(stages=2, most=64)
        self.done = 0
        self.now_s = 0.0
        self._own_free_s = self._far_free_s = 0.0
        self._under_way: list[tuple[float, float, float]] = []

    def run(self, seconds: float) -> float:
        """Microbatches per second."""
        end_s, before = self.now_s + seconds, self.done
        while self.now_s < end_s:
            while len(self._under_way) < self.limit.limit:
                self._begin()
            idle = self.now_s >= self._own_free_s
            self.limit.looked(self.now_s, under_way=len(self._under_way), full=True, idle=idle)
            back_s, began_s, waited_s = heapq.heappop(self._under_way)
            if self._own_free_s < back_s:
                # The device runs dry before the next one is back.
                free_s = max(self.now_s, self._own_free_s)
                self.limit.looked(free_s, under_way=len(self._under_way) + 1, full=True, idle=True)
            self.now_s = back_s
            self.limit.looked(self.now_s, under_way=len(self._under_way) + 1, full=True, idle=False)
            self.done += 1
            self.limit.done(self.now_s - began_s, waited_s)
        return (self.done - before) / (self.now_s - end_s + seconds)

    def _begin(self) -> None:
        noise = self._rng.uniform(0.97, 1.03)
        starts_s = max(self.now_s, self._own_free_s)
        self._own_free_s = starts_s + self.own_s * noise
        there_s = self._own_free_s + self.way_s / 2
        far_s = max(there_s, self._far_free_s)
        self._far_free_s = far_s + self.far_s * noise
        waited_s = (starts_s - self.now_s) + (far_s - there_s)
        heapq.heappush(self._under_way, (self._far_free_s + self.way_s / 2, self.now_s, waited_s))


@pytest.mark.parametrize("way_s", [0.0, 0.08, 0.3, 0.6])
def test_a_long_way_is_filled_and_not_much_more(way_s: float) -> None:
    pipeline = Pipeline(0.02, way_s, 0.015)
    pipeline.run(60.0)
    assert pipeline.run(60.0) >= 0.95 / 0.02
    product = (0.02 + way_s + 0.015) / 0.02
    assert product <= pipeline.limit.limit <= 1.6 * product + 3


def test_where_a_later_stage_sets_the_pace_growth_ends() -> None:
    """The leader idles for ever there. What stands in queues elsewhere is not counted into the way."""
    pipeline = Pipeline(0.02, 0.3, 0.06)
    pipeline.run(120.0)
    assert pipeline.run(60.0) >= 0.95 / 0.06
    product = (0.02 + 0.3 + 0.06) / 0.06
    limits = set()
    for _ in range(100):
        pipeline.run(5.0)
        limits.add(pipeline.limit.limit)
    assert max(limits) <= 2 * product + 4, limits


def test_a_way_that_gets_longer_is_filled_anew_and_a_shorter_one_given_back() -> None:
    pipeline = Pipeline(0.02, 0.08, 0.015)
    pipeline.run(30.0)
    before = pipeline.limit.limit
    pipeline.way_s = 0.4
    pipeline.run(60.0)
    assert pipeline.run(30.0) >= 0.95 / 0.02
    assert pipeline.limit.limit > 2 * before
    pipeline.way_s = 0.08
    pipeline.run(60.0)
    assert pipeline.limit.limit <= before + 3


def test_bounds_hold() -> None:
    limit = InFlight(stages=8, most=5)
    assert limit.limit == 5
    pipeline = Pipeline(0.02, 0.6, 0.015)
    pipeline.limit.bound(7)
    pipeline.run(60.0)
    assert pipeline.limit.limit == 7
    pipeline.limit.bound(3)
    assert pipeline.limit.limit == 3
    # A peer that claims to have waited for longer than everything took changes nothing for the worse.
    for _ in range(2 * ROUND_LEAST * RATE_ROUNDS):
        limit.looked(limit.way_s, under_way=1, full=False, idle=False)
        limit.done(1.0, 1e9)
    assert limit.limit >= 1


def test_the_age_of_gradients_bounds_what_is_under_way() -> None:
    assert most_by_age(8 * 4, leaders=1, narrowest=1) == 33
    assert most_by_age(8 * 4, leaders=4, narrowest=1) == 9
    assert most_by_age(8 * 4, leaders=4, narrowest=4) == 33
    assert most_by_age(0, leaders=3, narrowest=1) == 1
