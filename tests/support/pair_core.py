"""A worker of a `PairWorld` with a whole core: it trains leased microbatches, and exchanges in pairs beside that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

from starlings_job.exchange_rules import Phase, rules_for
from starlings_job.sections import TrainSection
from starlings_protos.messages import (
    LeaseGrant,
    LeaseRequest,
    Receipt,
    ToCoordinator,
    WorkerId,
)
from starlings_protos.pair_messages import (
    PairHeader,
    PairMatched,
    PairWord,
    RoundOutcome,
    RoundReady,
    SlotClock,
)
from starlings_simulator.driver import assignment, lease, train_key
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.core import WorkerCore
from starlings_worker.core.effects import (
    ComputeBackward,
    ComputeForward,
    Effect,
    Load,
    SendControl,
    StepStages,
)
from starlings_worker.core.events import (
    BackwardComputed,
    ControlLost,
    ControlReceived,
    ControlRestored,
    Event,
    ForwardComputed,
    SpanLoaded,
    StagesStepped,
    Ticked,
)
from starlings_worker.core.pairing.stage_rounds import StageRounds
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    PairDeviceEffect,
    PairDeviceOutcome,
    PairNetworkEvent,
    SendPair,
    SendWord,
    TakeOuterStep,
)
from starlings_worker.core.streaming.rules import StreamRules
from support.pair_worker import INNER_STEPS, STEP_S, Worker

FORWARD_S, BACKWARD_S = 0.3 * STEP_S, 0.6 * STEP_S


class CoreWorker(Worker):
    """What the world says to a PairRounds, this worker's core hears as events."""

    def _begin(self) -> Any:
        section = TrainSection.model_validate(
            {"schedule": "async", "batch": 8, "microbatch": 2, "inner_batch": 1, "warmup": 0}
        )
        pairs = rules_for(
            "pairs",
            main=Phase(INNER_STEPS, 1.0, 0.0),
            warmup=None,
            warmup_fraction=0.0,
            fragments=self.world.fragments,
        )
        self.core = WorkerCore(self.worker_id, rules=StreamRules(section, 1, 256, 10**6, pairs))
        self.counters = self.core.counters
        self.steps = 0
        self._next_lease = 0
        self._plan_version = 0
        # When the device came to what it does, and for how long it had nothing to do.
        self._idle_since_s = self.world.now_s
        self.idle_s = 0.0
        rounds = self.core.meeting.rounds
        assert rounds is not None
        # Decisions are judged when they are made: the device may be busy then.
        rounds._push = self._noted_push
        told = _Told(self)
        told.lives({w: worker.incarnation for w, worker in self.world.workers.items()}, self.world.now_s)
        return told

    def _noted_push(self, effect: PairDeviceEffect) -> None:
        self._note(effect)
        self.core.device.push(effect)

    def _asked(self) -> list[object]:
        return [self.core.device.running, *self.core.device.waiting]

    def _step(self) -> None:
        raise AssertionError("steps are the core's")

    # ---------------------------------------------------------------- events and effects

    def feed(self, event: Event) -> None:
        for effect in self.core.handle(event, self.world.now_s, self.world.rng):
            self._execute(effect)
        self.core.validate()

    def plan(self, incarnations: Mapping[WorkerId, int]) -> None:
        """Everybody holds everything."""
        self._plan_version += 1
        new = assignment((0, 0), {}, stages=1, plan_version=self._plan_version)
        peers = assignment((0, 0), {w: (0, 0) for w in incarnations if w != self.worker_id}, stages=1).peers
        peers = tuple(replace(peer, incarnation=incarnations[peer.worker_id]) for peer in peers)
        self.feed(ControlReceived(replace(new, peers=peers)))

    def _execute(self, effect: Effect) -> None:
        match effect:
            case SendControl():
                self._said(effect.message)
            case SendPair() | SendWord() | ForgetPair():
                self._emit(effect)
            case Load():
                # Between two events of the world.
                self.world.at(self.world.now_s, lambda: self.do(lambda: self._done(effect)))
            case ComputeForward() | ComputeBackward() | StepStages():
                self._after(effect, self._seconds(effect))
            case TakeOuterStep() | EncodePair() | JudgePair() | CommitPair():
                rng, trouble = self.world.rng, self.world.trouble
                seconds = rng.uniform(0.001, 0.02)
                if rng.random() < trouble.slow_device:
                    seconds += rng.uniform(0.5, 4.0)
                self._after(effect, seconds)
            case _:
                pass

    def _seconds(self, effect: ComputeForward | ComputeBackward | StepStages) -> float:
        match effect:
            case ComputeForward():
                return FORWARD_S
            case ComputeBackward():
                return BACKWARD_S
            case StepStages():
                return STEP_S - FORWARD_S - BACKWARD_S
            case _:
                assert_never(effect)

    def _after(self, effect: Effect, seconds: float) -> None:
        now_s = self.world.now_s
        self.idle_s += now_s - self._idle_since_s

        def done() -> None:
            self._idle_since_s = self.world.now_s
            self._done(effect)

        self.world.at(now_s + seconds, lambda: self.do(done))

    def _done(self, effect: Effect) -> None:
        match effect:
            case Load():
                self.feed(SpanLoaded(effect.assignment.plan_version, 0, {"embed": "d"}))
            case ComputeForward():
                self.feed(ForwardComputed(effect.key, FORWARD_S, 3.0, 32))
            case ComputeBackward():
                self.feed(BackwardComputed(effect.key, BACKWARD_S))
            case StepStages():
                self.world.trains(self)
                self._train()
                self.steps += 1
                self.feed(StagesStepped((0,), (1.0,)))
            case TakeOuterStep() | EncodePair() | JudgePair() | CommitPair():
                self.feed(self._carried_out(effect))

    def _said(self, message: ToCoordinator) -> None:
        match message:
            case RoundReady() | RoundOutcome():
                self._say(message)
            case LeaseRequest():
                keys = [
                    train_key(self._next_lease + n, attempt=self.incarnation) for n in range(message.count)
                ]
                self._next_lease += message.count
                grant = LeaseGrant(tuple(lease(key) for key in keys))
                self.world._control(self, lambda: self.do(lambda: self.feed(ControlReceived(grant))))
            case _:
                pass


class _Told:
    """The way in of a `PairRounds`, to a core."""

    def __init__(self, worker: CoreWorker) -> None:
        self._worker = worker

    @property
    def stages(self) -> dict[int, StageRounds]:
        rounds = self._worker.core.meeting.rounds
        assert rounds is not None
        return rounds.stages

    def told(self, message: SlotClock | PairMatched, now_s: float) -> None:
        self._worker.feed(ControlReceived(message))

    def lives(self, incarnations: Mapping[WorkerId, int], now_s: float) -> None:
        self._worker.plan(incarnations)

    def reconnected(self, now_s: float) -> None:
        self._worker.feed(ControlLost())
        self._worker.feed(ControlRestored())

    def handle(self, event: PairDeviceOutcome | PairNetworkEvent, now_s: float) -> None:
        self._worker.feed(event)

    def look_at_time(self, now_s: float) -> None:
        self._worker.feed(Ticked())

    def wake_at_s(self, now_s: float) -> float | None:
        return self._worker.core.wake_at_s

    def admit(self, header: PairHeader, sender: WorkerId, receipt: Receipt, now_s: float) -> Admission:
        return self._worker.core.meeting.admit(header, sender, now_s)

    def judge_word(self, word: PairWord, sender: WorkerId, now_s: float) -> Rejection | None:
        return self._worker.core.meeting.judge_word(word, sender, now_s)
