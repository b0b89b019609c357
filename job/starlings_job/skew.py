"""Unequal data (`[data] skew`): an epoch's order of samples, in *shards* with a distribution over the sources each.

Shard k's shares of the sources are drawn from Dirichlet(alpha p), p being the sources' shares of all samples (Hsu et
al. 2019, "Measuring the effects of non-identical data distribution", section 3.1): a large alpha makes shards alike, a
small one gives each few sources. They take samples in turns until nothing is left, and one whose source is used up
goes on with its others (as there): so all are equally large, each sample is in one shard, and whatever was much wanted
by many is shared among them. Which samples a shard has is the same in every epoch; their order in it is not.

Pure and pointwise, like `sampling.py`: seed, sources, alpha and the number of shards say everything.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from starlings_job.apportion import apportion
from starlings_job.sampling import permuted
from starlings_job.source_ranges import SourceRange

# In how many turns shards take their samples: more make luck in the order of the shards smaller.
TURNS = 16


def dirichlet(concentrations: Sequence[float], rng: random.Random) -> list[float]:
    """One draw: Gamma(a) variates over their sum (Devroye 1986, chapter XI, theorem 4.1), of logarithms, because with a
    small `a` nearly all are below the least float. Gamma(a) is Gamma(a + 1) U^(1 / a) (Stuart's theorem).
    """
    logs = [math.log(rng.gammavariate(a + 1, 1.0)) + math.log(1.0 - rng.random()) / a for a in concentrations]
    most = max(logs)
    parts = [math.exp(value - most) for value in logs]
    return [part / math.fsum(parts) for part in parts]


def shard_counts(sizes: Sequence[int], alpha: float, shards: int, seed: int) -> list[list[int]]:
    """How many samples of each source each shard has; `sizes`: of the sources.

    Rows (shards) are equal to within one sample, columns add up to `sizes`.
    """
    total = sum(sizes)
    wanted = [
        dirichlet([alpha * size / total for size in sizes], random.Random(f"skew {seed} {shard}"))
        for shard in range(shards)
    ]
    left = list(sizes)
    counts = [[0] * len(sizes) for _ in range(shards)]
    done = [0] * shards
    targets = apportion(total, [1.0] * shards)
    for turn in range(1, TURNS + 1):
        for shard, target in enumerate(targets):
            takes = _taken(wanted[shard], left, target * turn // TURNS - done[shard])
            for source, count in enumerate(takes):
                left[source] -= count
                counts[shard][source] += count
            done[shard] += sum(takes)
    return counts


def _taken(wanted: Sequence[float], left: Sequence[int], count: int) -> list[int]:
    """`count` samples by those shares; of each source no more than is left, and where it is used up, more of others."""
    taken = [0] * len(left)
    while count:
        open_ = [have - took for have, took in zip(left, taken, strict=True)]
        weights = [share if room else 0.0 for share, room in zip(wanted, open_, strict=True)]
        if not math.fsum(weights) > 0:
            # All that it wants is used up.
            weights = [float(room) for room in open_]
        for source, more in enumerate(apportion(count, weights)):
            took = min(more, open_[source])
            taken[source] += took
            count -= took
    return taken


class SkewedOrder:
    """Positions of an epoch's order to samples. Shard k is the positions `bounds(k)`."""

    def __init__(self, sources: Sequence[SourceRange], alpha: float, shards: int, seed: int) -> None:
        """
        Raises:
            ValueError: no shard, or more than there are samples.
        """
        self.population = sum(source.samples for source in sources)
        if not 1 <= shards <= self.population:
            raise ValueError(f"{self.population} samples make no {shards} shards")
        self.shards = shards
        self._sources, self._seed = sources, seed
        self.counts = shard_counts([source.samples for source in sources], alpha, shards, seed)
        # Per shard: where in it each source ends, and from which sample of the source on it has them.
        self._ends = [list(accumulate(row)) for row in self.counts]
        self._begins = [0, *accumulate(sum(row) for row in self.counts)]
        columns = list(zip(*self.counts, strict=True))
        self._offsets = [[0, *accumulate(column)] for column in columns]

    def bounds(self, shard: int) -> tuple[int, int]:
        """Its first position, and the one behind its last."""
        return self._begins[shard], self._begins[shard + 1]

    def shard_of(self, position: int) -> int:
        return bisect_right(self._begins, position) - 1

    def samples_at(self, epoch: int, first: int, end: int) -> tuple[int, ...]:
        """The sample ids at positions `first` to `end` - 1 of an epoch's order."""
        return tuple(self._sample(epoch, position) for position in range(first, end))

    def _sample(self, epoch: int, position: int) -> int:
        shard = self.shard_of(position)
        begin, end = self.bounds(shard)
        place = permuted(self._key("order", epoch, shard), position - begin, end - begin)
        source = bisect_right(self._ends[shard], place)
        inside = place - (self._ends[shard][source] - self.counts[shard][source])
        of = self._sources[source]
        rank = self._offsets[source][shard] + inside
        return of.first + permuted(self._key("source", source, 0), rank, of.samples)

    def _key(self, what: str, one: int, other: int) -> bytes:
        numbers = (self._seed, one, other)
        return f"skew.{what}".encode() + b"".join(number.to_bytes(8, "little") for number in numbers)
