"""How many microbatches of its own a worker that begins them keeps under way.

By Little's law (1961) a pipeline that passes on `rate` microbatches a second, each of which takes `way_s` where nothing
waits, is full with rate x way_s of them: its bandwidth-delay product. Fewer leave it idle while transfers are on their
way, and more only stand in queues, make gradients older and take memory. Neither number is known beforehand, so the
limit is found as BBR finds a congestion window (Cardwell et al. 2016, "BBR: Congestion-Based Congestion Control"):

- `way_s` is a running mean of what each microbatch took without its waits: for devices, for room, for links that carry
  others. Workers add up their waits on the way back, so that several leaders of one pipeline find the same, and none
  makes up for another's queue by a longer one.
- While the leader's device idles because of the limit, the limit is `GROWING` times the product, and so grows with the
  rate that it brings. What has brought nothing for a few rounds is taken back, and tried again much later: a later
  stage sets the pace then.
- Else it is `STEADY` times the product.

Memory, and in `async` the age that gradients may have, bound it (`most`).
"""

from __future__ import annotations

import math

GROWING = 2.0
STEADY = 1.5
# Before anything is known, one for each worker of the route, and one on its way to each.
FIRST_PER_STAGE = 2
# Microbatches that a round has at least: what is said of fewer is chance.
ROUND_LEAST = 8
# The device may idle for this part of a round, and nothing is amiss.
IDLE_FINE = 0.03
# What is a higher rate; for how many rounds none may follow from growth before it is given up, and for how many then:
# each time for twice as many.
RATE_HIGHER = 1.1
FRUITLESS_ROUNDS = 3
PATIENT_ROUNDS, PATIENT_ROUNDS_MOST = 32, 512
# The rate is the highest of so many rounds: steps end, exchanges and copies come between.
RATE_ROUNDS = 8
# A limit shrinks by this part of itself in a round at most.
SHRINK_PART = 0.125
WAY_WEIGHT = 0.1


class InFlight:
    """`limit` holds for microbatches that this worker has begun itself and that are trained."""

    def __init__(self, stages: int = 1, most: int = 1) -> None:
        """For a place in a plan of so many stages; `most`: what memory, or the age of gradients, allows."""
        self._most = max(1, most)
        self.limit = min(self._most, FIRST_PER_STAGE * stages)
        self.way_s = 0.0
        self._rates: list[float] = []
        self._best_rate = 0.0
        self._fruitless = 0
        self._patience = 0
        self._patient = PATIENT_ROUNDS
        # Of the present round: seconds while any were under way, and of those while the limit left the device idle.
        self._done = 0
        self._skip = 0
        self._busy_s = 0.0
        self._starved_s = 0.0
        self._seen_at_s: float | None = None
        self._under_way = False
        self._starved = False

    def bound(self, most: int) -> None:
        """The plan has others in it now: what was measured says little, and growth may bring something again."""
        self._most = max(1, most)
        self.limit = min(self.limit, self._most)
        self._fruitless = self._patience = 0
        self._patient = PATIENT_ROUNDS
        self._best_rate = 0.0

    @property
    def rate(self) -> float:
        """Own microbatches per second, the highest of late; 0: unknown."""
        return max(self._rates, default=0.0)

    # ------------------------------------------------------------------ what is seen

    def looked(self, now_s: float, *, under_way: int, full: bool, idle: bool) -> None:
        """After every event.

        Args:
            under_way: own microbatches.
            full: whether one more would be begun if the limit were higher.
            idle: whether the device has nothing to do.
        """
        if self._seen_at_s is not None and self._under_way:
            passed_s = max(0.0, now_s - self._seen_at_s)
            self._busy_s += passed_s
            self._starved_s += passed_s if self._starved else 0.0
        self._seen_at_s = now_s
        self._under_way = under_way > 0
        self._starved = full and idle

    def done(self, took_s: float, waited_s: float) -> None:
        """An own microbatch is back. `waited_s`: of what it took, by the word of all its route."""
        way_s = max(1e-4, took_s - min(max(0.0, waited_s), took_s))
        self.way_s = way_s if not self.way_s else self.way_s + WAY_WEIGHT * (way_s - self.way_s)
        if self._skip:
            # It was begun under the limit before this one.
            self._skip -= 1
            if not self._skip:
                self._done, self._busy_s, self._starved_s = 0, 0.0, 0.0
            return
        self._done += 1
        if self._done >= max(ROUND_LEAST, self.limit) and self._busy_s > 0:
            self._end_round()

    # ------------------------------------------------------------------ what follows

    def _end_round(self) -> None:
        rate, starved = self._done / self._busy_s, self._starved_s / self._busy_s
        self._done, self._busy_s, self._starved_s = 0, 0.0, 0.0
        self._rates = [*self._rates[1 - RATE_ROUNDS :], rate]
        grows = starved > IDLE_FINE and self._is_worth_it(rate)
        product = (rate if grows else self.rate) * self.way_s
        wanted = math.ceil((GROWING if grows else STEADY) * product) + 1
        least = math.floor(self.limit * (1 - SHRINK_PART))
        limit = min(self._most, max(wanted, self.limit if grows else least, 1))
        if limit > self.limit:
            self._skip = self.limit
        self.limit = limit

    def _is_worth_it(self, rate: float) -> bool:
        """The device idles. Whether a higher limit has brought something, or may."""
        if self._patience:
            self._patience -= 1
            return False
        if rate > RATE_HIGHER * self._best_rate:
            self._patient = PATIENT_ROUNDS if self._best_rate else self._patient
            self._best_rate, self._fruitless = rate, 0
        else:
            self._fruitless += 1
            if self._fruitless >= FRUITLESS_ROUNDS:
                self._fruitless, self._patience, self._best_rate = 0, self._patient, 0.0
                self._patient = min(2 * self._patient, PATIENT_ROUNDS_MOST)
                return False
        return True


def most_by_age(room: int, leaders: int, narrowest: int) -> int:
    """How many microbatches each of `leaders` may keep under way so that no gradient gets too old.

    While a microbatch is under way, about as many others pass as are under way: leaders x limit. The stage that has the
    fewest replicas, `narrowest`, bears `room` of them for each: max_staleness steps of inner_batch microbatches.
    """
    return 1 + room * narrowest // max(1, leaders)
