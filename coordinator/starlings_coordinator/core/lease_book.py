"""Leases that outlive an outage of the coordinator: which samples of an `async` job are whose, for how long.

A worker leases a *block*: a range of positions in an epoch's order of samples, enough for minutes. It trains them while
the coordinator is away, and reports ranges as they are done. Promises:

- a sample is acknowledged at most once per epoch, and a block that is not acknowledged always returns;
- nobody hears of a block before its record is stored (effects leave after records, like everywhere in the core);
- a life of a worker (`incarnation`) that was replaced can neither lease nor acknowledge;
- after a restart an unacknowledged block counts as leased until it is reported, or its full lease has run again;
- what is trained twice is counted. The number is exact for what is reported. What a worker began last and did not
  report is unknown: `in_doubt` says how much that is at most, and blocks are begun in their order, so it is the first
  of what is left of them. It counts when it is leased again: what nobody begins a second time is not repeated.

Time is the coordinator's suspend-aware monotonic clock, so wall clocks do not matter, and leases run while the machine
sleeps, as they do at the workers. `sync` leases microbatches of one step instead (ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from starlings_coordinator.core.leased import LeaseBlock, Leased, free_of
from starlings_coordinator.core.ranges import Range, Ranges, minus, ranges_of, size, union
from starlings_coordinator.core.records import (
    LeaseBlockGranted,
    LeaseBlockReturned,
    Record,
    SampleEpochOpened,
    SamplesAcknowledged,
)
from starlings_protos.messages import WorkerId

# A block that nobody reports of returns after this long, and an outage of the coordinator may last as long.
LEASE_S = 600.0
# A worker's acknowledgements are recorded at most once a second, and all workers' together at most this often, so that
# the log of a big swarm stays small: 8 rows of some 130 bytes a second are 90 MB a day.
RECORD_EVERY_S = 1.0
RECORDS_PER_SECOND = 8.0


# Which of what is free (by epoch, none of them empty) a worker is granted; None: something of a new epoch.
Choose = Callable[[WorkerId, Mapping[int, Ranges]], tuple[int, Ranges] | None]


def oldest(_worker_id: WorkerId, free: Mapping[int, Ranges]) -> tuple[int, Ranges] | None:
    """Whoever asks: what is left of the oldest epoch."""
    return min(free.items(), default=None)


@dataclass(slots=True)
class _Reported:
    """Judged, and waiting to be recorded; lost in a crash, and then reported again."""

    accepted: dict[int, Ranges] = field(default_factory=dict)
    repeated: dict[int, Ranges] = field(default_factory=dict)


class LeaseBook:
    """Decides; the records that it hands to `record` are folded at once, by whoever gave it that."""

    def __init__(
        self,
        leased: Leased,
        incarnations: Mapping[WorkerId, int],
        record: Callable[[Record], None],
        *,
        now_s: float,
        in_doubt: Callable[[WorkerId, float], int],
        lease_s: float = LEASE_S,
    ) -> None:
        """Also after a restart: every block's full lease begins now.

        Args:
            leased, incarnations: of the durable state; read here, changed by the fold.
            in_doubt: how many samples of all its blocks a worker may have begun by now and not reported, at most.
        """
        self._leased = leased
        self._incarnations = incarnations
        self._record = record
        self._in_doubt = in_doubt
        self._lease_s = lease_s
        self._runs_out_at_s = dict.fromkeys(leased.blocks, now_s + lease_s)
        # Which blocks are out with whom. A thousand workers have thousands, and something comes of one all the time.
        self._out: dict[WorkerId, set[int]] = {}
        for lease, block in leased.blocks.items():
            self._out.setdefault(block.worker_id, set()).add(lease)
        self._reported: dict[WorkerId, _Reported] = {}
        # Of those the accepted samples; and leases that had returned before their report came.
        self._waiting = 0
        self._late: set[int] = set()
        self._recorded_at_s: dict[WorkerId, float] = {}

    def grant(
        self,
        worker_id: WorkerId,
        count: int,
        epoch_samples: int,
        now_s: float,
        *,
        shards: int = 0,
        choose: Choose = oldest,
    ) -> LeaseBlockGranted | None:
        """Up to `count` samples that lie together, for the present life of the worker: of what `choose` says, or of a
        new epoch with `epoch_samples` (and `shards`). None for a worker that was never admitted, and when `count` is 0.
        """
        incarnation = self._incarnations.get(worker_id)
        if incarnation is None or count < 1 or epoch_samples < 1:
            return None
        chosen = choose(worker_id, self._free())
        if chosen is None:
            epoch = self._leased.next_epoch
            self._record(SampleEpochOpened(epoch, epoch_samples, shards))
            whole: Ranges = ((0, epoch_samples),)
            chosen = choose(worker_id, {epoch: whole}) or (epoch, whole)
        epoch, ((first, end), *_) = chosen
        granted = LeaseBlockGranted(
            self._leased.next_lease, worker_id, incarnation, epoch, first, min(end, first + count)
        )
        self._record(granted)
        self._runs_out_at_s[granted.lease] = now_s + self._lease_s
        self._out.setdefault(worker_id, set()).add(granted.lease)
        return granted

    def _free(self) -> dict[int, Ranges]:
        """By epoch, where there is something."""
        found = {
            number: minus(epoch.free, self._reported_late(number))
            for number, epoch in self._leased.epochs.items()
        }
        return {number: free for number, free in found.items() if free}

    def _reported_late(self, epoch: int) -> Ranges:
        """What will be acknowledged of returned blocks with the next record: free only until then."""
        found: Ranges = ()
        for lease in self._late:
            returned = self._leased.returned.get(lease)
            if returned is not None and returned.block.epoch == epoch:
                reported = self._reported[returned.block.worker_id]
                found = union(found, reported.accepted.get(lease, ()))
        return found

    def report(
        self, worker_id: WorkerId, incarnation: int, lease: int, ranges: Iterable[Range], now_s: float
    ) -> str:
        """The worker trained these positions of the block; "" when that makes sense, else why not. It may be repeated.

        Acknowledged when the record is stored: `due` writes it within a second, or workers / 8 seconds.
        """
        block = self._known(lease)
        if block is None:
            # Wholly acknowledged long ago, a second copy of a report; or a lease that never was.
            return "" if 0 <= lease < self._leased.next_lease else f"there is no lease {lease}"
        if (block.worker_id, block.incarnation) != (worker_id, incarnation):
            return f"lease {lease} is another worker's, or of another life of this one"
        trained = ranges_of(ranges)
        if minus(trained, ((block.first, block.end),)):
            return f"lease {lease} holds samples {block.first} to {block.end - 1} only"
        reported = self._reported.setdefault(worker_id, _Reported())
        known = union(reported.accepted.get(lease, ()), reported.repeated.get(lease, ()))
        new = minus(minus(trained, block.accepted), known)
        returned = self._leased.returned.get(lease)
        repeated: Ranges = ()
        if returned is None:
            self._runs_out_at_s[lease] = now_s + self._lease_s
            accepted = new
        else:
            new = minus(minus(new, returned.late), returned.repeated)
            alive = self._incarnations.get(worker_id) == incarnation
            free = free_of(self._leased, block.epoch, new) if alive else ()
            accepted = minus(free, self._reported_late(block.epoch))
            repeated = minus(new, accepted)
        if accepted:
            reported.accepted[lease] = union(reported.accepted.get(lease, ()), accepted)
            self._waiting += size(accepted)
            if returned is not None:
                self._late.add(lease)
        if repeated:
            reported.repeated[lease] = union(reported.repeated.get(lease, ()), repeated)
        return ""

    def has_heard(self, lease: int, ranges: Iterable[Range]) -> bool:
        """Whether all of it was reported before, or is of a block that is over and forgotten."""
        block = self._known(lease)
        if block is None:
            return True
        known = block.accepted
        returned = self._leased.returned.get(lease)
        if returned is not None:
            known = union(known, union(returned.late, returned.repeated))
        # Nobody else can report of it.
        reported = self._reported.get(block.worker_id)
        if reported is not None:
            known = union(known, union(reported.accepted.get(lease, ()), reported.repeated.get(lease, ())))
        return not minus(ranges_of(ranges), known)

    def blocks_of(self, worker_id: WorkerId) -> dict[int, LeaseBlock]:
        """What is out with the worker, without what it has reported and nobody has written down."""
        blocks = self._leased.blocks
        return {lease: blocks[lease] for lease in sorted(self._out.get(worker_id, ()))}

    def unreported(self, worker_id: WorkerId) -> int:
        """How many samples the worker has yet to report."""
        reported = self._reported.get(worker_id)
        heard = reported.accepted if reported is not None else {}
        return sum(
            size(minus(block.remaining, heard.get(lease, ())))
            for lease, block in self.blocks_of(worker_id).items()
        )

    @property
    def waiting(self) -> int:
        """How many samples are reported, and will be acknowledged with the next record."""
        return self._waiting

    def write_down(self, now_s: float) -> None:
        """Record at once what was reported."""
        for worker_id in sorted(self._reported):
            self._write_down(worker_id, now_s)

    def _known(self, lease: int) -> LeaseBlock | None:
        if lease in self._leased.blocks:
            return self._leased.blocks[lease]
        returned = self._leased.returned.get(lease)
        return returned.block if returned is not None else None

    def give_back(self, worker_id: WorkerId, incarnation: int, lease: int, begun: int, now_s: float) -> str:
        """The worker will not train the rest; "" when that makes sense, else why not.

        Args:
            begun: how many samples it began and has not reported.
        """
        block = self._leased.blocks.get(lease)
        if block is None:
            return ""
        if (block.worker_id, block.incarnation) != (worker_id, incarnation):
            return f"lease {lease} is another worker's, or of another life of this one"
        self._return(lease, max(0, begun), "the worker gave it back", now_s)
        return ""

    def lost(self, worker_id: WorkerId, reason: str, now_s: float, in_doubt: int | None = None) -> None:
        """The worker is gone for good: others get at once what it had. `in_doubt`: None where it is as usual."""
        self._write_down(worker_id, now_s)
        for lease, doubt in self._doubts(worker_id, now_s, in_doubt).items():
            self._return(lease, doubt, reason, now_s)

    def _doubts(self, worker_id: WorkerId, now_s: float, in_doubt: int | None = None) -> dict[int, int]:
        """By block of the worker: how many samples of it are in doubt."""
        left = self._in_doubt(worker_id, now_s) if in_doubt is None else in_doubt
        doubts = {}
        for lease, block in self.blocks_of(worker_id).items():
            doubts[lease] = min(left, size(block.remaining))
            left -= doubts[lease]
        return doubts

    def due(self, now_s: float) -> None:
        """Called a few times a second: records what was reported, takes back what nobody works on."""
        workers = len(self._out.keys() | self._reported.keys())
        every_s = max(RECORD_EVERY_S, workers / RECORDS_PER_SECOND)
        for worker_id in sorted(self._reported):
            if now_s - self._recorded_at_s.get(worker_id, float("-inf")) >= every_s:
                self._write_down(worker_id, now_s)
        over = [
            (lease, block)
            for lease, block in self._leased.blocks.items()
            if now_s >= self._runs_out_at_s[lease]
            or self._incarnations.get(block.worker_id) != block.incarnation
        ]
        for lease, block in sorted(over):
            if lease not in self._leased.blocks:
                continue  # see `_return`: acknowledged whole meanwhile
            if self._incarnations.get(block.worker_id) != block.incarnation:
                reason = f"a new life of {block.worker_id} began"
            elif now_s >= self._runs_out_at_s[lease]:
                # What of it is trained from here on is reported, or its worker is given up.
                reason = "its lease ran out"
            else:
                continue
            self._write_down(block.worker_id, now_s)
            self._return(lease, self._doubts(block.worker_id, now_s).get(lease, 0), reason, now_s)

    def _write_down(self, worker_id: WorkerId, now_s: float) -> None:
        reported = self._reported.pop(worker_id, None)
        if reported is None:
            return
        accepted, repeated = _rows(reported.accepted), _rows(reported.repeated)
        if accepted or repeated:
            self._recorded_at_s[worker_id] = now_s
            self._record(SamplesAcknowledged(worker_id, accepted, repeated))
        for lease, ranges in reported.accepted.items():
            self._waiting -= size(ranges)
            self._late.discard(lease)
            if lease not in self._leased.blocks:
                self._is_in(lease, worker_id)

    def _return(self, lease: int, in_doubt: int, reason: str, now_s: float) -> None:
        block = self._leased.blocks.get(lease)
        if block is None:
            return  # the return of another block of its worker wrote down that all of it is trained
        # What it has reported counts, and the rest alone returns.
        self._write_down(block.worker_id, now_s)
        block = self._leased.blocks.get(lease)
        if block is not None:
            self._record(LeaseBlockReturned(lease, min(in_doubt, size(block.remaining)), reason))
            self._is_in(lease, block.worker_id)

    def _is_in(self, lease: int, worker_id: WorkerId) -> None:
        """Nothing of it is out any more."""
        self._runs_out_at_s.pop(lease, None)
        out = self._out.get(worker_id, set())
        out.discard(lease)
        if not out:
            self._out.pop(worker_id, None)


def _rows(ranges_by_lease: Mapping[int, Ranges]) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (lease, first, end) for lease, ranges in sorted(ranges_by_lease.items()) for first, end in ranges
    )
