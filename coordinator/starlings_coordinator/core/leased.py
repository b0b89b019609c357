"""Who has which samples of an `async` job: the durable half, a fold over four records. Decisions: lease_book.py.

In every open epoch each position is free, in one block, or acknowledged; an epoch is forgotten when all of it is
acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from starlings_coordinator.core.ranges import Ranges, first_of, meet, minus, ranges_of, size, union
from starlings_coordinator.core.records import (
    LeaseBlockGranted,
    LeaseBlockReturned,
    SampleEpochOpened,
    SamplesAcknowledged,
)
from starlings_protos.messages import WorkerId

# Returned blocks are remembered for late reports. Beyond this many, reports of the oldest are dropped uncounted.
RETURNED_LIMIT = 1024

LeaseRecord = SampleEpochOpened | LeaseBlockGranted | SamplesAcknowledged | LeaseBlockReturned


@dataclass(slots=True)
class SampleEpoch:
    samples: int
    free: Ranges
    acknowledged: Ranges = ()
    # Of its order, where data are unequal.
    shards: int = 0
    # Of what is free: what somebody may have trained without a report.
    in_doubt: Ranges = ()


@dataclass(slots=True)
class LeaseBlock:
    """Out with a life of a worker. `accepted`: the part of it that is acknowledged."""

    worker_id: WorkerId
    incarnation: int
    epoch: int
    first: int
    end: int
    accepted: Ranges = ()

    @property
    def remaining(self) -> Ranges:
        return minus(((self.first, self.end),), self.accepted)


@dataclass(slots=True)
class ReturnedBlock:
    block: LeaseBlock
    # Counted when it was leased again.
    in_doubt: Ranges
    # What was reported later: still free then, and thus acknowledged; or not, and thus trained twice.
    late: Ranges = ()
    repeated: Ranges = ()


@dataclass(slots=True)
class Leased:
    """Changed by `fold_leased` only."""

    next_lease: int = 0
    next_epoch: int = 0
    # Epochs of which something is not acknowledged.
    epochs: dict[int, SampleEpoch] = field(default_factory=dict)
    blocks: dict[int, LeaseBlock] = field(default_factory=dict)
    returned: dict[int, ReturnedBlock] = field(default_factory=dict)
    samples_acknowledged: int = 0
    # At most this many samples were applied more than once in an epoch.
    samples_repeated: int = 0
    # Blocks below this number are of weights that are lost: nothing that is said of them counts.
    first_valid: int = 0

    def validate(self) -> None:
        """Invariants; raises AssertionError."""
        for number, epoch in self.epochs.items():
            parts = [epoch.free, epoch.acknowledged]
            parts += [b.remaining for b in self.blocks.values() if b.epoch == number]
            assert sum(map(size, parts)) == epoch.samples, f"a sample of epoch {number} is nowhere or twice"
            everything = ranges_of(pair for part in parts for pair in part)
            assert everything == ((0, epoch.samples),), f"epoch {number} has a gap"
            assert size(epoch.acknowledged) < epoch.samples
            assert not minus(epoch.in_doubt, epoch.free)
        for block in self.blocks.values():
            assert block.epoch in self.epochs
            assert block.remaining
            assert not minus(block.accepted, self.epochs[block.epoch].acknowledged)


def fold_leased(leased: Leased, record: LeaseRecord) -> None:
    """Apply one record. Total: whatever a record names and is not there any more changes nothing."""
    match record:
        case SampleEpochOpened():
            free = ranges_of([(0, record.samples)])
            leased.epochs[record.epoch] = SampleEpoch(record.samples, free, shards=record.shards)
            leased.next_epoch = max(leased.next_epoch, record.epoch + 1)
        case LeaseBlockGranted():
            block = LeaseBlock(record.worker_id, record.incarnation, record.epoch, record.first, record.end)
            leased.blocks[record.lease] = block
            epoch = leased.epochs[record.epoch]
            epoch.free = minus(epoch.free, block.remaining)
            leased.samples_repeated += size(meet(epoch.in_doubt, block.remaining))
            epoch.in_doubt = minus(epoch.in_doubt, block.remaining)
            leased.next_lease = max(leased.next_lease, record.lease + 1)
        case SamplesAcknowledged():
            for lease, first, end in record.accepted:
                _accept(leased, lease, ranges_of([(first, end)]))
            for lease, first, end in record.repeated:
                returned = leased.returned.get(lease)
                if returned is not None:
                    new = minus(ranges_of([(first, end)]), returned.repeated)
                    leased.samples_repeated += size(minus(new, returned.in_doubt))
                    returned.repeated = union(returned.repeated, new)
        case LeaseBlockReturned():
            gone = leased.blocks.pop(record.lease, None)
            if gone is not None:
                epoch = leased.epochs[gone.epoch]
                in_doubt = first_of(gone.remaining, record.in_doubt)
                epoch.free = union(epoch.free, gone.remaining)
                epoch.in_doubt = union(epoch.in_doubt, in_doubt)
                leased.returned[record.lease] = ReturnedBlock(gone, in_doubt)
                while len(leased.returned) > RETURNED_LIMIT:
                    del leased.returned[min(leased.returned)]
        case _:
            assert_never(record)


def _accept(leased: Leased, lease: int, ranges: Ranges) -> None:
    if (block := leased.blocks.get(lease)) is not None:
        block.accepted = union(block.accepted, ranges)
        if not block.remaining:
            del leased.blocks[lease]
    elif (returned := leased.returned.get(lease)) is not None:
        block = returned.block
        returned.late = union(returned.late, ranges)
    else:
        return
    epoch = leased.epochs[block.epoch]
    fresh = minus(ranges, epoch.acknowledged)
    epoch.acknowledged = union(epoch.acknowledged, fresh)
    epoch.free = minus(epoch.free, fresh)
    epoch.in_doubt = minus(epoch.in_doubt, fresh)
    leased.samples_acknowledged += size(fresh)
    if epoch.acknowledged == ((0, epoch.samples),):
        del leased.epochs[block.epoch]


def free_of(leased: Leased, epoch: int, ranges: Ranges) -> Ranges:
    """The part of `ranges` that is neither leased nor acknowledged."""
    known = leased.epochs.get(epoch)
    return meet(known.free, ranges) if known is not None else ()
