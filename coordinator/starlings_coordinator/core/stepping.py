"""The step transaction (design section 6): leases, acknowledgements, exchange, Prepared, commit; and new attempts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from starlings_coordinator.core.ledger import Flaw, StepLedger
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.records import StepRecorded, StepRetried
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_protos.messages import (
    ExchangeFailed,
    ExchangeGroup,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    Lease,
    LeaseGrant,
    LeaseKind,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    PeerUnreachable,
    Prepared,
    Refusal,
    StepCommitted,
    StepRestarted,
    WorkerId,
)

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

TIED = "tied"


class Stepping:
    def __init__(self, core: Core) -> None:
        self._core = core
        # Attempts at this step since anything about the plan changed.
        self._futile_attempts = 0
        # Who failed to compute which microbatch of this step, without a link to blame.
        self._failures: dict[int, set[WorkerId]] = {}
        # Workers that reported a broken link in this attempt: their failures are the network's.
        self._link_trouble: set[WorkerId] = set()
        self._accusations: dict[WorkerId, int] = {}

    # ------------------------------------------------------------------ a step begins

    def begin(self) -> None:
        """The plan is loaded."""
        self._new_step()
        self._core.rates.start(self._core.now.monotonic_s)
        self.open_ledger()
        core = self._core
        core.desk.announce("training", f"training from step {core.state.step}")

    def _new_step(self) -> None:
        self._futile_attempts = 0
        self._failures.clear()
        self._accusations.clear()
        for member in self._core.members.values():
            member.strikes = 0

    def open_ledger(self) -> None:
        """A fresh ledger for the present (step, attempt); over for good when there is no step left."""
        core, state, job = self._core, self._core.state, self._core.config.job
        self._link_trouble.clear()
        if self._pause_or_end():
            return
        samples = samples_of_step(job.job.seed, core.config.population, state.step, job.train.batch)
        core.ledger = StepLedger.begin(
            state.step,
            state.attempt,
            samples,
            job.train.microbatch,
            float(core.config.count_targets(samples)) or 1.0,
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
        self._grant()
        self._watch()

    def _grant(self) -> None:
        """Spread the pool over the wishes: always to whom holds least, so that the end of a step is short."""
        core, ledger, now_s = self._core, self._core.ledger, self._core.now.monotonic_s
        assert ledger is not None
        if not ledger.pool or core.finishing.holding:
            return
        wishing = [h for h in core.holders if h.here and h.wish > 0 and h.leaving is None and self._enters(h)]
        outstanding = {h.worker_id: ledger.outstanding(h.worker_id) for h in wishing}
        granted: dict[WorkerId, list[Lease]] = {}
        while wishing and ledger.pool:
            member = min(wishing, key=lambda m: (outstanding[m.worker_id], m.worker_id))
            index = ledger.grant(member.worker_id, now_s)
            assert index is not None
            outstanding[member.worker_id] += 1
            member.wish -= 1
            if member.wish == 0:
                wishing.remove(member)
            key = MicrobatchKey(LeaseKind.TRAIN, ledger.step, ledger.attempt, index)
            granted.setdefault(member.worker_id, []).append(
                Lease(key, ledger.samples_of(index), ledger.loss_denominator, core.config.timings.lease_s)
            )
        for worker_id, leases in granted.items():
            core.desk.send(core.members[worker_id], LeaseGrant(tuple(leases)))

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
        objection = ledger.finish(message, member.worker_id, core.state.spans, len(core.state.stages))
        if objection:
            core.refused_reports += 1
            core.desk.announce(
                "refused", f"microbatch {message.key.index} of {member.worker_id}: {objection}"
            )
            return
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
        if member.worker_id not in self._link_trouble:
            failed = self._failures.setdefault(key.index, set())
            failed.add(member.worker_id)
            if len(failed) >= 2:
                samples = ", ".join(map(str, ledger.samples_of(key.index)))
                core.fail(
                    f"microbatch {key.index} of step {key.step} (samples {samples}) fails wherever it is tried: "
                    f"{message.reason}"
                )
                return
        self.retry(f"microbatch {key.index} failed at {member.worker_id}: {message.reason}")

    # ------------------------------------------------------------------ the exchange

    def groups(self) -> dict[str, tuple[WorkerId, ...]]:
        """Members of every exchange group, sorted."""
        core, state = self._core, self._core.state
        groups = {f"stage:{stage}": core.holders_of(stage) for stage in range(len(state.stages))}
        if core.config.profile.tied_count:
            ends = set(core.holders_of(0)) | set(core.holders_of(len(state.stages) - 1))
            groups[TIED] = tuple(sorted(ends))
        return groups

    def open_round(self, weights: dict[str, dict[WorkerId, float]], purpose: ExchangePurpose) -> None:
        """Tell every holder of its groups; parts are shared out by upload rate, equally where one is unknown."""
        core, state = self._core, self._core.state
        records = {
            group: ExchangeGroup(
                group,
                tuple(
                    ExchangeMember(w, weights[group].get(w, 0.0), share)
                    for w, share in zip(members, self._shares(members), strict=True)
                ),
            )
            for group, members in self.groups().items()
        }
        for holder in core.holders:
            mine = tuple(
                record
                for _, record in sorted(records.items())
                if any(m.worker_id == holder.worker_id for m in record.members)
            )
            core.desk.send(
                holder,
                ExchangeOpened(state.step, state.attempt, mine, core.config.timings.exchange_s, purpose),
            )

    def _shares(self, members: tuple[WorkerId, ...]) -> list[float]:
        probes = [self._core.members[w].probe for w in members]
        rates = [probe.uplink_bytes_per_s if probe is not None else 0.0 for probe in probes]
        if any(not (math.isfinite(rate) and rate > 0) for rate in rates):
            return [1 / len(members)] * len(members)
        return [rate / sum(rates) for rate in rates]

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
        member.strikes += 1
        self.retry(f"the exchange of {message.group} failed at {member.worker_id}: {message.reason}")
        self._drop_offenders()

    def peer_unreachable(self, member: Member, message: PeerUnreachable) -> None:
        """One report voids nothing by itself; a worker that is accused again and again is dropped."""
        core = self._core
        core.desk.announce(
            "unreachable", f"{member.worker_id} cannot reach {message.worker_id}: {message.reason}"
        )
        self._link_trouble |= {member.worker_id, message.worker_id}
        self._accusations[message.worker_id] = self._accusations.get(message.worker_id, 0) + 1
        self._drop_offenders()

    def _drop_offenders(self) -> None:
        core, limit = self._core, self._core.config.strikes_limit
        if core.phase is not Phase.TRAINING:
            return
        for holder in core.holders:
            accused = self._accusations.get(holder.worker_id, 0)
            if holder.strikes >= limit or accused >= limit:
                why = "its exchanges failed" if holder.strikes >= limit else "its peers cannot reach it"
                self._accusations.pop(holder.worker_id, None)
                core.membership.dismiss(
                    holder, Refusal.STALE, f"{why} {limit} times at step {core.state.step}"
                )
                return

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
        targets = sum(message.target_count for message in ledger.done.values())
        loss = math.fsum(message.loss_sum for message in ledger.done.values()) / ledger.loss_denominator
        tokens_each = job.train.microbatch * job.tokens_per_sample
        credits: dict[WorkerId, int] = {}
        for message in ledger.done.values():
            for hop in message.route:
                credits[hop.worker_id] = credits.get(hop.worker_id, 0) + tokens_each
        if targets != int(ledger.loss_denominator):
            self._reject(
                Flaw(f"the step has {targets} target tokens, its samples {ledger.loss_denominator:.0f}")
            )
            return
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
        for holder in core.holders:
            core.desk.send(
                holder,
                StepCommitted(ledger.step, ledger.attempt, rate, clip, norm, holder.worker_id in donors),
            )
        core.finishing.committed(bool(donors))
        self._new_step()
        self.open_ledger()

    def retry(self, reason: str) -> None:
        """The attempt is void: its gradient is forgotten everywhere and its samples are leased again."""
        core, state = self._core, self._core.state
        self._futile_attempts += 1
        if self._futile_attempts >= core.config.attempts_limit:
            core.fail(
                f"step {state.step} failed {self._futile_attempts} times in a row; the last time: {reason}"
            )
            return
        core.desk.record(StepRetried(state.step, state.attempt + 1, reason))
        core.desk.announce("step_restarted", f"step {state.step} begins again: {reason}")
        for holder in core.holders:
            core.desk.send(holder, StepRestarted(state.step, state.attempt, reason))
        self.open_ledger()

    def _watch(self) -> None:
        """Deadlines: an exchange that does not end, a lease that nobody acknowledges."""
        core, ledger, now_s = self._core, self._core.ledger, self._core.now.monotonic_s
        assert ledger is not None
        timings = core.config.timings
        if (
            ledger.opened_at_s is not None
            and now_s - ledger.opened_at_s > timings.exchange_s + timings.retry_s
        ):
            missing = [h for h in core.holders if h.worker_id not in ledger.prepared]
            for member in missing:
                member.strikes += 1
            self.retry(
                f"not prepared within {timings.exchange_s:.0f} s: {', '.join(m.worker_id for m in missing)}"
            )
            self._drop_offenders()
            return
        for index, lease in ledger.leases.items():
            if now_s - lease.granted_at_s > timings.lease_s:
                if (holder := core.members.get(lease.worker_id)) is not None:
                    holder.strikes += 1
                self.retry(f"microbatch {index} was not acknowledged by {lease.worker_id} in time")
                self._drop_offenders()
                return

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
        return ""
