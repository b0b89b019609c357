"""Whose samples are which when data are unequal (`[data] skew`): a shard of each epoch's order per worker that leases.

A worker keeps its place while it holds the first stage; who comes later takes the lowest one that is free, and with it
the distribution of who left. With more workers than an epoch has shards, some share one. When its shard is leased out a
worker takes what nobody else would; then it goes on with its shard of the next epoch; and it helps others only when it
is as far ahead as that, so that a slow worker's samples do not hold an epoch open for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from starlings_coordinator.core.lease_book import oldest
from starlings_coordinator.core.quarantine import stand_ins
from starlings_coordinator.core.ranges import Ranges, meet, size
from starlings_job.sampling import samples_at
from starlings_job.skew import SkewedOrder
from starlings_protos.messages import WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Shards of an epoch: more workers than this share them.
SHARDS_MOST = 64
# Epochs of which something is not acknowledged, before a fast worker helps slow ones.
EPOCHS_OPEN = 2


class Shards:
    def __init__(self, core: Core) -> None:
        self._core = core
        # Places of workers. In an epoch of n shards the one with place p has shard p mod n.
        self._places: dict[WorkerId, int] = {}
        # By the number of shards.
        self._orders: dict[int, SkewedOrder] = {}

    def begin(self) -> None:
        """Places are soft: who has blocks out keeps the place that they are of."""
        self._places.clear()
        leased = self._core.state.leased
        votes: dict[WorkerId, Counter[int]] = {}
        for block in leased.blocks.values():
            order = self._order(block.epoch)
            if order is not None:
                shard = order.shard_of(block.first)
                votes.setdefault(block.worker_id, Counter())[shard] += block.end - block.first
        for worker_id, counts in sorted(votes.items()):
            ((shard, _),) = counts.most_common(1)
            if shard not in self._places.values():
                self._places[worker_id] = shard

    def settle(self, workers: Iterable[WorkerId]) -> None:
        """These hold the first stage: each has a place from now on, earlier ones the lower ones."""
        if self._core.config.job.data.skew is None:
            return
        present = dict.fromkeys(workers)
        self._places = {w: place for w, place in self._places.items() if w in present}
        for worker_id in present:
            if worker_id not in self._places:
                taken = set(self._places.values())
                self._places[worker_id] = next(place for place in range(len(present)) if place not in taken)

    @property
    def count(self) -> int:
        """Of an epoch that is opened now; 0: data are not unequal."""
        config = self._core.config
        if config.job.data.skew is None:
            return 0
        return max(1, min(len(self._places), SHARDS_MOST, config.population))

    def choose(self, worker_id: WorkerId, free: Mapping[int, Ranges]) -> tuple[int, Ranges] | None:
        """Which of what is free, by epoch, is for the worker; None: something of a new epoch."""
        if self._core.config.job.data.skew is None:
            return oldest(worker_id, free)
        ahead = len(self._core.state.leased.epochs) >= EPOCHS_OPEN
        for epoch in sorted(free):
            by_shard = self._by_shard(epoch, free[epoch])
            own = self._places.get(worker_id, 0) % max(1, len(by_shard))
            others = {place % len(by_shard) for place in self._places.values()}
            orphaned = [shard for shard in range(len(by_shard)) if shard not in others]
            for shard in (own, *orphaned):
                if by_shard[shard]:
                    return epoch, by_shard[shard]
        if not ahead or not free:
            return None
        epoch, ranges = min(free.items())
        return epoch, max(self._by_shard(epoch, ranges), key=size)

    def samples_at(self, epoch: int, first: int, end: int) -> tuple[int, ...]:
        """The sample ids at positions `first` to `end` - 1 of an epoch's order; none of an epoch that is over."""
        config = self._core.config
        if config.job.data.skew is None:
            found = samples_at(config.job.job.seed, config.population, epoch, first, end)
        else:
            order = self._order(epoch)
            found = order.samples_at(epoch, first, end) if order is not None else ()
        return stand_ins(found, self._core.state.quarantined, config.population)

    def _by_shard(self, epoch: int, ranges: Ranges) -> list[Ranges]:
        order = self._order(epoch)
        if order is None:
            return [ranges]
        return [meet(ranges, (order.bounds(shard),)) for shard in range(order.shards)]

    def _order(self, epoch: int) -> SkewedOrder | None:
        known = self._core.state.leased.epochs.get(epoch)
        alpha, config = self._core.config.job.data.skew, self._core.config
        if known is None or not known.shards or alpha is None:
            return None
        if known.shards not in self._orders:
            order = SkewedOrder(config.sources, alpha, known.shards, config.job.job.seed)
            self._orders[known.shards] = order
        return self._orders[known.shards]
