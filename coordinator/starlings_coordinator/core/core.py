"""The coordinator's core: `handle(event, now) -> (records, effects)`. No clock, no I/O, no grpc, no torch, no numpy.

`state` is the fold over all records (see state.py). The rest is soft: who is connected, the open ledger, timers. Five
parts share it: `membership` (who is here), `planning` (who holds what), `schedule` (how training goes on: `Stepping`,
the step transaction, or `Streaming`, without a barrier), `joining` (who comes later), `finishing` (the end).

Life of a job: gathering -> planning -> loading -> training -> finishing -> done; a stage without a holder leads
back to
gathering from the newest checkpoint, an error that no retry cures to failed. Every wait has a reason that
`status` shows.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.desk import Desk
from starlings_coordinator.core.effects import CloseSession, Effect, JobEnded
from starlings_coordinator.core.events import (
    Booted,
    CheckpointFailed,
    CheckpointSaved,
    DrainAsked,
    Event,
    EvictionRequested,
    KeeperLost,
    KeeperStarted,
    Now,
    PauseRequested,
    PlanComputed,
    PlannerFailed,
    ReadmissionRequested,
    ResumeRequested,
    StopRequested,
    Ticked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerRevoked,
    WorkerSaid,
)
from starlings_coordinator.core.finishing import Finishing
from starlings_coordinator.core.joining import Joining
from starlings_coordinator.core.ledger import StepLedger
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.membership import Membership
from starlings_coordinator.core.operating import Operating
from starlings_coordinator.core.overfull import overfull
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.planning import Planning
from starlings_coordinator.core.quarantine import Quarantine
from starlings_coordinator.core.rates import Rates
from starlings_coordinator.core.records import JobFinished, Record, StopRecorded
from starlings_coordinator.core.schedule import Schedule
from starlings_coordinator.core.state import Durable, fold, snapshot_from_json, snapshot_to_json
from starlings_coordinator.core.stepping import Stepping
from starlings_coordinator.core.streaming.newcomers import StreamJoining
from starlings_coordinator.core.streaming.streaming import Streaming
from starlings_coordinator.core.views import status
from starlings_coordinator.core.watch import Watch
from starlings_protos.group_messages import GroupHeld, GroupPrepared
from starlings_protos.messages import (
    CatchUpFailed,
    EngineDown,
    ExchangeFailed,
    Finish,
    Heartbeat,
    Hello,
    LeaseKind,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    PeerUnreachable,
    Prepared,
    ProbeReport,
    Ready,
    Refusal,
    StateReport,
    WorkerId,
)
from starlings_protos.pair_messages import RoundOutcome, RoundReady
from starlings_protos.reach_messages import ReachReport
from starlings_protos.status import Event as EventLine
from starlings_protos.status import StatusReply
from starlings_protos.stream_messages import LeasesReturned, StageReport
from starlings_protos.telemetry import Telemetry

EVENTS_KEPT = 512


class Core:
    """One per coordinator. `restore` makes one from what the store kept."""

    def __init__(self, config: CoreConfig, state: Durable | None = None) -> None:
        self.config = config
        self.state = state if state is not None else Durable()
        self.phase = Phase.GATHERING
        self.members: dict[WorkerId, Member] = {}
        self.ledger: StepLedger | None = None
        self.rates = Rates()
        self.events: deque[EventLine] = deque(maxlen=EVENTS_KEPT)
        self._event_sequence = 0
        self.started_at_s = 0.0
        self.now = Now(0.0, 0.0)
        self._ticked_at_s: float | None = None
        # Messages of streams that are over, and reports that contradict the ledger.
        self.dropped_messages = 0
        self.refused_reports = 0
        self.desk = Desk(self.apply, self._note)
        self.membership = Membership(self)
        self.watch = Watch(self)
        self.operating = Operating(self)
        self.quarantine = Quarantine(self)
        self.planning = Planning(self)
        self.schedule: Schedule
        self.joining: Joining
        if config.job.train.streams:
            self.joining = joining = StreamJoining(self)
            self.schedule = Streaming(self, joining)
        else:
            self.joining, self.schedule = Joining(self), Stepping(self)
        self.finishing = Finishing(self)

    # ------------------------------------------------------------------ the fold

    def apply(self, record: Record) -> None:
        job = self.config.job
        fold(self.state, record, job.train.batch, job.tokens_per_sample)

    def snapshot(self) -> bytes:
        """The durable state; `restore` with it and the records since gives an equal one."""
        return snapshot_to_json(self.state)

    @classmethod
    def restore(cls, config: CoreConfig, snapshot: bytes | None, records: tuple[Record, ...] = ()) -> Core:
        """Raises RecordError when the snapshot is malformed."""
        core = cls(config, snapshot_from_json(snapshot) if snapshot is not None else None)
        for record in records:
            core.apply(record)
        return core

    # ------------------------------------------------------------------ the step function

    def handle(self, event: Event, now: Now) -> tuple[tuple[Record, ...], tuple[Effect, ...]]:
        """What to write down, and what to do once it is written."""
        self.now = now
        if isinstance(event, WorkerSaid) and isinstance(event.message, Heartbeat | Telemetry):
            # They change nothing that is decided here, and a thousand workers send many.
            self._signed(event, event.message)
            return (), ()
        self._dispatch(event)
        if not (isinstance(event, WorkerSaid) and self.schedule.is_routine(event)):
            self._go_on()
        return self.desk.take()

    def _go_on(self) -> None:
        if self.state.stop_reason and self.phase in (Phase.GATHERING, Phase.PLANNING, Phase.LOADING):
            # Nothing runs that could be ended in order; the newest checkpoint is all there is.
            self.end(done=True, reason=self.state.stop_reason, exit_code=0)
        if not self.has_ended:
            self.planning.go_on()
            self.schedule.go_on()
            self.finishing.go_on()
        self.joining.go_on()

    @property
    def has_ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def _dispatch(self, event: Event) -> None:
        match event:
            case Booted():
                self._booted()
            case Ticked():
                self._ticked()
            case KeeperStarted():
                self.planning.keeper_started(event.addresses, event.versions)
            case KeeperLost():
                self.planning.keeper_lost()
            case (
                PauseRequested()
                | ResumeRequested()
                | DrainAsked()
                | EvictionRequested()
                | ReadmissionRequested()
            ):
                self.operating.asked(event)
            case WorkerConnected():
                self.membership.connected(event.session, event.hello)
            case _ if self.has_ended:
                # Goodbyes; what is shown stays as it was.
                self.dropped_messages += isinstance(event, WorkerSaid)
            case WorkerDisconnected():
                self.membership.disconnected(event.session, event.worker_id)
            case WorkerRevoked():
                self.membership.revoked(event.worker_id)
            case WorkerSaid():
                self._said(event)
            case PlanComputed():
                if not self.joining.placing.computed(event.reply):
                    self.planning.computed(event.reply)
            case PlannerFailed():
                if not self.joining.placing.planner_failed(event.request_id, event.reason):
                    self.planning.planner_failed(event.request_id, event.reason)
            case CheckpointSaved():
                self.finishing.checkpoint_saved(event)
            case CheckpointFailed():
                self.finishing.checkpoint_failed(event)
            case StopRequested():
                if not self.state.stop_reason:
                    self.operating.job_ends()
                    self.desk.record(StopRecorded(event.reason or "stopped by the owner"))
                    self.desk.announce("stop", self.state.stop_reason)
            case _:
                assert_never(event)

    def _speaker(self, said: WorkerSaid) -> Member | None:
        """None when its stream or its job is over; what it says then is counted and dropped."""
        member = self.members.get(said.worker_id)
        if member is None or member.session != said.session or self.has_ended:
            self.dropped_messages += 1
            return None
        return member

    def _signed(self, said: WorkerSaid, sign: Heartbeat | Telemetry) -> None:
        member = self._speaker(said)
        if member is None:
            return
        if isinstance(sign, Heartbeat):
            member.detector.heard(self.now.monotonic_s)
            member.heartbeat = sign
        elif sign.samples:
            # No sign of life: where it goes over the bus nobody is judged in another way.
            member.counters = sign.samples[-1]

    def _said(self, event: WorkerSaid) -> None:
        member = self._speaker(event)
        if member is None:
            return
        message = event.message
        member.detector.heard(self.now.monotonic_s)
        match message:
            case Hello():
                self.dropped_messages += 1  # A stream has one, and it came as WorkerConnected.
            case Heartbeat() | Telemetry():
                pass  # See `_signed`.
            case ProbeReport():
                self.membership.probed(member, message)
            case EngineDown():
                self.membership.engine_down(member, message)
            case Leaving():
                self.membership.leaving(member, message)
            case Ready():
                if not self.joining.ready(member, message):
                    self.planning.ready(member, message)
            case CatchUpFailed():
                self.joining.catch_up_failed(member, message)
            case LeaseRequest():
                member.wish = min(message.count, 1024)
            case MicrobatchDone():
                self._microbatch_done(member, message)
            case MicrobatchFailed():
                self._microbatch_failed(member, message)
            case Prepared():
                self.schedule.prepared(member, message)
            case ExchangeFailed():
                self.schedule.exchange_failed(member, message)
            case PeerUnreachable():
                self.schedule.peer_unreachable(member, message)
            case StateReport():
                if not (self.phase is Phase.TRAINING and self.schedule.state_reported(member, message)):
                    self.finishing.state_reported(member, message)
            case StageReport():
                self.schedule.stages_reported(member, message)
            case LeasesReturned():
                self.schedule.leases_returned(member, message)
            case RoundReady():
                self.schedule.round_ready(member, message)
            case RoundOutcome():
                self.schedule.round_outcome(member, message)
            case GroupHeld() | GroupPrepared():
                self.schedule.group_said(member, message)
            case ReachReport():
                pass  # The shell's business.
            case _:
                assert_never(message)

    def _microbatch_done(self, member: Member, message: MicrobatchDone) -> None:
        if self.phase is Phase.TRAINING:
            self.schedule.microbatch_done(member, message)
        elif self.phase is Phase.FINISHING and message.key.kind is not LeaseKind.TRAIN:
            self.finishing.microbatch_done(member, message)
        else:
            self.dropped_messages += 1

    def _microbatch_failed(self, member: Member, message: MicrobatchFailed) -> None:
        training = self.phase is Phase.TRAINING
        if training and message.out_of_memory and member.worker_id in self.state.spans and member.usable:
            overfull(self, member, message.reason)
        elif training:
            self.schedule.microbatch_failed(member, message)
        elif self.phase is Phase.FINISHING and message.key.kind is not LeaseKind.TRAIN:
            self.finishing.microbatch_failed(member, message)
        else:
            self.dropped_messages += 1

    def _booted(self) -> None:
        # The curve goes on where the log ends.
        known_s = self.state.loss_curve[-1].at_s if self.state.loss_curve else 0.0
        self.started_at_s = self.now.monotonic_s - known_s
        finished = self.state.finished
        if finished is not None and finished.done and self.state.step >= self.config.job.steps_total:
            self.phase = Phase.DONE
            self.desk.ask(JobEnded(0, "the job is done; a larger `tokens` in the job file continues it"))
        elif self.state.plan_live:
            self.planning.recall()

    def _ticked(self) -> None:
        now_s = self.now.monotonic_s
        asleep = self._ticked_at_s is not None and now_s - self._ticked_at_s > 5.0
        self._ticked_at_s = now_s
        self.membership.look_at_time(forgive=asleep)
        self.watch.look_at_time(forgive=asleep)
        self.operating.look_at_time()

    # ------------------------------------------------------------------ shared by the parts

    def _note(self, kind: str, text: str) -> None:
        self._event_sequence += 1
        at_s = self.now.monotonic_s - self.started_at_s
        self.events.append(EventLine(self._event_sequence, at_s, kind, text))

    @property
    def paused(self) -> bool:
        """By the owner: nothing more is begun."""
        return self.state.pause is not None

    @property
    def plan_is_live(self) -> bool:
        return self.phase in (Phase.LOADING, Phase.TRAINING, Phase.FINISHING)

    @property
    def plan_is_shown(self) -> bool:
        """Also after the end, when people ask who held what."""
        return self.plan_is_live or self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def holders(self) -> tuple[Member, ...]:
        """Members that hold a span of the live plan, sorted by id."""
        if not self.plan_is_live:
            return ()
        return tuple(self.members[w] for w in sorted(self.state.spans) if w in self.members)

    def holders_of(self, stage: int) -> tuple[WorkerId, ...]:
        return tuple(sorted(w for w, span in self.state.spans.items() if stage in span))

    @property
    def training_is_over(self) -> bool:
        return self.state.step >= self.config.job.steps_total or bool(self.state.stop_reason)

    def end(self, *, done: bool, reason: str, exit_code: int) -> None:
        """Nothing comes after this but goodbyes."""
        version = self.state.step if self.plan_is_live else self.planning.restart_version
        self.desk.record(JobFinished(version, done, reason, exit_code))
        self.desk.announce("done" if done else "failed", reason)
        self.phase = Phase.DONE if done else Phase.FAILED
        self.ledger = None
        for member in self.members.values():
            self.desk.send(member, Finish(done, reason))
        self.desk.ask(JobEnded(exit_code, reason))

    def fail(self, reason: str, exit_code: int = 1) -> None:
        self.end(done=False, reason=reason, exit_code=exit_code)

    def refuse(self, session: int, worker_id: WorkerId, refusal: Refusal, message: str) -> None:
        self.desk.announce("refused", f"{worker_id}: {message}")
        self.desk.ask(CloseSession(session, worker_id, refusal, message))

    # ------------------------------------------------------------------ for people and tests

    def waiting_words(self) -> str:
        """Why nothing moves; "" while it does."""
        if self.operating.holds_up:
            return self.operating.words()
        match self.phase:
            case Phase.GATHERING | Phase.PLANNING:
                return self.planning.waiting.words()
            case Phase.LOADING:
                return self.planning.loading_words()
            case Phase.TRAINING:
                return self.schedule.waiting_words()
            case Phase.FINISHING:
                return self.finishing.waiting_words()
            case Phase.DONE | Phase.FAILED:
                return ""
            case _:
                assert_never(self.phase)

    def status(self, now: Now) -> StatusReply:
        return status(self, now.monotonic_s)

    def validate(self) -> None:
        """Invariants; raises AssertionError. Called after every event by tests and by the simulator."""
        state = self.state
        sessions = [m.session for m in self.members.values() if m.session is not None]
        assert len(sessions) == len(set(sessions)), "two members share a stream"
        if self.plan_is_live:
            for stage in range(len(state.stages)):
                assert self.holders_of(stage), f"stage {stage} has no holder in a live plan"
            for worker_id in state.spans:
                assert worker_id in self.members, f"{worker_id} holds a span and is unknown"
        self.schedule.validate()
        self.joining.validate()
        assert state.samples_lost == 0, "committed samples are in no gradient"
