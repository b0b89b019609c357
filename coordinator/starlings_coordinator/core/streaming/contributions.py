"""What each replica of an `async` job has trained, by the routes of what is done, and how much of it others have too.

What others have is written down now and then (`ReplicasShared`), as a part of the tokens that each worker is credited
with. So a restarted coordinator knows at most how much each replica has alone, and begins to count with that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from starlings_coordinator.core.pairing.weights import TokenCount
from starlings_coordinator.core.records import ReplicasShared, SamplesUnmerged
from starlings_protos.messages import Hop, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Rows of shared work are written this often at most, and in big swarms so many a second: a few megabytes a day.
SHARED_EVERY_S = 30.0
SHARED_PER_SECOND = 3.0


class Contributions:
    """Samples per worker and stage; as a `TokenLedger`, tokens."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._done: dict[WorkerId, dict[int, int]] = {}
        self._leased: dict[WorkerId, int] = {}
        self._leased_by_all = 0
        # By stage and fragment: how much was done when the weights were taken that somebody else has averaged.
        self._merged: dict[WorkerId, dict[tuple[int, int], int]] = {}
        # Who was merged since that was written down, and when that was.
        self._news: set[WorkerId] = set()
        # Of who was lost: blocks below this number may have passed through it, of so many samples at most.
        self._ghosts: dict[WorkerId, tuple[int, int]] = {}
        self._written_at_s = 0.0

    def begin(self, *, recalled: bool) -> None:
        """`recalled`: replicas are what they were for the coordinator before this one."""
        self._done.clear()
        self._leased.clear()
        self._merged.clear()
        self._news.clear()
        self._ghosts.clear()
        self._leased_by_all = 0
        self._written_at_s = self._core.now.monotonic_s
        if recalled:
            self._remember()
        for block in self._core.state.leased.blocks.values():
            self.leased(block.worker_id, block.end - block.first)

    def _remember(self) -> None:
        """At most so much has each replica alone; of what was acknowledged last nobody knows whose it was."""
        state, per_sample = self._core.state, self._core.config.job.tokens_per_sample
        unknown = state.leased.samples_acknowledged - state.samples_credited
        for worker_id, span in state.spans.items():
            alone_tokens = state.worker_tokens.get(worker_id, 0) - state.shared_tokens.get(worker_id, 0)
            alone = max(0, alone_tokens) // per_sample + unknown
            self._done[worker_id] = dict.fromkeys(span.stages, alone)
            self.leased(worker_id, alone)
        # The next points of the curve will not name what is unknown now.
        self._write(sorted(state.spans))

    # ------------------------------------------------------------------ what happens

    def leased(self, worker_id: WorkerId, samples: int) -> None:
        self._leased[worker_id] = self._leased.get(worker_id, 0) + samples
        self._leased_by_all += samples

    def done(self, route: Iterable[Hop], samples: int, lease: int) -> None:
        """A microbatch was reported for the first time."""
        lost = ""
        for hop in route:
            lost = self._lost_meanwhile(hop.worker_id, samples, lease) or lost
            if hop.worker_id not in self._core.state.spans:
                continue
            by_stage = self._done.setdefault(hop.worker_id, {})
            for stage in range(hop.first_stage, hop.last_stage + 1):
                by_stage[stage] = by_stage.get(stage, 0) + samples

        if lost:
            self._core.desk.record(SamplesUnmerged(WorkerId(lost), samples))

    def _lost_meanwhile(self, worker_id: WorkerId, samples: int, lease: int) -> str:
        """The worker, when what it added of a microbatch is gone, or may be: it was lost while that went back, and by
        now it may be here again as another life.
        """
        below, left = self._ghosts.get(worker_id, (0, 0))
        may_be = lease < below and left > 0
        if may_be:
            self._ghosts[worker_id] = (below, left - samples)
        return worker_id if may_be or worker_id not in self._core.state.spans else ""

    def merged(self, worker_id: WorkerId, stage: int, fragment: int, count: int) -> None:
        """Somebody else has that fragment as it was when the worker had done `count` samples in the stage."""
        known = self._merged.setdefault(worker_id, {})
        known[stage, fragment] = max(count, known.get((stage, fragment), 0))
        self._news.add(worker_id)

    def forget(self, worker_id: WorkerId, under_way: int) -> None:
        """Its replicas are gone. `under_way`: of what passed through it, so much at most is not reported yet."""
        self._ghosts[worker_id] = (self._core.state.leased.next_lease, under_way)
        for known in (self._done, self._leased, self._merged):
            known.pop(worker_id, None)
        self._news.discard(worker_id)

    def write_down(self) -> None:
        """Now and then, what others have too."""
        state, now_s = self._core.state, self._core.now.monotonic_s
        every_s = max(SHARED_EVERY_S, len(state.spans) / SHARED_PER_SECOND)
        if not self._news or now_s - self._written_at_s < every_s:
            return
        self._written_at_s = now_s
        news = sorted(self._news)
        self._news.clear()
        self._write(news)

    def _write(self, workers: Iterable[WorkerId]) -> None:
        """What is credited with the next point of the curve is alone, as far as the record says: at most."""
        core, per_sample = self._core, self._core.config.job.tokens_per_sample
        credited = core.state.worker_tokens
        core.desk.record(
            ReplicasShared(tuple((w, credited.get(w, 0) - self.unmerged(w) * per_sample) for w in workers))
        )

    # ------------------------------------------------------------------ questions

    def count(self, worker_id: WorkerId, stage: int) -> int:
        return self._done.get(worker_id, {}).get(stage, 0)

    def unmerged(self, worker_id: WorkerId) -> int:
        """At most so many samples are lost with the worker: of the stage and fragment of which most are."""
        stages = self._done.get(worker_id, {})
        return max((self._alone(worker_id, stage) for stage in stages), default=0)

    def _alone(self, worker_id: WorkerId, stage: int) -> int:
        rules = self._core.config.job.pair_rules
        fragments = rules.fragments if rules is not None else 1
        merged = self._merged.get(worker_id, {})
        shared = min(merged.get((stage, part), 0) for part in range(fragments))
        return self.count(worker_id, stage) - shared

    def beside(self, donors: Collection[WorkerId]) -> int:
        """At most so many samples are in no copy of the donors' weights, of each stage the lowest one's: others have
        them.
        """
        core, most = self._core, 0
        for stage in range(len(core.state.stages)):
            holders = core.holders_of(stage)
            donor = next((w for w in holders if w in donors), None)
            most = max(most, sum(self._alone(w, stage) for w in holders if w != donor))
        return most

    def tokens(self, worker_id: WorkerId, stage: int) -> TokenCount:
        """A worker begins what it has leased itself; in later stages it may be given what anybody has leased."""
        per_sample = self._core.config.job.tokens_per_sample
        leased = self._leased.get(worker_id, 0) if stage == 0 else self._leased_by_all
        return TokenCount(
            float(self.count(worker_id, stage) * per_sample),
            float(leased * per_sample),
            self._rate_tokens_per_s(worker_id, stage),
        )

    def _rate_tokens_per_s(self, worker_id: WorkerId, stage: int) -> float:
        """If it did nothing else than that stage, as it was measured; 0: unknown."""
        core = self._core
        member = core.members.get(worker_id)
        if member is None or member.probe is None or stage >= len(core.state.stages):
            return 0.0
        forward, backward = dict(member.probe.forward_seconds), dict(member.probe.backward_seconds)
        kinds = [core.config.profile.blocks[block].kind for block in core.state.stages[stage].blocks]
        seconds = sum(forward.get(kind, 0.0) + backward.get(kind, 0.0) for kind in kinds)
        job = core.config.job
        return job.train.microbatch * job.tokens_per_sample / seconds if seconds > 0 else 0.0
