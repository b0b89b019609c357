"""One worker core driven by hand: events in, effects out, with an obedient device. For tests that tell a story."""

from __future__ import annotations

import random
from typing import TypeVar

from starlings_protos.messages import (
    KEEPER,
    Assignment,
    Hop,
    Lease,
    LeaseGrant,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Peer,
    Receipt,
    Span,
    Stage,
    ToCoordinator,
    ToWorker,
    WorkerId,
)
from starlings_worker.core.admission import Admission
from starlings_worker.core.core import WorkerCore
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    ComputeBackward,
    ComputeForward,
    DeviceEffect,
    DigestState,
    Effect,
    Load,
    OpenExchange,
    ReducePart,
    ReplayStep,
    SendControl,
    Settle,
    StepStages,
    TakeCopy,
)
from starlings_worker.core.events import (
    AggregateAssembled,
    BackwardComputed,
    ControlReceived,
    Direction,
    Event,
    ExchangePrepared,
    ForwardComputed,
    GradientsCleared,
    MicrobatchArrived,
    PartReduced,
    Settled,
    SpanLoaded,
    StagesStepped,
    StateDigested,
    StepApplied,
    StepReplayed,
    Ticked,
)
from starlings_worker.core.groups.work import (
    AdoptAnchor,
    AnchorAdopted,
    AnchorEncoded,
    AnchorsDigested,
    Applied,
    Apply,
    DigestAnchors,
    Displace,
    Displaced,
    EncodeAnchor,
    GroupResult,
    GroupTask,
    GroupWork,
    GroupWorked,
    Judge,
    Judged,
    Reduce,
    Reduced,
)
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    JudgePair,
    OuterStepTaken,
    PairCommitted,
    PairEncoded,
    PairJudged,
    TakeOuterStep,
)
from starlings_worker.core.streaming.rules import StreamRules

Kind = TypeVar("Kind", bound=Effect)


def assignment(
    span: tuple[int, int],
    peers: dict[str, tuple[int, int]],
    *,
    stages: int,
    slots: int = 4,
    plan_version: int = 1,
    step: int = 0,
    attempt: int = 0,
    observer: bool = False,
) -> Assignment:
    """A plan with one block per stage; every peer needs 10 ms forward and 20 ms backward per stage."""
    return Assignment(
        plan_version=plan_version,
        stages=tuple(Stage(index, index) for index in range(stages)),
        span=Span(*span),
        version=step,
        donors=(Peer(KEEPER),),
        peers=tuple(
            Peer(
                WorkerId(name),
                (),
                Span(*held),
                1,
                (0.01,) * (held[1] - held[0] + 1),
                (0.02,) * (held[1] - held[0] + 1),
                4,
            )
            for name, held in peers.items()
        ),
        slots=slots,
        recompute=False,
        topology="all",
        gossip_peers=(),
        seed=0,
        step=step,
        attempt=attempt,
        tensor_limit_bytes=1 << 20,
        observer=observer,
    )


def train_key(index: int, *, step: int = 0, attempt: int = 0) -> MicrobatchKey:
    return MicrobatchKey(LeaseKind.TRAIN, step, attempt, index)


def lease(key: MicrobatchKey) -> Lease:
    return Lease(key, (2 * key.index, 2 * key.index + 1), 64.0, 60.0)


def forward_header(
    key: MicrobatchKey, stage: int, *route: tuple[str, int, int], plan_version: int = 1
) -> MicrobatchHeader:
    hops = tuple(Hop(WorkerId(name), first, last) for name, first, last in route)
    return MicrobatchHeader(key, stage, hops, 64.0, plan_version)


class Driver:
    """`effects` are those of the last call; the core is validated after every one."""

    def __init__(self, worker_id: str, seed: int = 0, rules: StreamRules | None = None) -> None:
        self.core = WorkerCore(WorkerId(worker_id), seed, rules=rules)
        self.now_s = 0.0
        self.rng = random.Random(seed)
        self.effects: list[Effect] = []
        # Of every exchange.
        self.passes = 1

    def handle(self, event: Event) -> list[Effect]:
        self.effects = list(self.core.handle(event, self.now_s, self.rng))
        self.core.validate()
        return self.effects

    def hear(self, message: ToWorker) -> list[Effect]:
        return self.handle(ControlReceived(message))

    def tick(self, after_s: float) -> list[Effect]:
        self.now_s += after_s
        return self.handle(Ticked())

    def grant(self, *keys: MicrobatchKey) -> list[Effect]:
        return self.hear(LeaseGrant(tuple(lease(key) for key in keys)))

    def push(self, direction: Direction, header: MicrobatchHeader, sender: str) -> Admission:
        """A peer's push that arrives at once if it is admitted."""
        answer = self.core.admit(direction, header, WorkerId(sender), self.now_s)
        self.core.validate()
        if isinstance(answer, Receipt):
            self.handle(MicrobatchArrived(direction, header, WorkerId(sender)))
        return answer

    def ready(self, plan: Assignment) -> None:
        """Assign and load."""
        self.hear(plan)
        self.compute()

    # ------------------------------------------------------------------ the device

    def compute(self, *, loss_sum: float = 3.0) -> DeviceEffect:
        """Finish what the device does; returns it. The effects of its outcome are in `effects`."""
        running = self.core.device.running
        assert running is not None, "the device is idle"
        self.handle(self.outcome(running, loss_sum))
        return running

    def outcome(self, effect: DeviceEffect, loss_sum: float = 3.0) -> Event:
        match effect:
            case Load():
                return SpanLoaded(effect.assignment.plan_version, effect.assignment.version, {"embed": "d"})
            case ComputeForward():
                return ForwardComputed(effect.key, 0.01, loss_sum, 32, 7)
            case ComputeBackward():
                return BackwardComputed(effect.key, 0.02)
            case ClearGradients():
                return GradientsCleared(effect.step, effect.attempt)
            case OpenExchange():
                return ExchangePrepared(effect.step, effect.attempt, effect.group.group)
            case ReducePart():
                return PartReduced(effect.step, effect.attempt, effect.group, effect.pass_number)
            case Assemble() if effect.pass_number + 1 < self.passes:
                return ExchangePrepared(effect.step, effect.attempt, effect.group, effect.pass_number + 1)
            case Assemble():
                return AggregateAssembled(effect.step, effect.attempt, effect.group, 99, 2.5)
            case ApplyStep():
                return StepApplied(effect.step)
            case ReplayStep():
                return StepReplayed(effect.step, {"stage:0": 99 + effect.step})
            case StepStages():
                return StagesStepped(tuple(step.stage for step in effect.stages), (1.0,) * len(effect.stages))
            case Settle():
                return Settled(effect.version)
            case TakeOuterStep():
                return OuterStepTaken(effect.stage, effect.slot)
            case EncodePair():
                return PairEncoded(effect.key, f"{effect.key.round_id:064x}")
            case JudgePair():
                return PairJudged(effect.key, 0.5)
            case CommitPair():
                return PairCommitted(effect.key, 1.0, 0.5)
            case GroupWork():
                return GroupWorked(effect.task, _group_result(effect.task))
            case AdoptState() | DigestState() | TakeCopy():
                return StateDigested(effect.version, {"embed": f"v{effect.version}"})

    def drain_device(self) -> list[Effect]:
        """Finish everything that the device can do; returns all effects that came of it."""
        seen: list[Effect] = []
        while self.core.device.running is not None:
            self.compute()
            seen += self.effects
        return seen

    # ------------------------------------------------------------------ looking at effects

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def one(self, kind: type[Kind]) -> Kind:
        (found,) = self.of(kind)
        return found

    def said(self) -> list[ToCoordinator]:
        return [effect.message for effect in self.of(SendControl)]


def _group_result(task: GroupTask) -> GroupResult:
    """Of a device on which everything works: digests name what they are of."""
    match task:
        case DigestAnchors():
            return AnchorsDigested(("anchor 0",))
        case Displace(key, seats):
            return Displaced(tuple(f"{key.round_id * 16 + part:064x}" for part in range(len(seats))))
        case Reduce(key, _, _, me):
            return Reduced(f"{key.round_id * 16 + me + 8:064x}", ())
        case Judge():
            return Judged()
        case Apply(key):
            return Applied(f"anchor {key.slot}", 1.0, 0.5)
        case EncodeAnchor(key):
            return AnchorEncoded(f"{key.slot:064x}")
        case AdoptAnchor(key):
            return AnchorAdopted(f"anchor {key.slot}")
