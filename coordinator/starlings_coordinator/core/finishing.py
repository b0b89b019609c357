"""Checkpoints on the way, leaving without loss, and the end of a job: average, evaluation, text sample,
checkpoint, goodbye.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from starlings_coordinator.core.digests import disagreement
from starlings_coordinator.core.effects import SaveCheckpoint
from starlings_coordinator.core.events import CheckpointFailed, CheckpointSaved
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.records import CheckpointRecorded, EvaluationRecorded, TextRecorded
from starlings_coordinator.core.save_pace import SavePace
from starlings_protos.messages import (
    ExchangeFailed,
    ExchangePurpose,
    Lease,
    LeaseGrant,
    LeaseKind,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Peer,
    StateReport,
    StateWanted,
    WorkerId,
)

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

TRIES = 3


class Part(enum.Enum):
    """What the end of a job consists of, in order."""

    AGREE = "comparing the replicas"
    AVERAGE = "averaging the replicas"
    EVALUATE = "evaluating on held-out samples"
    GENERATE = "generating a text sample"
    SAVE = "saving the last checkpoint"


@dataclass(slots=True)
class ForwardWork:
    """Forward-only microbatches: pooled, leased, done."""

    key_step: int
    pool: deque[int] = field(default_factory=deque)
    leases: dict[int, tuple[WorkerId, float]] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    loss_sum: float = 0.0
    target_count: int = 0
    done: int = 0
    count: int = 0


class Finishing:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.part: Part | None = None
        self._since_s = 0.0
        self._reports: dict[WorkerId, StateReport] = {}
        self._averaged = False
        self._work: ForwardWork | None = None
        # Evaluation and generation passes are numbered through the core's life, so that late answers are told apart.
        self._pass = 0
        self._text: list[int] = []
        # A version whose snapshots were asked for but perhaps not taken yet, and one that the keeper is pulling.
        self._snapshot_version = -1
        self._snapshot_donors: frozenset[WorkerId] = frozenset()
        self.saving: tuple[int, float] | None = None
        self.pace = SavePace(core.config.timings.retry_s)
        self._save_again_at_s: float | None = None
        # Training pauses at this version until it is saved: a last holder wants to leave.
        self._hold_version = -1

    # ------------------------------------------------------------------ checkpoints on the way

    @property
    def holding(self) -> bool:
        return self._hold_version >= 0

    def last_holders(self) -> list[Member]:
        """Leaving workers without whom a stage would have no holder that stays."""
        core = self._core
        stays = {h.worker_id for h in core.holders if h.leaving is None}
        return [
            h
            for h in core.holders
            if h.leaving is not None
            and any(not stays & set(core.holders_of(s)) for s in core.state.spans[h.worker_id].stages)
        ]

    def wants_checkpoint(self, version: int) -> bool:
        core = self._core
        return (
            self.pace.due(version, core.config.job.checkpoint.every)
            and self.saving is None
            and self._snapshot_version < 0
            and self.pace.may_begin(core.now.monotonic_s)
        )

    def donors(self) -> frozenset[WorkerId]:
        """The lowest worker id of each stage keeps a copy."""
        core = self._core
        return frozenset(core.holders_of(stage)[0] for stage in range(len(core.state.stages)))

    def reset(self) -> None:
        """There is no plan any more: what was under way with it is over, except what the keeper is writing."""
        self.part, self._work = None, None
        self._snapshot_version, self._hold_version = -1, -1
        self._save_again_at_s = None

    def committed(self, donors: frozenset[WorkerId]) -> None:
        """`donors` were told to keep a copy of the version that the commit makes."""
        version = self._core.state.step
        if donors:
            self._snapshot_version, self._snapshot_donors = version, donors
        elif self.pace.due(version, self._core.config.job.checkpoint.every):
            self.pace.overdue = True

    def holder_leaves(self, member: Member) -> None:
        """A holder said that it wants to go. If others hold all that it holds, it goes with the step that is under way
        (or at once at the end of the job); a last holder goes when its state is saved.
        """
        if self._core.phase is Phase.TRAINING:
            self._core.schedule.holder_leaves(member)
        else:
            self.let_go()

    def let_go(self) -> None:
        """Between two steps: whoever wants to leave and is no last holder may."""
        core = self._core
        for holder in list(core.holders):
            last = self.last_holders()
            if holder.leaving is not None and holder not in last and core.plan_is_live:
                core.membership.release(holder)
        if core.phase is Phase.TRAINING and self.last_holders():
            self.hold()

    def hold(self) -> None:
        """Save the present version at once: a step under way may need the very worker that takes no more work."""
        core, version = self._core, self._core.state.step
        if self._hold_version == version:
            return
        self._hold_version = version
        core.schedule.start_over("a worker leaves, and its state is saved first")

    def renew_hold(self) -> None:
        """A new attempt began: whoever was to report its state for the save is asked again."""
        core, version = self._core, self._core.state.step
        if core.phase is not Phase.TRAINING or self._hold_version < 0:
            return
        self._hold_version = version if self.last_holders() else -1
        if self._hold_version < 0:
            return
        if core.planning.is_saved(version):
            self._release_last()
            return
        self._reports.clear()
        last = self.last_holders()
        for holder in core.holders:
            # A last holder is wanted for nothing but its state.
            core.desk.send(
                holder, StateWanted(version, holder.worker_id in self.donors(), hand_over=holder in last)
            )

    def _release_last(self) -> None:
        self._hold_version = -1
        for member in self.last_holders():
            self._core.membership.release(member)
            if self._core.phase is not Phase.TRAINING:
                return

    def all_applied(self, step: int) -> None:
        """Everybody prepared `step`, so everybody had applied the one before: its snapshots exist."""
        if 0 <= self._snapshot_version <= step:
            if self.saving is None:
                self.save(self._snapshot_version, {}, self._snapshot_donors)
            self._snapshot_version = -1

    def save(self, version: int, digests: dict[str, str], copied: frozenset[WorkerId]) -> None:
        core, state = self._core, self._core.state
        names = core.config.profile.block_names
        donors = []
        for index, stage in enumerate(state.stages):
            holders = core.holders_of(index)
            # Somebody with a lower id may have joined since.
            member = core.members[next((w for w in holders if w in copied), holders[0])]
            peer: Peer = member.peer(state.spans[member.worker_id], state.stages, core.config.profile, 1)
            donors += [(names[b], (peer,), digests.get(names[b], "")) for b in stage.blocks]
        self._save_again_at_s = None
        self.saving = (version, core.now.monotonic_s)
        tokens = version * core.config.job.tokens_per_step
        core.desk.ask(SaveCheckpoint(version, tokens, tuple(donors)))

    def _save_end(self) -> None:
        """Save the present version as reported, unless it is saved or being saved. Another save is waited for."""
        core, version = self._core, self._core.state.step
        if core.planning.is_saved(version) or (self.saving is not None and self.saving[0] == version):
            return
        if self.saving is not None:
            self._save_again_at_s = core.now.monotonic_s
            return
        digests: dict[str, str] = {}
        for stage in range(len(core.state.stages)):
            report = self._reports.get(core.holders_of(stage)[0])
            if report is not None and report.version == version:
                names = {core.config.profile.block_names[b] for b in core.state.stages[stage].blocks}
                digests.update({b: d for b, d in report.block_digests.items() if b in names})
        self.save(version, digests, self.donors())

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        core = self._core
        if self.saving is not None and self.saving[0] == event.version:
            if self.pace.trouble:
                core.desk.announce("checkpoint", "checkpoints can be saved again")
            self.pace.saved(self.saving[1], core.now.monotonic_s)
            self.saving = None
        if event.version > core.state.step or core.state.finished is not None:
            return
        core.desk.record(CheckpointRecorded(event.version, event.path, core.schedule.beside(event.version)))
        core.planning.keeper_has(event.version)
        core.desk.announce("checkpoint", f"version {event.version} is saved: {event.path}")
        if event.version == core.state.step:
            self._save_again_at_s = None
        if core.phase is Phase.TRAINING and self._hold_version == event.version:
            self._release_last()
        elif core.phase is Phase.FINISHING and self.part is Part.SAVE:
            self._enter(Part.SAVE)

    def checkpoint_failed(self, event: CheckpointFailed) -> None:
        core = self._core
        if self.saving is None or self.saving[0] != event.version:
            return
        self.saving = None
        now_s = core.now.monotonic_s
        again_at_s = self.pace.failed(event.version, event.reason, now_s)
        core.desk.announce(
            "checkpoint_failed",
            f"version {event.version} could not be saved, it is tried again in {again_at_s - now_s:.0f} s; the one "
            f"before is untouched: {event.reason}",
        )
        last_one = core.phase is Phase.FINISHING and event.version == core.state.step
        if last_one and self.pace.gives_up(event.exit_code, TRIES, now_s):
            core.fail(f"the last checkpoint could not be saved: {event.reason}", event.exit_code)
        elif last_one or self.holding:
            # Longer and longer: a donor that hangs is soon known as lost, and then there is another one.
            self._save_again_at_s = again_at_s

    # ------------------------------------------------------------------ the end, part by part

    def begin(self) -> None:
        """Also after the plan changed: every part is done again, they are all short."""
        self.reset()
        self._averaged = False
        self._enter(Part.AGREE)

    def _enter(self, part: Part) -> None:
        core, state, config = self._core, self._core.state, self._core.config
        self.part, self._since_s, self._work = part, core.now.monotonic_s, None
        match part:
            case Part.AGREE:
                self._reports.clear()
                for holder in core.holders:
                    core.desk.send(holder, StateWanted(state.step, holder.worker_id in self.donors()))
            case Part.AVERAGE:
                self._reports.clear()
                self._averaged = True
                groups = core.schedule.groups()
                weights = {g: dict.fromkeys(members, 1 / len(members)) for g, members in groups.items()}
                core.schedule.open_round(weights, ExchangePurpose.STATE)
            case Part.EVALUATE:
                count = math.ceil(config.held_out_count / config.job.train.microbatch)
                if count == 0:
                    self._enter(Part.SAVE)
                    return
                self._start_work(count)
            case Part.GENERATE:
                if config.profile.family == "sequential" or config.held_out_count == 0:
                    self._enter(Part.SAVE)
                    return
                self._text = []
                self._start_work(1)
            case Part.SAVE:
                if core.planning.is_saved(state.step):
                    reason = state.stop_reason or f"all {state.step} steps are trained"
                    core.end(done=True, reason=reason, exit_code=0)
                else:
                    self._save_end()
            case _:
                assert_never(part)

    def _start_work(self, count: int) -> None:
        self._pass += 1
        self._work = ForwardWork(self._pass, deque(range(count)), count=count)

    def state_reported(self, member: Member, message: StateReport) -> None:
        core = self._core
        if message.version != core.state.step or member.worker_id not in core.state.spans:
            core.dropped_messages += 1
            return
        # A report from before the present attempt says nothing about what was averaged since.
        if core.phase is Phase.FINISHING and message.attempt != core.state.attempt:
            core.dropped_messages += 1
            return
        self._reports[member.worker_id] = message
        if not all(worker_id in self._reports for worker_id in core.state.spans):
            return
        if core.phase is Phase.TRAINING and self._hold_version == message.version:
            self._snapshot_version = -1
            self._save_end()
        elif core.phase is Phase.FINISHING and self.part in (Part.AGREE, Part.AVERAGE):
            flaw = disagreement({w: r.block_digests for w, r in self._reports.items()})
            if not flaw:
                # While the keeper pulls the snapshots, evaluation goes on.
                self._save_end()
                self._enter(Part.EVALUATE)
            elif not self._averaged:
                core.desk.announce("average", f"replicas are averaged: {flaw}")
                self._enter(Part.AVERAGE)
            else:
                core.desk.announce(
                    "average", f"replicas still differ: {flaw}; the lowest ids' state is saved"
                )
                self._save_end()
                self._enter(Part.EVALUATE)

    def exchange_failed(self, member: Member, message: ExchangeFailed) -> None:
        core = self._core
        if self.part is not Part.AVERAGE or (message.step, message.attempt) != (
            core.state.step,
            core.state.attempt,
        ):
            core.dropped_messages += 1
            return
        member.strikes += 1
        if member.strikes >= core.config.strikes_limit:
            core.membership.dismiss(member, None, f"averaging fails at it: {message.reason}")
        else:
            core.planning.reissue(f"averaging {message.group} failed at {member.worker_id}: {message.reason}")

    # ------------------------------------------------------------------ forward-only work

    def go_on(self) -> None:
        core, now_s, timings = self._core, self._core.now.monotonic_s, self._core.config.timings
        if self._save_again_at_s is not None and now_s >= self._save_again_at_s and self.saving is None:
            self._save_again_at_s = None
            if core.phase is Phase.FINISHING or (core.phase is Phase.TRAINING and self.holding):
                self._save_end()
        if self.saving is not None and now_s - self.saving[1] > timings.save_s:
            self.checkpoint_failed(CheckpointFailed(self.saving[0], "the keeper did not answer in time"))
        if core.phase is not Phase.FINISHING:
            return
        if self._work is not None:
            if now_s - self._since_s > (TRIES + 1) * self._forward_lease_s:
                self._skip("nobody takes the work")
            else:
                self._lease_forward(self._work)
        elif self.part in (Part.AGREE, Part.AVERAGE) and now_s - self._since_s > timings.digest_s:
            late = [h for h in core.holders if h.worker_id not in self._reports]
            if late:
                core.membership.dismiss(late[0], None, "it did not report its state at the end in time")

    def _lease_forward(self, work: ForwardWork) -> None:
        core, now_s = self._core, self._core.now.monotonic_s
        for index, (worker_id, at_s) in list(work.leases.items()):
            if worker_id not in core.members or now_s - at_s > self._forward_lease_s:
                self._return(work, index, f"not answered by {worker_id} in time")
                if self._work is not work:
                    return
        wishing = [
            h
            for h in core.holders
            if h.here and h.wish > 0 and core.state.spans[h.worker_id].first_stage == 0
        ]
        busy = {h.worker_id: sum(1 for w, _ in work.leases.values() if w == h.worker_id) for h in wishing}
        while wishing and work.pool:
            member = min(wishing, key=lambda m: (busy[m.worker_id], m.worker_id))
            index = work.pool.popleft()
            work.leases[index] = (member.worker_id, now_s)
            busy[member.worker_id] += 1
            member.wish -= 1
            if member.wish == 0:
                wishing.remove(member)
            core.desk.send(member, LeaseGrant((self._lease(work, index),)))

    def _lease(self, work: ForwardWork, index: int) -> Lease:
        config = self._core.config
        if self.part is Part.EVALUATE:
            first = index * config.job.train.microbatch
            samples = tuple(range(first, min(first + config.job.train.microbatch, config.held_out_count)))
            kind = LeaseKind.EVALUATE
        else:
            samples, kind = (self._prompt_sample, *self._text), LeaseKind.GENERATE
        # A lease that comes back is another attempt, so that a late answer to the first does not count twice.
        key = MicrobatchKey(kind, work.key_step, work.tries.get(index, 0), index)
        return Lease(key, samples, 1.0, self._forward_lease_s)

    @property
    def _forward_lease_s(self) -> float:
        timings = self._core.config.timings
        return timings.forward_lease_s + self._core.schedule.patience.lease_s - timings.lease_s

    @property
    def _prompt_sample(self) -> int:
        return self._core.config.job.job.seed % max(1, self._core.config.held_out_count)

    def microbatch_done(self, member: Member, message: MicrobatchDone) -> None:
        """From the holder of the last stage."""
        core, work, key = self._core, self._work, message.key
        if (
            work is None
            or key.step != work.key_step
            or key.index not in work.leases
            or key.attempt != work.tries.get(key.index, 0)
        ):
            core.dropped_messages += 1
            return
        span = core.state.spans.get(member.worker_id)
        ends_here = bool(message.route) and message.route[-1].worker_id == member.worker_id
        if not ends_here or span is None or len(core.state.stages) - 1 not in span:
            core.refused_reports += 1
            return
        del work.leases[key.index]
        work.done += 1
        self._since_s = core.now.monotonic_s
        if self.part is Part.GENERATE:
            self._next_token(message.next_token)
            return
        work.loss_sum += message.loss_sum
        work.target_count += message.target_count
        if work.done == work.count:
            loss = work.loss_sum / max(1, work.target_count)
            if math.isfinite(loss):
                core.desk.record(EvaluationRecorded(core.state.step, loss))
                unit = "sample" if core.config.profile.family == "sequential" else "token"
                core.desk.announce("evaluation", f"validation loss {loss:.4f} nats per {unit}")
            else:
                core.desk.announce("evaluation", "the validation loss is not finite")
            self._enter(Part.GENERATE)

    def _next_token(self, token: int) -> None:
        core = self._core
        self._text.append(min(token, core.config.profile.vocabulary_size - 1))
        if len(self._text) < core.config.generated_tokens:
            self._start_work(1)
            return
        core.desk.record(TextRecorded(core.state.step, self._prompt_sample, tuple(self._text)))
        self._enter(Part.SAVE)

    def microbatch_failed(self, member: Member, message: MicrobatchFailed) -> None:
        work, key = self._work, message.key
        if work is None or key.step != work.key_step or key.index not in work.leases:
            self._core.dropped_messages += 1
            return
        self._return(work, key.index, f"{member.worker_id}: {message.reason}")

    def _return(self, work: ForwardWork, index: int, reason: str) -> None:
        del work.leases[index]
        work.tries[index] = work.tries.get(index, 0) + 1
        if work.tries[index] >= TRIES:
            self._skip(f"failed {TRIES} times: {reason}")
            return
        work.pool.append(index)

    def _skip(self, reason: str) -> None:
        """The model is worth more than figures about it."""
        assert self.part is not None
        self._core.desk.announce("evaluation", f"{self.part.value}: {reason}")
        self._enter(Part.GENERATE if self.part is Part.EVALUATE else Part.SAVE)

    def waiting_words(self) -> str:
        if self.part is None:
            return ""
        late = [h.worker_id for h in self._core.holders if h.worker_id not in self._reports]
        if self.part in (Part.AGREE, Part.AVERAGE) and late:
            return f"{self.part.value}: waiting for {', '.join(late[:4])}"
        if self.part is Part.SAVE and self.pace.trouble:
            return f"{self.part.value}: {self.pace.trouble}"
        return self.part.value
