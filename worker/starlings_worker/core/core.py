"""The worker's core: `handle(event, now_s, rng) -> effects`. No clock, no I/O, no torch, no grpc.

It keeps the plan's place of this worker, decides what the device does next, and composes the parts that do the rest:
`table` (microbatches, slots, leases), `flow` (computation and routing), `training` (steps and exchanges), `outbox` (the
coordinator's ear).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import assert_never

from starlings_protos.messages import (
    Assignment,
    ExchangeHeader,
    Leaving,
    MicrobatchHeader,
    Refusal,
    StateReport,
    WorkerId,
)
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.control import Control
from starlings_worker.core.device import DeviceOutcome, DeviceQueue
from starlings_worker.core.effects import Effect, Load, SendControl, Stop, TakeCopy
from starlings_worker.core.events import (
    AggregateAssembled,
    ArrivalAborted,
    BackwardComputed,
    ComputeFailed,
    ControlLost,
    ControlReceived,
    ControlRestored,
    Direction,
    DrainRequested,
    Event,
    ExchangePrepared,
    ExchangeRefused,
    ForwardComputed,
    GradientsCleared,
    Leg,
    LoadFailed,
    MicrobatchArrived,
    MicrobatchNotSent,
    MicrobatchSent,
    PartAborted,
    PartArrived,
    PartNotSent,
    PartReduced,
    PartSent,
    ReplayFailed,
    Settled,
    SpanLoaded,
    StagesStepped,
    StateDigested,
    StepApplied,
    StepReplayed,
    Ticked,
)
from starlings_worker.core.feeding import next_effect
from starlings_worker.core.flow import Flow
from starlings_worker.core.groups.work import GroupNetworkEvent, GroupWorked
from starlings_worker.core.invariants import check
from starlings_worker.core.observing import Observing
from starlings_worker.core.outbox import Outbox
from starlings_worker.core.pairing.meeting import Meeting
from starlings_worker.core.pairing.work import PairDeviceOutcome, PairNetworkEvent
from starlings_worker.core.parts import PartStore
from starlings_worker.core.peers import PeerTable
from starlings_worker.core.placement import Placement
from starlings_worker.core.streaming.rules import StreamRules
from starlings_worker.core.streaming.stream import Stream
from starlings_worker.core.streaming.table import StreamTable
from starlings_worker.core.table import MicrobatchTable
from starlings_worker.core.timings import WorkerTimings
from starlings_worker.core.training import Training
from starlings_worker.core.wishes import Wishes


class WorkerCore:
    """One per engine life. `rng_seed` seeds the dice of `handle` when its caller brings none."""

    def __init__(
        self,
        worker_id: WorkerId,
        rng_seed: int = 0,
        timings: WorkerTimings | None = None,
        rules: StreamRules | None = None,
    ) -> None:
        """`rules`: those of an `async` job; None: steps are transactions."""
        self.worker_id = worker_id
        self.timings = timings or WorkerTimings()
        self._rng = random.Random(rng_seed)
        self._effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        # Rises with everything that gets done: a hung engine is told from a slow one by it.
        self.progress = 0
        self.device = DeviceQueue()
        self.peers = PeerTable(self.timings)
        self.outbox = Outbox(lambda message: self._effects.append(SendControl(message)))
        self.table: MicrobatchTable
        emit = self._effects.append
        if rules is None:
            self.table = MicrobatchTable(worker_id, self.device, self.counters, emit)
        else:
            self.table = stream_table = StreamTable(worker_id, self.device, self.counters, emit)
        self.parts = PartStore(self.counters, self._effects.append)
        self.flow = Flow(
            worker_id,
            self.timings,
            self.table,
            self.device,
            self.peers,
            self.counters,
            self._effects.append,
            self.outbox.say,
        )
        self.training = Training(
            worker_id,
            self.timings,
            self.table,
            self.parts,
            self.device,
            self.outbox,
            self.counters,
            self._effects.append,
        )
        self.stream: Stream | None = None
        if rules is not None:
            self.stream = Stream(
                rules,
                stream_table,
                self.training,
                self.device,
                self.outbox,
                self.counters,
                self._effects.append,
                self._rng.random,
            )
        self.meeting = Meeting(self.stream.pairs if self.stream else None, self.flow.receipt, self.counters)
        self.placement = Placement(
            worker_id,
            self.timings,
            self.device,
            self.peers,
            self.table,
            self.parts,
            self.flow,
            self.training,
            self.stream,
            self.outbox,
            self.counters,
            self._effects.append,
            self._stop,
        )
        self.stopped = False
        self.wishes = Wishes(self.timings, self.table, self.flow, self.training, self.peers, self.outbox)
        self._now_s = 0.0
        self._leaving: tuple[str, float] | None = None
        self.control = Control(
            self.placement,
            self.training,
            self.stream,
            self.meeting,
            self.wishes,
            self.counters,
            self._effects.append,
            self._stop,
            lambda: self.draining,
        )

    @property
    def assignment(self) -> Assignment | None:
        return self.placement.assignment

    @property
    def loaded(self) -> bool:
        """Whether this worker is a holder, and has its span."""
        return self.placement.loaded

    @property
    def observing(self) -> Observing:
        return self.placement.observing

    @property
    def version(self) -> int:
        """Committed version of the weights on the device."""
        return self.observing.version if self.observing.active else self.training.version

    @property
    def paused(self) -> bool:
        """By the job's owner, as far as is known here; where steps are transactions, that is not asked."""
        return self.stream is not None and self.stream.held

    @property
    def draining(self) -> bool:
        return self._leaving is not None

    @property
    def wake_at_s(self) -> float | None:
        """When the next retry or deadline is due; a Ticked soon after that is worth sending."""
        round_ = self.training.round
        times = [
            self.flow.wake_at_s(),
            round_.wake_at_s() if round_ is not None else None,
            self.placement.load_again_at_s,
            self._leaving[1] if self._leaving is not None else None,
            self.meeting.wake_at_s(self._now_s),
        ]
        return min((time_s for time_s in times if time_s is not None), default=None)

    # ------------------------------------------------------------------ admission

    def admit(
        self, direction: Direction, header: MicrobatchHeader, sender: WorkerId, now_s: float
    ) -> Admission:
        """Judge a microbatch by its header, before its body is read; a Receipt reserves its place at once.

        The caller then reports MicrobatchArrived or ArrivalAborted (see events.py). `now_s` is not used yet.
        """
        answer: Admission = self._ahead(header.plan_version) or self.table.admit(
            direction, header, sender, self.flow.receipt()
        )
        self._count_rejection(answer)
        return answer

    def admit_part(self, leg: Leg, header: ExchangeHeader, sender: WorkerId, now_s: float) -> Admission:
        """The same for a part of an exchange; then PartArrived or PartAborted."""
        answer: Admission = self._ahead(header.plan_version) or self.training.admit_part(
            leg, header, sender, self.flow.receipt(), len(self.peers.states)
        )
        self._count_rejection(answer)
        return answer

    def _ahead(self, plan_version: int) -> Rejection | None:
        """A sender that knows a newer plan already, such as a newcomer that was let in at a step's end, asks again."""
        known = self.placement.plan_version
        if self.assignment is None or plan_version <= known:
            return None
        return Rejection(Refusal.BUSY, f"plan {plan_version} is not known here yet; {known} is")

    def _count_rejection(self, answer: Admission) -> None:
        if isinstance(answer, Rejection):
            self.counters[f"refused_{answer.refusal.name.lower()}"] += 1

    # ------------------------------------------------------------------ the step function

    def handle(self, event: Event, now_s: float, rng: random.Random | None = None) -> tuple[Effect, ...]:
        """What to do about `event`. `now_s` is monotonic; `rng` breaks ties of routing."""
        if self.stopped:
            return ()
        self._now_s = now_s
        self._dispatch(event, now_s)
        if not self.stopped:
            self._look_at_time(now_s)
            self._go_on(now_s, rng or self._rng)
        effects = tuple(self._effects)
        self._effects.clear()
        return effects

    def _dispatch(self, event: Event, now_s: float) -> None:
        if isinstance(event, PairNetworkEvent | GroupNetworkEvent):
            # No progress of this worker's: a partner goes on poking one whose device hangs.
            self.meeting.happened(event, now_s)
            return
        match event:
            case ControlReceived():
                self.control.heard(event.message, now_s)
            case ControlLost():
                self.outbox.lost()
            case ControlRestored():
                self.wishes.forget()
                self.outbox.restored()
                self.meeting.reconnected(now_s)
            case MicrobatchArrived():
                self.progress += 1
                held = self.table.arrived(event.direction, event.header, event.sender)
                if held is not None:
                    held.waits(now_s)
                    if event.direction is Direction.BACKWARD:
                        self.flow.room_at(event.sender, now_s)
            case ArrivalAborted():
                self.table.aborted(event.direction, event.header)
            case PartArrived():
                self.progress += 1
                self.training.part_arrived(event.leg, event.header, event.sender, now_s)
            case PartAborted():
                self.parts.aborted(event.leg, event.header, event.sender)
            case MicrobatchSent():
                self.progress += 1
                self.flow.sent(event, now_s)
            case MicrobatchNotSent():
                self.flow.not_sent(event, now_s)
            case PartSent():
                self.progress += 1
                self.training.part_sent(event)
            case PartNotSent():
                self.training.part_not_sent(event, now_s)
            case DrainRequested():
                if self._leaving is None:
                    self._leaving = (event.reason, now_s + event.within_s)
                    self.outbox.say(Leaving(event.reason, event.within_s))
                    self._part_from_stream()
            case Ticked():
                pass
            case _:
                effect = self.device.finish(event)
                if effect is None:
                    self.counters["unexpected_outcomes"] += 1
                elif isinstance(effect, Load) and self.placement.is_for_another(effect):
                    self.progress += 1  # Superseded meanwhile; if another place was assigned, its Load waits.
                elif isinstance(effect, TakeCopy):
                    self.progress += 1
                    self._copied(event)
                else:
                    self.progress += 1
                    self._device_did(event, now_s)

    def _device_did(self, event: DeviceOutcome, now_s: float) -> None:
        if isinstance(event, PairDeviceOutcome | GroupWorked):
            self.meeting.happened(event, now_s)
            return
        match event:
            case ForwardComputed():
                self.flow.forward_computed(event, now_s)
            case BackwardComputed():
                self.flow.backward_computed(event, now_s)
            case ComputeFailed():
                self.flow.compute_failed(event)
            case SpanLoaded():
                self.placement.span_loaded(event, now_s)
            case LoadFailed():
                self.placement.load_failed(event, now_s)
            case GradientsCleared() | Settled():
                pass
            case StagesStepped():
                if self.stream is not None:
                    self.stream.stepped(event, now_s)
            case StepReplayed():
                self.placement.step_replayed(event, now_s)
            case ReplayFailed():
                self.placement.replay_failed(event)
            case _ if not self.loaded:
                pass  # Of a life before the present assignment.
            case ExchangePrepared():
                self.training.exchange_prepared(event, now_s)
            case PartReduced():
                self.training.part_reduced(event, now_s)
            case AggregateAssembled():
                self.training.aggregate_assembled(event)
            case ExchangeRefused():
                self.training.exchange_refused(event)
            case StepApplied():
                self.training.applied(event, self.placement.plan_version, now_s)
            case StateDigested():
                report = self.training.state_digested(event)
                if report is not None:
                    self._state_reported(report, left_behind=event.left_behind)
            case _:
                assert_never(event)

    def _copied(self, event: DeviceOutcome) -> None:
        if self.stream is not None and isinstance(event, StateDigested):
            report = self.stream.state_digested(event)
            if report is not None:
                self.outbox.say(report)

    def _part_from_stream(self) -> None:
        """Where others can begin microbatches, a worker that leaves begins none."""
        if self.stream is not None and self.draining and self.loaded and self.wishes.others_can_begin():
            self.stream.part()

    def _state_reported(self, report: StateReport, *, left_behind: bool) -> None:
        """To the coordinator; or, when that is all it wants of a worker that leaves, by whoever serves the copy."""
        if left_behind and self._leaving is not None:
            reason = f"{self._leaving[0]}; the device is free, and the state stays to be fetched"
            self._stop(Stop(False, reason, drained=True, handed_over=report))
        else:
            self.outbox.say(report)

    # ------------------------------------------------------------------ going on

    def _look_at_time(self, now_s: float) -> None:
        if self.stream is not None:
            self.stream.look_at_time(now_s)
            self._part_from_stream()
        if self.loaded:
            self.training.look_at_time(now_s)
        self.placement.look_at_time(now_s)
        if self._leaving is None:
            return
        reason, until_s = self._leaving
        if not self.placement.takes_part:
            self._stop(Stop(False, reason, drained=True))
        elif now_s >= until_s:
            self._stop(Stop(False, f"{reason}; the time for leaving in order is up", drained=True))

    def _go_on(self, now_s: float, rng: random.Random) -> None:
        """Start whatever can start:

        leases into slots, transfers, the device's next piece of work, a wish for more.
        """
        if self.stopped:
            return
        self.observing.go_on()
        self.table.promote(now_s)
        self.flow.send_due(now_s, rng)
        self._feed_device(now_s, rng)
        self.table.in_flight.looked(
            now_s,
            under_way=self.table.own_count,
            full=self.table.held_back,
            idle=self.device.running is None and not self.meeting.holds_training,
        )
        if self.loaded:
            self.wishes.go_on(now_s, draining=self.draining)
        else:
            self.wishes.forget()

    def _feed_device(self, now_s: float, rng: random.Random) -> None:
        if self.device.running is None:
            trains = self.loaded and not self.meeting.holds_training
            effect = next_effect(self.device, self.flow, self.stream, now_s, rng, trains=trains)
            if effect is not None:
                self.device.begin(effect, now_s)
                self._effects.append(effect)

    def _stop(self, effect: Stop) -> None:
        self.stopped = True
        self._effects.append(effect)

    # ------------------------------------------------------------------ for tests and the simulator

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold; cheap enough for every event of a
        simulation.
        """
        check(self)
