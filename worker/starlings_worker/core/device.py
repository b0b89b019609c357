"""The device's queue:

one effect at a time. Exchange and optimizer work as it comes, then what the flow offers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from starlings_protos.messages import MicrobatchKey
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    ComputeBackward,
    ComputeForward,
    DeviceEffect,
    DigestState,
    Load,
    OpenExchange,
    ReducePart,
    ReplayStep,
    Settle,
    StepStages,
    TakeCopy,
)
from starlings_worker.core.events import (
    AggregateAssembled,
    BackwardComputed,
    ComputeFailed,
    ExchangePrepared,
    ExchangeRefused,
    ForwardComputed,
    GradientsCleared,
    LoadFailed,
    PartReduced,
    ReplayFailed,
    Settled,
    SpanLoaded,
    StagesStepped,
    StateDigested,
    StepApplied,
    StepReplayed,
)
from starlings_worker.core.groups.work import GroupWork, GroupWorked
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    JudgePair,
    OuterStepTaken,
    PairCommitted,
    PairDeviceOutcome,
    PairEncoded,
    PairFailed,
    PairJudged,
    TakeOuterStep,
)

DeviceOutcome = (
    SpanLoaded
    | LoadFailed
    | ForwardComputed
    | BackwardComputed
    | ComputeFailed
    | GradientsCleared
    | ExchangePrepared
    | PartReduced
    | AggregateAssembled
    | ExchangeRefused
    | StepApplied
    | StagesStepped
    | Settled
    | StepReplayed
    | ReplayFailed
    | StateDigested
    | PairDeviceOutcome
    | GroupWorked
)


def belongs(effect: DeviceEffect, outcome: DeviceOutcome) -> bool:
    """Whether `outcome` is the outcome of `effect`."""
    match effect:
        case Load():
            return (
                isinstance(outcome, SpanLoaded | LoadFailed)
                and outcome.plan_version == effect.assignment.plan_version
            )
        case ComputeForward():
            return isinstance(outcome, ForwardComputed | ComputeFailed) and outcome.key == effect.key
        case ComputeBackward():
            return isinstance(outcome, BackwardComputed | ComputeFailed) and outcome.key == effect.key
        case ClearGradients():
            return isinstance(outcome, GradientsCleared) and (outcome.step, outcome.attempt) == (
                effect.step,
                effect.attempt,
            )
        case ApplyStep():
            return isinstance(outcome, StepApplied) and outcome.step == effect.step
        case ReplayStep():
            return isinstance(outcome, StepReplayed | ReplayFailed) and outcome.step == effect.step
        case StepStages():
            return isinstance(outcome, StagesStepped) and outcome.stages == tuple(
                step.stage for step in effect.stages
            )
        case Settle():
            return isinstance(outcome, Settled) and outcome.version == effect.version
        case AdoptState() | DigestState() | TakeCopy():
            return isinstance(outcome, StateDigested) and outcome.version == effect.version
        case TakeOuterStep(stage, slot):
            return isinstance(outcome, OuterStepTaken) and (outcome.stage, outcome.slot) == (stage, slot)
        case EncodePair(key):
            return isinstance(outcome, PairEncoded | PairFailed) and outcome.key == key
        case JudgePair(key):
            return isinstance(outcome, PairJudged | PairFailed) and outcome.key == key
        case CommitPair(key):
            return isinstance(outcome, PairCommitted | PairFailed) and outcome.key == key
        case GroupWork(task):
            return isinstance(outcome, GroupWorked) and outcome.task == task
        case OpenExchange():
            name = (effect.step, effect.attempt, effect.group.group)
            if isinstance(outcome, ExchangePrepared) and outcome.pass_number != 0:
                return False
            return isinstance(outcome, ExchangePrepared | ExchangeRefused) and _round(outcome) == name
        case ReducePart():
            name = (effect.step, effect.attempt, effect.group)
            if isinstance(outcome, PartReduced) and outcome.pass_number != effect.pass_number:
                return False
            return isinstance(outcome, PartReduced | ExchangeRefused) and _round(outcome) == name
        case Assemble():
            name = (effect.step, effect.attempt, effect.group)
            if isinstance(outcome, ExchangePrepared) and outcome.pass_number != effect.pass_number + 1:
                return False
            return (
                isinstance(outcome, AggregateAssembled | ExchangePrepared | ExchangeRefused)
                and _round(outcome) == name
            )


def _round(
    outcome: ExchangePrepared | PartReduced | AggregateAssembled | ExchangeRefused,
) -> tuple[int, int, str]:
    return (outcome.step, outcome.attempt, outcome.group)


class DeviceQueue:
    """`running` is what the device does now; `waiting` is exchange, optimizer and loading work in order of
    arrival.
    """

    def __init__(self) -> None:
        self.running: DeviceEffect | None = None
        self._since_s = 0.0
        self.waiting: deque[DeviceEffect] = deque()

    def begin(self, effect: DeviceEffect, now_s: float) -> None:
        assert self.running is None, "the device does one thing at a time"
        self.running, self._since_s = effect, now_s

    def busy_s(self, now_s: float) -> float:
        """How long it has been at what it does now; 0 when there is nothing."""
        return now_s - self._since_s if self.running is not None else 0.0

    def push(self, effect: DeviceEffect) -> None:
        self.waiting.append(effect)

    def purge(self, unwanted: Callable[[DeviceEffect], bool]) -> None:
        """Drop what waits and is not wanted any more; what runs is left to end."""
        self.waiting = deque(effect for effect in self.waiting if not unwanted(effect))

    def works_on(self, key: MicrobatchKey) -> bool:
        return isinstance(self.running, ComputeForward | ComputeBackward) and self.running.key == key

    def finish(self, outcome: DeviceOutcome) -> DeviceEffect | None:
        """The effect that ends with `outcome`, and the device is free; None when nothing like it runs."""
        effect = self.running
        if effect is None or not belongs(effect, outcome):
            return None
        self.running = None
        return effect
