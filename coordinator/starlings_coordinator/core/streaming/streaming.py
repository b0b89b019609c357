"""`async`: no step joins the workers. Each replica steps its own optimizer, and what is counted is tokens.

A worker with the first stage leases blocks of samples (leasing.py) and reports what is done. Progress is what is
acknowledged: `state.step` is acknowledged samples / batch, and names copies of the weights (copies.py), checkpoints
and the end. When enough is acknowledged, training is *paused*: whoever holds a stage calls what it has by that step,
and from there on everything is as in `sync`: replicas are averaged, attempts and all, then comes evaluation. A lost
worker costs what it had in flight; nothing is done again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from starlings_coordinator.core.events import WorkerSaid
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.quarantine import Verdict
from starlings_coordinator.core.records import SamplesUnmerged
from starlings_coordinator.core.schedule import Schedule
from starlings_coordinator.core.streaming.contributions import Contributions
from starlings_coordinator.core.streaming.copies import Copies
from starlings_coordinator.core.streaming.evaluations import Evaluations
from starlings_coordinator.core.streaming.exchanges import Exchanges
from starlings_coordinator.core.streaming.leasing import Leasing
from starlings_coordinator.core.streaming.newcomers import StreamJoining
from starlings_coordinator.core.streaming.progress import Progress, way_flaw
from starlings_protos.group_messages import GroupFromMember
from starlings_protos.messages import (
    ExchangeFailed,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Prepared,
    StateReport,
    WorkerId,
)
from starlings_protos.pair_messages import RoundOutcome, RoundReady
from starlings_protos.status import StageExchanges
from starlings_protos.stream_messages import LeasesReturned, MicrobatchVoided, StageReport, TrainingPaused

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# What is said all the time, by everybody. A look at all workers and all that they have leased takes a while, so these
# bring one about every so often at most; others do each time.
ROUTINE = (LeaseRequest, MicrobatchDone, StageReport, RoundReady, RoundOutcome)
LOOK_EVERY_S = 0.1


class Streaming(Schedule):
    def __init__(self, core: Core, joining: StreamJoining) -> None:
        super().__init__(core)
        self.contributions = Contributions(core)
        self.exchanges = Exchanges(core, self.contributions)
        self.leasing = Leasing(core, self.contributions)
        self.progress = Progress(core)
        self.copies = Copies(
            core, joining, self.contributions, lambda member: not self.leasing.has_leased(member.worker_id)
        )
        self.evaluations = Evaluations(core, self.exchanges)
        self._recalled = False
        self._moved_at_s = 0.0
        self._looked_at_s = float("-inf")
        # Since the last success.
        self._failures_in_a_row = 0

    # ------------------------------------------------------------------ the life of a plan

    def begin(self) -> None:
        core = self._core
        recalled, self._recalled = self._recalled, False
        self._moved_at_s = core.now.monotonic_s
        self._failures_in_a_row = 0
        self._forgive()
        core.rates.start(core.now.monotonic_s)
        self.leasing.begin(recalled=recalled)
        self.progress.begin()
        self.contributions.begin(recalled=recalled)
        self.copies.begin()
        self.exchanges.begin(recalled=recalled)
        self.evaluations.begin()
        core.desk.announce("training", f"training from step {core.state.step}")
        self._end_if_over()

    def recalled(self, reason: str) -> None:
        """Nobody has stopped for it."""
        self._recalled = True
        core = self._core
        core.desk.announce(
            "restarted", f"{reason}; {len(core.state.spans)} workers go on with what they leased"
        )

    def is_routine(self, said: WorkerSaid) -> bool:
        core = self._core
        early = core.phase is Phase.TRAINING and core.now.monotonic_s - self._looked_at_s < LOOK_EVERY_S
        if not (early and isinstance(said.message, ROUTINE) and self.leasing.left):
            return False
        member = core.members.get(said.worker_id)
        if member is not None and member.session == said.session and not core.paused:
            self.leasing.grant_to(member)
        return True

    def go_on(self) -> None:
        core = self._core
        self._looked_at_s = core.now.monotonic_s
        if core.phase is not Phase.TRAINING:
            return
        self.leasing.acknowledge()
        if self.progress.record():
            self._forgive()
        if self._end_if_over():
            return
        if not core.paused:
            self.leasing.grant()
        self.copies.go_on()
        self.exchanges.go_on()
        self.contributions.write_down()
        if core.paused:
            # Told nothing, workers don't count on more tokens than there are.
            return
        self.evaluations.go_on()
        if core.phase is Phase.TRAINING:
            self.progress.tell()

    def _forgive(self) -> None:
        """Progress: what went wrong before counts no more."""
        self._link_trouble.clear()
        self._accusations.clear()
        for member in self._core.members.values():
            member.strikes = 0

    def _end_if_over(self) -> bool:
        """A step that names a copy already cannot name the end."""
        core, state = self._core, self._core.state
        named = state.step <= self.copies.last_version and state.step < core.config.job.steps_total
        if not core.training_is_over or named:
            return False
        self.leasing.close()
        self.evaluations.close()
        self.progress.record(at_once=True)
        core.phase = Phase.FINISHING
        for holder in core.holders:
            core.desk.send(holder, TrainingPaused(state.step, state.attempt))
        core.finishing.begin()
        return True

    def counts_on(self, worker_id: WorkerId) -> bool:
        return self._core.phase is not Phase.TRAINING

    def leave_out(self, worker_id: WorkerId) -> str:
        self._accusations.pop(worker_id, None)
        under_way = self.leasing.doubt.all_under_way
        returned = self.leasing.lost(worker_id, "the worker is gone")
        unmerged = self.contributions.unmerged(worker_id)
        self.contributions.forget(worker_id, under_way)
        if unmerged:
            self._core.desk.record(SamplesUnmerged(worker_id, unmerged))
        return f"training goes on, {returned} samples are leased again"

    def begin_again(self) -> None:
        """Attempts are for what comes after training."""

    def remind(self, member: Member) -> None:
        core = self._core
        if core.phase is Phase.FINISHING:
            core.desk.send(member, TrainingPaused(core.state.step, core.state.attempt))
        elif core.phase is Phase.TRAINING:
            self.progress.tell_each((member,))
            self.copies.remind(member)
            self.exchanges.remind(member)

    def start_over(self, reason: str) -> None:
        """Workers repeat what they said, and what was leased stays leased."""

    def holder_leaves(self, member: Member) -> None:
        """It gives back what it has not begun, and goes when it has no work left (copies.py)."""

    # ------------------------------------------------------------------ what workers say

    def microbatch_done(self, member: Member, message: MicrobatchDone) -> None:
        if message.key.kind is not LeaseKind.TRAIN:
            self.evaluations.microbatch_done(member, message)
            return
        core, leasing = self._core, self.leasing
        found = leasing.find(message.key)
        if found is None or member.worker_id not in core.state.spans:
            core.dropped_messages += 1
            return
        block, positions = found
        lease = message.key.attempt
        objection = way_flaw(message.route, member.worker_id, len(core.state.stages))
        expected = core.config.count_targets(leasing.samples_of(block, positions))
        if not objection and message.target_count != expected:
            objection = f"it reports {message.target_count} target tokens, its samples have {expected}"
        if not objection and not math.isfinite(message.loss_sum):
            self._failed(member, MicrobatchFailed(message.key, "its loss is not finite"), blame=False)
            return
        known = leasing.book.has_heard(lease, (positions,))
        if not objection:
            now_s = core.now.monotonic_s
            objection = leasing.book.report(member.worker_id, member.incarnation, lease, (positions,), now_s)
        if objection:
            core.refused_reports += 1
            core.desk.announce("refused", f"a microbatch of {member.worker_id}: {objection}")
            member.strikes += 1
            self.drop_offenders("reports")
        elif not known:
            self._moved_at_s = core.now.monotonic_s
            self._failures_in_a_row = 0
            core.quarantine.succeeded(leasing.samples_of(block, positions))
            self.progress.done(message, positions[1] - positions[0])
            self.contributions.done(message.route, positions[1] - positions[0], lease)
            leasing.doubt.reported(member.worker_id, positions[1] - positions[0])

    def microbatch_failed(self, member: Member, message: MicrobatchFailed) -> None:
        if message.key.kind is LeaseKind.TRAIN:
            self._failed(member, message, blame=True)
        else:
            self.evaluations.microbatch_failed(message)

    def _failed(self, member: Member, message: MicrobatchFailed, *, blame: bool) -> None:
        """Whoever has something of it drops it, and its samples are leased again."""
        core, found = self._core, self.leasing.find(message.key)
        known = found is None or self.leasing.book.has_heard(message.key.attempt, (found[1],))
        if found is None or known or member.worker_id not in core.state.spans:
            core.dropped_messages += 1
            return
        block, positions = found
        core.desk.announce(
            "microbatch_failed", f"a microbatch is given up at {member.worker_id}: {message.reason}"
        )
        for holder in core.holders:
            core.desk.send(holder, MicrobatchVoided((message.key,)))
        self.leasing.give_up(message.key, begun=True)
        self._failures_in_a_row += 1
        of_network = member.worker_id in self._link_trouble
        samples = self.leasing.samples_of(block, positions)
        verdict = Verdict.AGAIN
        if not of_network:
            verdict = core.quarantine.failed(samples, member.worker_id, message.reason)
        if verdict is Verdict.HOPELESS:
            ids = ", ".join(map(str, samples))
            core.fail(f"samples {ids} fail wherever they are tried, as others do: {message.reason}")
        elif verdict is Verdict.QUARANTINED:
            pass  # Nobody's fault but theirs.
        elif self._failures_in_a_row >= core.config.attempts_limit:
            core.fail(
                f"{self._failures_in_a_row} microbatches failed in a row; the last one: {message.reason}"
            )
        elif blame:
            if of_network:
                self.blame(member)
            else:
                member.strikes += 1
            self.drop_offenders("microbatches")

    def died_at(self, member: Member, key: MicrobatchKey, reason: str) -> None:
        """Its own leases return with it; others who sent it something send that to somebody else, or give up."""
        core, found = self._core, self.leasing.find(key) if self._core.phase is Phase.TRAINING else None
        if found is None or self.leasing.book.has_heard(key.attempt, (found[1],)):
            return
        verdict = core.quarantine.failed(self.leasing.samples_of(*found), member.worker_id, reason)
        if verdict is not Verdict.QUARANTINED:
            return
        # Who led it would have it computed by the next one.
        for holder in core.holders:
            core.desk.send(holder, MicrobatchVoided((key,)))
        self.leasing.give_up(key, begun=True)

    def leases_returned(self, member: Member, message: LeasesReturned) -> None:
        for key in message.keys:
            found = self.leasing.find(key) if self._core.phase is Phase.TRAINING else None
            if found is not None and found[0].worker_id == member.worker_id:
                self.leasing.give_up(key, begun=False)

    def stages_reported(self, member: Member, message: StageReport) -> None:
        self.progress.stages_reported(member, message)

    def round_ready(self, member: Member, message: RoundReady) -> None:
        if self._core.phase is Phase.TRAINING:
            self.exchanges.ready(member, message)
        else:
            self._core.dropped_messages += 1

    def round_outcome(self, member: Member, message: RoundOutcome) -> None:
        self.exchanges.outcome(member, message)

    def group_said(self, member: Member, message: GroupFromMember) -> None:
        self.exchanges.group_said(member, message)

    def state_reported(self, member: Member, message: StateReport) -> bool:
        return self.copies.state_reported(member, message)

    def prepared(self, member: Member, message: Prepared) -> None:
        self._core.dropped_messages += 1

    def exchange_failed(self, member: Member, message: ExchangeFailed) -> None:
        if self._core.phase is Phase.FINISHING:
            self._core.finishing.exchange_failed(member, message)
        else:
            self._core.dropped_messages += 1

    def beside(self, version: int) -> int:
        named, samples = self.copies.beside
        return samples if named == version else 0

    # ------------------------------------------------------------------ for people and tests

    @property
    def samples_leased(self) -> int:
        leased = self._core.state.leased
        return leased.samples_acknowledged + sum(
            end - first for block in leased.blocks.values() for first, end in block.remaining
        )

    @property
    def under_way(self) -> bool:
        return bool(self._core.state.leased.blocks)

    @property
    def exchanges_shown(self) -> tuple[StageExchanges, ...]:
        return self.exchanges.status()

    def waiting_words(self) -> str:
        core = self._core
        if core.now.monotonic_s - self._moved_at_s <= 2 * core.config.timings.retry_s:
            return ""
        if core.state.leased.blocks:
            holders = sorted({block.worker_id for block in core.state.leased.blocks.values()})
            return f"waiting for microbatches that {', '.join(holders[:4])} leased"
        return "waiting for a worker with the first stage to ask for work"

    def validate(self) -> None:
        core, state = self._core, self._core.state
        state.leased.validate()
        assert state.step == max(0, state.samples_trained) // core.config.job.train.batch
        if core.phase is Phase.FINISHING:
            assert not state.leased.blocks, "training is over, and samples are leased"
        for block in state.leased.blocks.values():
            assert state.incarnations[block.worker_id] >= block.incarnation
