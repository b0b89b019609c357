"""How long bytes take between two replicas: guessed by site and region, corrected by exchanges that were seen.

`LinkEstimates` is all that matching knows of networks. Who measures by probes fills the same interface.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from starlings_protos.messages import WorkerId

# One way, seconds, where nothing was measured: the same machine or site, the same region, anywhere else.
SAME_SITE_S = 0.001
SAME_REGION_S = 0.02
FAR_S = 0.1
# The uplink of one who has not said: ten megabits per second.
UNKNOWN_BYTES_PER_S = 1.25e6
# Inside a site nobody's uplink is passed.
SITE_BYTES_PER_S = 1e8
# Weight of the newest observation, and how many pairs are remembered (the rest is guessed again).
OBSERVATION_WEIGHT = 0.3
PAIRS_REMEMBERED = 16384
# One odd observation moves an estimate by this factor at most.
CORRECTION_MOST = 16.0


class LinkEstimates(Protocol):
    def rate_bytes_per_s(self, worker_id: WorkerId) -> float:
        """What the worker can send and receive at once."""
        ...

    def exchange_s(self, one: WorkerId, other: WorkerId, byte_count: int) -> float:
        """Seconds until both have sent `byte_count` to each other."""
        ...

    def observe(self, one: WorkerId, other: WorkerId, byte_count: int, seconds: float) -> None:
        """Both sent each other so much, in so long."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    site: str = ""
    region: str = ""
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0

    @property
    def rate_bytes_per_s(self) -> float:
        rates = [rate for rate in (self.uplink_bytes_per_s, self.downlink_bytes_per_s) if rate > 0]
        return min(rates, default=UNKNOWN_BYTES_PER_S)


class PassiveEstimates:
    """By what workers say of themselves, times what pairs were seen to need of that (mean on a log scale)."""

    def __init__(self) -> None:
        self._places: dict[WorkerId, Place] = {}
        self._log_factors: OrderedDict[tuple[WorkerId, WorkerId], float] = OrderedDict()

    def place(self, worker_id: WorkerId, place: Place) -> None:
        self._places[worker_id] = place

    def forget(self, worker_id: WorkerId) -> None:
        self._places.pop(worker_id, None)

    def rate_bytes_per_s(self, worker_id: WorkerId) -> float:
        return self._places.get(worker_id, Place()).rate_bytes_per_s

    def exchange_s(self, one: WorkerId, other: WorkerId, byte_count: int) -> float:
        return self._guess_s(one, other, byte_count) * math.exp(self._log_factors.get(_pair(one, other), 0.0))

    def observe(self, one: WorkerId, other: WorkerId, byte_count: int, seconds: float) -> None:
        if not 0 < seconds < math.inf:
            return
        pair = _pair(one, other)
        ratio = seconds / self._guess_s(one, other, byte_count)
        seen = math.log(min(CORRECTION_MOST, max(1 / CORRECTION_MOST, ratio)))
        before = self._log_factors.pop(pair, None)
        self._log_factors[pair] = seen if before is None else before + OBSERVATION_WEIGHT * (seen - before)
        while len(self._log_factors) > PAIRS_REMEMBERED:
            self._log_factors.popitem(last=False)

    def _guess_s(self, one: WorkerId, other: WorkerId, byte_count: int) -> float:
        here, there = self._places.get(one, Place()), self._places.get(other, Place())
        if here.site and here.site == there.site:
            return SAME_SITE_S + byte_count / SITE_BYTES_PER_S
        delay_s = SAME_REGION_S if here.region == there.region else FAR_S
        return delay_s + byte_count / min(here.rate_bytes_per_s, there.rate_bytes_per_s)


def _pair(one: WorkerId, other: WorkerId) -> tuple[WorkerId, WorkerId]:
    return (one, other) if one <= other else (other, one)
