"""The step transaction (design section 6): leases, acknowledgements, exchange, Prepared, commit; and new attempts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from starlings_coordinator.core.ledger import Flaw, StepLedger
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.quarantine import Verdict, stand_ins
from starlings_coordinator.core.records import StepRecorded, StepRetried
from starlings_coordinator.core.schedule import TIED, Schedule
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_protos.messages import (
    ExchangeFailed,
    ExchangePurpose,
    Lease,
    LeaseGrant,
    LeaseKind,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Prepared,
    StateReport,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from starlings_protos.stream_messages import LeasesReturned, StageReport

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core


class Stepping(Schedule):
    """`sync`."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        # Attempts at this step since anything about the plan changed.
        self._futile_attempts = 0
        # Who was to keep a copy at which commit, for those who missed it.
        self._donors: tuple[int, frozenset[WorkerId]] = (-1, frozenset())

    # ------------------------------------------------------------------ a step begins

    def begin(self) -> None:
        """The plan is loaded."""
        self._new_step()
        self._core.rates.start(self._core.now.monotonic_s)
        self.open_ledger()
        core = self._core
        core.desk.announce("training", f"training from step {core.state.step}")

    def recalled(self, reason: str) -> None:
        core, state = self._core, self._core.state
        core.desk.record(StepRetried(state.step, state.attempt + 1, reason))
        core.desk.announce(
            "restarted", f"{reason}; step {state.step} begins again with {len(state.spans)} workers"
        )

    def begin_again(self) -> None:
        self.open_ledger()
        self._core.finishing.renew_hold()

    def _new_step(self) -> None:
        self._futile_attempts = 0
        for member in self._core.members.values():
            member.strikes = 0

    def open_ledger(self) -> None:
        """A fresh ledger for the present (step, attempt); over for good when there is no step left."""
        core, state, job = self._core, self._core.state, self._core.config.job
        self._link_trouble.clear()
        self._accusations.clear()
        if self._pause_or_end():
            return
        samples = stand_ins(
            samples_of_step(job.job.seed, core.config.population, state.step, job.train.batch),
            state.quarantined,
            core.config.population,
        )
        core.ledger = StepLedger.begin(
            state.step,
            state.attempt,
            samples,
            job.train.microbatch,
            float(core.config.count_targets(samples)) or 1.0,
            core.now.monotonic_s,
        )

    def _pause_or_end(self) -> bool:
        core = self._core
        if core.training_is_over:
            core.ledger = None
            core.phase = Phase.FINISHING
            core.finishing.begin()
            return True
        return False

    def go_on(self) -> None:
        core = self._core
        if core.phase is not Phase.TRAINING or core.ledger is None:
            return
        if core.paused and not self.under_way and not core.finishing.holding:
            # No step's end comes at which they could go.
            core.finishing.let_go()
            if core.phase is not Phase.TRAINING:
                return
        self._grant()
        self._watch()

    def _grant(self) -> None:
        """Spread the pool over the wishes: always to whom holds least, so that the end of a step is short."""
        core, ledger, now_s = self._core, self._core.ledger, self._core.now.monotonic_s
        assert ledger is not None
        if not ledger.pool or core.finishing.holding:
            return
        if core.paused and not self.under_way:
            return  # A step that has begun is finished: it is a transaction.
        entering = [h for h in core.holders if self._enters(h)]
        # A leaving worker begins nothing more, unless the step could not end without it.
        staying = [h for h in entering if h.leaving is None]
        wishing = [h for h in staying or entering if h.takes_work and h.wish > 0]
        outstanding = {h.worker_id: ledger.outstanding(h.worker_id) for h in wishing}
        slowdown = {h.worker_id: core.watch.slowdown(h.worker_id) for h in wishing}
        granted: dict[WorkerId, list[Lease]] = {}
        while wishing and ledger.pool:
            member = min(
                wishing,
                key=lambda m: ((outstanding[m.worker_id] + 1) * slowdown[m.worker_id], m.worker_id),
            )
            index = ledger.grant(member.worker_id, now_s)
            assert index is not None
            outstanding[member.worker_id] += 1
            member.wish -= 1
            if member.wish == 0:
                wishing.remove(member)
            key = MicrobatchKey(LeaseKind.TRAIN, ledger.step, ledger.attempt, index)
            granted.setdefault(member.worker_id, []).append(
                Lease(key, ledger.samples_of(index), ledger.loss_denominator, self.patience.lease_s)
            )
        for worker_id, leases in granted.items():
            core.desk.send(core.members[worker_id], LeaseGrant(tuple(leases)))

    def counts_on(self, worker_id: WorkerId) -> bool:
        """Whether this attempt cannot be committed without `worker_id`: something that it accumulated is done, or the
        exchange has begun, of which it is a member.
        """
        core, ledger = self._core, self._core.ledger
        if core.phase is not Phase.TRAINING or ledger is None or core.finishing.holding:
            return True
        return ledger.opened_at_s is not None or ledger.passed(worker_id)

    def leave_out(self, worker_id: WorkerId) -> str:
        assert self._core.ledger is not None
        self._accusations.pop(worker_id, None)
        returned = len(self._core.ledger.leave_out(worker_id))
        return f"step {self._core.state.step} goes on, {returned} of its microbatches are leased again"

    def _enters(self, member: Member) -> bool:
        return self._core.state.spans[member.worker_id].first_stage == 0

    # ------------------------------------------------------------------ microbatches

    def microbatch_done(self, member: Member, message: MicrobatchDone) -> None:
        core, ledger = self._core, self._core.ledger
        if ledger is None or message.key.kind is not LeaseKind.TRAIN:
            core.dropped_messages += 1
            return
        if (message.key.step, message.key.attempt) != (ledger.step, ledger.attempt):
            core.dropped_messages += 1
            return
        lease = ledger.leases.get(message.key.index)
        if lease is None or lease.worker_id != member.worker_id:
            core.dropped_messages += 1  # A second copy, after a reconnection.
            return
        expected = core.config.count_targets(ledger.samples_of(message.key.index))
        objection = ledger.finish(
            message,
            member.worker_id,
            core.state.spans,
            len(core.state.stages),
            expected,
            core.now.monotonic_s,
        )
        if objection:
            # Its gradient is somewhere, and nobody can say what it is: only a new attempt settles that.
            words = f"microbatch {message.key.index} of {member.worker_id}: {objection}"
            if any(hop.worker_id in ledger.gone for hop in message.route):
                self.retry(words, futile=False)
                return
            core.refused_reports += 1
            if math.isfinite(message.loss_sum):
                member.strikes += (
                    1  # A loss that is not finite is nobody's fault; it fails the job if it stays.
                )
            self.retry(words)
            self._drop_offenders()
            return
        core.quarantine.succeeded(ledger.samples_of(message.key.index))
        if ledger.complete:
            self._open_exchange()

    def microbatch_failed(self, member: Member, message: MicrobatchFailed) -> None:
        core, ledger, key = self._core, self._core.ledger, message.key
        if ledger is None or (key.kind, key.step, key.attempt) != (
            LeaseKind.TRAIN,
            ledger.step,
            ledger.attempt,
        ):
            core.dropped_messages += 1
            return
        if ledger.gone:
            # It may be because of a worker that was lost meanwhile: nobody's fault. If not, it will fail again.
            words = f"microbatch {key.index} cannot go on at {member.worker_id}: {message.reason}"
            self.retry(words, futile=False)
            return
        if member.worker_id not in self._link_trouble:
            verdict = core.quarantine.failed(ledger.samples_of(key.index), member.worker_id, message.reason)
            if verdict is Verdict.HOPELESS:
                samples = ", ".join(map(str, ledger.samples_of(key.index)))
                core.fail(
                    f"microbatch {key.index} of step {key.step} (samples {samples}) fails wherever it is tried, as "
                    f"others do: {message.reason}"
                )
                return
            if verdict is Verdict.QUARANTINED:
                self.retry(f"microbatch {key.index} is quarantined: {message.reason}", futile=False)
                return
            member.strikes += 1
        else:
            self.blame(member)
        self.retry(f"microbatch {key.index} failed at {member.worker_id}: {message.reason}")
        self._drop_offenders()

    def died_at(self, member: Member, key: MicrobatchKey, reason: str) -> None:
        core, ledger = self._core, self._core.ledger
        if core.phase is not Phase.TRAINING or ledger is None:
            return
        if (key.step, key.attempt) != (ledger.step, ledger.attempt) or key.index not in ledger.leases:
            return
        verdict = core.quarantine.failed(ledger.samples_of(key.index), member.worker_id, reason)
        if verdict is Verdict.QUARANTINED:
            self.retry(f"microbatch {key.index} is quarantined: {reason}", futile=False)

    # ------------------------------------------------------------------ the exchange

    def _open_exchange(self) -> None:
        core, ledger = self._core, self._core.ledger
        assert ledger is not None
        ledger.opened_at_s = core.now.monotonic_s
        last = len(core.state.stages) - 1
        weights: dict[str, dict[WorkerId, float]] = {}
        for group in self.groups():
            if group == TIED:
                contributors = ledger.contributors(0) | ledger.contributors(last)
            else:
                contributors = ledger.contributors(int(group.removeprefix("stage:")))
            weights[group] = dict.fromkeys(contributors, 1.0)
        self.open_round(weights, ExchangePurpose.GRADIENT)

    def prepared(self, member: Member, message: Prepared) -> None:
        core, ledger = self._core, self._core.ledger
        stale = ledger is None or (message.step, message.attempt) != (ledger.step, ledger.attempt)
        if stale or ledger is None or ledger.opened_at_s is None or member.worker_id not in core.state.spans:
            core.dropped_messages += 1
            return
        ledger.prepared.setdefault(member.worker_id, message)
        if all(worker_id in ledger.prepared for worker_id in core.state.spans):
            self._settle(ledger)

    def exchange_failed(self, member: Member, message: ExchangeFailed) -> None:
        core, ledger = self._core, self._core.ledger
        if core.phase is Phase.FINISHING:
            core.finishing.exchange_failed(member, message)
            return
        if ledger is None or (message.step, message.attempt) != (ledger.step, ledger.attempt):
            core.dropped_messages += 1
            return
        self.blame(member)
        self.retry(f"the exchange of {message.group} failed at {member.worker_id}: {message.reason}")
        self._drop_offenders()

    def _drop_offenders(self) -> None:
        self.drop_offenders(f"attempts at step {self._core.state.step}")

    # ------------------------------------------------------------------ commit or retry

    def _settle(self, ledger: StepLedger) -> None:
        core = self._core
        classes = {w: core.members[w].hello.numeric_class for w in core.state.spans}
        norms, flaw = ledger.judge(self.groups(), classes)
        if flaw is not None:
            self._reject(flaw)
        else:
            self._commit(ledger, math.sqrt(math.fsum(norms.values())))

    def _reject(self, flaw: Flaw) -> None:
        for worker_id in flaw.culprits:
            if (member := self._core.members.get(worker_id)) is not None:
                member.strikes += 1
        self.retry(flaw.reason)
        self._drop_offenders()

    def _commit(self, ledger: StepLedger, norm: float) -> None:
        core, job, now_s = self._core, self._core.config.job, self._core.now.monotonic_s
        limit = job.train.clip
        clip = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        rate = learning_rate(job.train, ledger.step, job.steps_total)
        loss = math.fsum(message.loss_sum for message in ledger.done.values()) / ledger.loss_denominator
        tokens_each = job.train.microbatch * job.tokens_per_sample
        credits: dict[WorkerId, int] = {}
        for message in ledger.done.values():
            for hop in message.route:
                credits[hop.worker_id] = credits.get(hop.worker_id, 0) + tokens_each
        commit = StepRecorded(
            ledger.step,
            ledger.attempt,
            loss,
            rate,
            clip,
            norm,
            job.tokens_per_step,
            len(ledger.done) * job.train.microbatch,
            tuple(sorted(credits.items())),
            now_s - core.started_at_s,
        )
        core.desk.record(commit)
        core.rates.step(now_s, commit.tokens, commit.credits)
        core.finishing.all_applied(ledger.step)
        donors = core.finishing.donors() if core.finishing.wants_checkpoint(core.state.step) else frozenset()
        self._donors = (ledger.step, donors | core.joining.start(ledger))
        for holder in core.holders:
            self.remind(holder)
            if core.state.attempt > 0:
                # Workers expect attempt 0 of a new step; this one was trained before, in a line that is void.
                core.desk.send(
                    holder, StepRestarted(core.state.step, core.state.attempt, "this step is done again")
                )
        core.finishing.committed(donors)
        core.joining.committed()
        self._new_step()
        self.open_ledger()
        core.finishing.let_go()

    def remind(self, member: Member) -> None:
        """Say the last commit to a holder, if the present step follows it."""
        commit = self._core.state.commit
        if commit is None or commit.step + 1 != self._core.state.step:
            return
        step, donors = self._donors
        self._core.desk.send(
            member,
            StepCommitted(
                commit.step,
                commit.attempt,
                commit.learning_rate,
                commit.clip_factor,
                commit.gradient_norm,
                snapshot=step == commit.step and member.worker_id in donors,
            ),
        )

    def retry(self, reason: str, *, futile: bool = True) -> None:
        """The attempt is void: its gradient is forgotten everywhere and its samples are leased again.

        `futile` attempts count: a step that fails by itself again and again fails the job.
        """
        core, state = self._core, self._core.state
        self._futile_attempts += futile
        if self._futile_attempts >= core.config.attempts_limit:
            core.fail(
                f"step {state.step} failed {self._futile_attempts} times in a row; the last time: {reason}"
            )
            return
        self.announce_attempt(reason)
        self.open_ledger()
        core.finishing.renew_hold()

    def _watch(self) -> None:
        """Deadlines: an exchange that does not end, a lease that nobody acknowledges."""
        core, ledger, now_s = self._core, self._core.ledger, self._core.now.monotonic_s
        assert ledger is not None
        timings = core.config.timings
        if (
            ledger.opened_at_s is not None
            and now_s - ledger.opened_at_s > self.patience.exchange_s + timings.retry_s
        ):
            missing = [h for h in core.holders if h.worker_id not in ledger.prepared]
            for member in missing:
                member.strikes += 1
            self.retry(
                f"not prepared within {self.patience.exchange_s:.0f} s: {', '.join(m.worker_id for m in missing)}"
            )
            self._drop_offenders()
            return
        oldest = next(iter(ledger.leases.values()), None)
        if oldest is None or now_s - oldest.granted_at_s <= timings.lease_s:
            return
        patience_s = self.patience.lease_s
        for index, lease in ledger.leases.items():
            if now_s - lease.granted_at_s > patience_s:
                if (holder := core.members.get(lease.worker_id)) is not None:
                    holder.strikes += 1
                self.retry(f"microbatch {index} was not acknowledged by {lease.worker_id} in time")
                self._drop_offenders()
                return

    # ------------------------------------------------------------------ questions and what does not occur

    def start_over(self, reason: str) -> None:
        self.retry(reason, futile=False)

    def holder_leaves(self, member: Member) -> None:
        finishing = self._core.finishing
        if member in finishing.last_holders():
            finishing.hold()

    def state_reported(self, member: Member, message: StateReport) -> bool:
        return False

    def leases_returned(self, member: Member, message: LeasesReturned) -> None:
        self._core.dropped_messages += 1

    def stages_reported(self, member: Member, message: StageReport) -> None:
        self._core.dropped_messages += 1

    @property
    def samples_leased(self) -> int:
        core, state, ledger = self._core, self._core.state, self._core.ledger
        touched = len(ledger.touched) * core.config.job.train.microbatch if ledger is not None else 0
        return max(state.samples_leased, state.samples_trained + state.samples_lost + touched)

    @property
    def under_way(self) -> bool:
        ledger = self._core.ledger
        return ledger is not None and bool(ledger.leases or ledger.done)

    @property
    def microbatches(self) -> tuple[int, int]:
        ledger = self._core.ledger
        return (ledger.count, len(ledger.done)) if ledger is not None else (0, 0)

    def validate(self) -> None:
        core, state, ledger = self._core, self._core.state, self._core.ledger
        if core.phase is Phase.TRAINING:
            assert ledger is not None, "training without a ledger"
            assert (ledger.step, ledger.attempt) == (state.step, state.attempt), (
                "the ledger is of another step"
            )
        if ledger is not None:
            parts = (set(ledger.pool), set(ledger.leases), set(ledger.done))
            assert sum(map(len, parts)) == len(ledger.pool) + len(ledger.leases) + len(ledger.done)
            assert set.union(*parts) == set(range(ledger.count)), "a microbatch is nowhere"
            assert sum(map(len, parts)) == ledger.count, "a microbatch is in two places"
        assert state.samples_trained == state.step * core.config.job.train.batch

    def waiting_words(self) -> str:
        core, ledger = self._core, self._core.ledger
        if ledger is None:
            return ""
        if core.finishing.holding:
            return "waiting for a checkpoint, so that a worker can leave without loss"
        if (
            ledger.opened_at_s is not None
            and core.now.monotonic_s - ledger.opened_at_s > core.config.timings.retry_s
        ):
            missing = sorted(w for w in core.state.spans if w not in ledger.prepared)
            return f"waiting for {', '.join(missing[:4])} to exchange"
        quiet_s = core.now.monotonic_s - ledger.moved_at_s
        if ledger.opened_at_s is None and quiet_s > 2 * core.config.timings.retry_s:
            if ledger.leases:
                holders = sorted({lease.worker_id for lease in ledger.leases.values()})
                return f"waiting for microbatches that {', '.join(holders[:4])} began"
            return "waiting for a worker with the first stage to ask for work"
        return ""
