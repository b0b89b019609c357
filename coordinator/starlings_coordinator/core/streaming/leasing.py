"""Who trains which samples of an `async` job: wishes become blocks of the lease book, reports acknowledgements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlings_coordinator.core.lease_book import LEASE_S, LeaseBook
from starlings_coordinator.core.leased import LeaseBlock
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.ranges import Range, Ranges, meet, minus, ranges_of, size, union
from starlings_coordinator.core.records import LeaseBlockGranted, SamplesRepeated
from starlings_coordinator.core.streaming.contributions import Contributions
from starlings_coordinator.core.streaming.doubt import Doubt
from starlings_coordinator.core.streaming.shards import Shards
from starlings_protos.messages import Lease, LeaseGrant, LeaseKind, MicrobatchKey, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# A grant travels in messages of at most so many microbatches, and of about so many tokens: they carry the text.
MICROBATCHES_PER_MESSAGE = 64
TOKENS_PER_MESSAGE = 65_536
# Nobody holds more microbatches than a worker keeps in store: one that is slow to read asks again and again.
HELD_AT_MOST = 1024
# How little is left of a job, so many one may hold, if it has room for them: else pipelines would run dry before.
HELD_AT_LEAST = 8


class Leasing:
    def __init__(self, core: Core, contributions: Contributions) -> None:
        self._core = core
        self._contributions = contributions
        self._shards = Shards(core)
        self.doubt = Doubt(core)
        self._book: LeaseBook | None = None
        # Per block what its holder will not train: the block returns when nothing else of it is open.
        self._given_up: dict[int, Ranges] = {}
        # With how many the rest is shared, as of the last look at all.
        self._sharers = 1
        # Of that, what was begun.
        self._failed: dict[int, Ranges] = {}

    @property
    def book(self) -> LeaseBook:
        assert self._book is not None, "no training has begun"
        return self._book

    def begin(self, *, recalled: bool) -> None:
        """`recalled`: workers go on with what they leased of the coordinator before this one."""
        core = self._core
        self._given_up.clear()
        self._sharers = max(1, len(core.holders))
        self._failed.clear()
        self.doubt.begin(recalled=recalled)
        self._book = LeaseBook(
            core.state.leased,
            core.state.incarnations,
            core.desk.record,
            now_s=core.now.monotonic_s,
            in_doubt=self.doubt.in_doubt,
        )
        self._shards.begin()
        if recalled:
            return
        # Weights that are lost have nothing twice. Only what was under way while a saved version was copied may be in
        # some stages of it.
        for worker_id in self._leading:
            doubt = self.doubt.under_way(worker_id) if core.state.step else 0
            self.book.lost(worker_id, "training begins with a saved version", core.now.monotonic_s, doubt)

    def close(self) -> None:
        """No more is trained: what was reported counts, and everything else returns."""
        self.book.write_down(self._core.now.monotonic_s)
        for worker_id in self._leading:
            self.book.lost(worker_id, "training is over", self._core.now.monotonic_s)

    @property
    def _leading(self) -> list[WorkerId]:
        return sorted({block.worker_id for block in self._core.state.leased.blocks.values()})

    def lost(self, worker_id: WorkerId, reason: str) -> int:
        """Its blocks return at once. Returns how many samples that are."""
        core, now_s = self._core, self._core.now.monotonic_s
        self.book.write_down(now_s)
        count = self.book.unreported(worker_id)
        led = min(count, self.doubt.in_doubt(worker_id, now_s))
        self.book.lost(worker_id, reason, now_s)
        by_others = sum(self.book.unreported(other) for other in self._leading)
        passing = min(by_others, self.doubt.passing(worker_id, led))
        if passing:
            core.desk.record(SamplesRepeated(worker_id, passing))
        self.doubt.forget(worker_id)
        return count

    def has_leased(self, worker_id: WorkerId) -> bool:
        return self.book.unreported(worker_id) > 0

    # ------------------------------------------------------------------ out

    def grant(self) -> None:
        """To whom holds least first. The share of each shrinks with what is left, so that the end of a job finds nobody
        with work for long; and nobody is refused, so that none waits for a slower one: the job may end with a few
        samples more than it asked for.
        """
        core = self._core
        entering = [h for h in core.holders if core.state.spans[h.worker_id].first_stage == 0]
        staying = [h for h in entering if h.leaving is None] or entering
        self._sharers = max(1, len(staying))
        self._shards.settle(h.worker_id for h in entering)
        wishing = [h for h in staying if h.takes_work and h.wish > 0]
        held, share = {h.worker_id: self._held(h) for h in wishing}, self._share
        for member in sorted(wishing, key=lambda h: (held[h.worker_id], h.worker_id)):
            self._grant(member, held[member.worker_id], share)

    def grant_to(self, member: Member) -> None:
        """To one that may just have asked, without a look at all the others. Who leaves is left to `grant`."""
        span = self._core.state.spans.get(member.worker_id)
        if (
            span is not None
            and span.first_stage == 0
            and member.takes_work
            and member.leaving is None
            and member.wish
        ):
            self._grant(member, self._held(member), self._share)

    @property
    def _share(self) -> int:
        """Microbatches that one may hold."""
        return -(-self.left // self._core.config.job.train.microbatch) // (2 * self._sharers)

    def _held(self, member: Member) -> int:
        return -(-self.book.unreported(member.worker_id) // self._core.config.job.train.microbatch)

    def _grant(self, member: Member, held: int, share: int) -> None:
        core, microbatch = self._core, self._core.config.job.train.microbatch
        if held > HELD_AT_MOST // 2:
            # Else it would be granted one microbatch after the other, each a block of its own.
            return
        share = int(min(share, HELD_AT_MOST) / core.watch.slowdown(member.worker_id))
        least = min(self.doubt.slots(member.worker_id), HELD_AT_LEAST)
        count = min(member.wish, max(least, share) - held)
        while count > 0:
            granted = self.book.grant(
                member.worker_id,
                count * microbatch,
                core.config.population,
                core.now.monotonic_s,
                shards=self._shards.count,
                choose=self._shards.choose,
            )
            if granted is None:
                break
            self._contributions.leased(member.worker_id, granted.end - granted.first)
            made = self._send(member, granted)
            count, member.wish = count - made, max(0, member.wish - made)

    @property
    def left(self) -> int:
        """Samples until the job's budget is spent, of those that nobody has reported."""
        job, done = self._core.config.job, self._core.state.samples_trained + self.book.waiting
        return max(0, job.steps_total * job.train.batch - done)

    def acknowledge(self) -> None:
        """Write down what is due, or everything when that is the end."""
        now_s = self._core.now.monotonic_s
        self.doubt.follow_plan()
        self.book.due(now_s)
        if self.book.waiting and not self.left:
            self.book.write_down(now_s)
        self.return_given_up()

    def _send(self, member: Member, granted: LeaseBlockGranted) -> int:
        """Returns the number of microbatches."""
        core, job = self._core, self._core.config.job
        microbatch = job.train.microbatch
        samples = self._shards.samples_at(granted.epoch, granted.first, granted.end)
        # A constant, whatever the texts' targets are: a replica does not know with which others it will be added up.
        denominator = float(job.train.microbatches_per_inner_step * microbatch * job.tokens_per_sample)
        leases = [
            Lease(
                MicrobatchKey(LeaseKind.TRAIN, granted.epoch, granted.lease, index),
                samples[index * microbatch : (index + 1) * microbatch],
                denominator,
                LEASE_S,
            )
            for index in range(-(-len(samples) // microbatch))
        ]
        by_tokens = TOKENS_PER_MESSAGE // (microbatch * job.tokens_per_sample)
        at_once = max(1, min(MICROBATCHES_PER_MESSAGE, by_tokens))
        for begin in range(0, len(leases), at_once):
            core.desk.send(member, LeaseGrant(tuple(leases[begin : begin + at_once])))
        return len(leases)

    # ------------------------------------------------------------------ back

    def find(self, key: MicrobatchKey) -> tuple[LeaseBlock, Range] | None:
        """The block that a training key is of, and the positions that it means; None when there is no such thing (any
        more), also when it was leased before training went back to a saved version: what was trained then is lost.
        """
        leased, microbatch = self._core.state.leased, self._core.config.job.train.microbatch
        returned = leased.returned.get(key.attempt)
        block = leased.blocks.get(key.attempt) or (returned.block if returned is not None else None)
        if key.kind is not LeaseKind.TRAIN or block is None or block.epoch != key.step:
            return None
        if key.attempt < leased.first_valid:
            return None
        first = block.first + key.index * microbatch
        if first >= block.end:
            return None
        return block, (first, min(block.end, first + microbatch))

    def samples_of(self, block: LeaseBlock, positions: Range) -> tuple[int, ...]:
        return self._shards.samples_at(block.epoch, *positions)

    def give_up(self, key: MicrobatchKey, *, begun: bool) -> None:
        """The microbatch will not be trained under this lease. `begun`: some stages may have added it."""
        found, leased = self.find(key), self._core.state.leased
        if found is None or key.attempt not in leased.blocks:
            return
        positions = found[1]
        self._given_up[key.attempt] = union(self._given_up.get(key.attempt, ()), ranges_of([positions]))
        if begun:
            self._failed[key.attempt] = union(self._failed.get(key.attempt, ()), ranges_of([positions]))
        self.return_given_up()

    def return_given_up(self) -> None:
        """Blocks of which only that is left return."""
        core, leased = self._core, self._core.state.leased
        for lease in sorted(self._given_up):
            block = leased.blocks.get(lease)
            if block is None:
                del self._given_up[lease]
                self._failed.pop(lease, None)
            elif not minus(block.remaining, self._given_up[lease]):
                begun = size(meet(self._failed.pop(lease, ()), block.remaining))
                self.book.give_back(block.worker_id, block.incarnation, lease, begun, core.now.monotonic_s)
                del self._given_up[lease]
