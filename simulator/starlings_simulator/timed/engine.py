"""The shell of one engine's life in a timed simulation: the real worker core, whose effects take modelled time."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from functools import partial

from starlings_protos.messages import (
    KEEPER,
    Assignment,
    ExchangeGroup,
    ExchangePurpose,
    LeaseKind,
    Receipt,
    Stage,
    ToCoordinator,
    ToWorker,
)
from starlings_simulator.network import NOT_CONNECTED, Outcome, explain
from starlings_simulator.timed import figures
from starlings_simulator.timed.links import Transfer
from starlings_simulator.timed.machines import Machine
from starlings_simulator.timed.pushes import Ends, Push
from starlings_simulator.timed.world import World
from starlings_worker.core.admission import Admission, Rejection
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
    ForgetMicrobatch,
    ForgetPart,
    KeepHistory,
    Load,
    OpenExchange,
    ReducePart,
    ReplayStep,
    SendControl,
    SendMicrobatch,
    SendPart,
    Settle,
    StepStages,
    Stop,
    TakeCopy,
    UpdatePeers,
)
from starlings_worker.core.events import (
    AggregateAssembled,
    ArrivalAborted,
    BackwardComputed,
    ControlReceived,
    Direction,
    Event,
    ExchangePrepared,
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
    Settled,
    SpanLoaded,
    StagesStepped,
    StateDigested,
    StepApplied,
    StepReplayed,
    Ticked,
)
from starlings_worker.core.groups.work import ForgetGroup, GroupWork, SendGroup
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    OuterStepTaken,
    PairAborted,
    PairArrived,
    PairCommitted,
    PairEncoded,
    PairJudged,
    PairKey,
    PairMoved,
    PairNotSent,
    PairSent,
    SendPair,
    SendWord,
    TakeOuterStep,
    WordNotSent,
    WordSent,
    WordTold,
)
from starlings_worker.core.streaming.rules import StreamRules

TICK_S = 1.0
# Of a piece of work for which there is no account, such as zeroing accumulators.
BRIEF_S = 0.002
# Of what one microbatch took, to what the next one takes.
NOISE = 0.03
_LOSS = 2.0


class Engine:
    """`say` puts a message on the control stream, `stopped` is called once, on Stop."""

    def __init__(
        self,
        world: World,
        machine: Machine,
        rng: random.Random,
        slowness: Callable[[], float],
        say: Callable[[ToCoordinator], None],
        stopped: Callable[[Stop], None],
    ) -> None:
        self.world = world
        self.machine = machine
        self.alive = True
        self.pushes: set[Push] = set()
        self.incoming: set[Push] = set()
        self._rng = rng
        self._slowness = slowness
        self._say = say
        self._stopped = stopped
        job = world.costs.job
        rules = StreamRules.of(job) if job.train.streams else None
        self.core = WorkerCore(machine.worker_id, rng.getrandbits(32), rules=rules)
        self._stages: tuple[Stage, ...] = ()
        self._recompute = False
        # Of exchanges that are open: the group, and how many values its vector has.
        self._vectors: dict[str, tuple[ExchangeGroup, float]] = {}
        self._loading: list[Transfer] = []
        # By stage, whether its last outer step was one of the warm-up.
        self._warms_up: dict[int, bool] = {}
        self._pair_pushes: dict[PairKey, list[Push]] = {}
        self._idle_cause = figures.NO_PLACE
        world.engines[machine.worker_id] = self
        world.books.begin(machine.worker_id, figures.NO_PLACE)
        self._tick()

    # ------------------------------------------------------------------ events in

    def hear(self, message: ToWorker) -> None:
        self.handle(ControlReceived(message))

    def handle(self, event: Event) -> None:
        if not self.alive:
            return
        for effect in self.core.handle(event, self.world.clock.now_s, self._rng):
            self._execute(effect)
        if self.alive and self.core.device.running is None:
            self._idle()

    def receipt(self) -> Receipt:
        return self.core.flow.receipt()

    def _tick(self) -> None:
        def run() -> None:
            if not self.alive:
                return
            self.handle(Ticked())
            wait_s = TICK_S
            if self.core.wake_at_s is not None:
                wait_s = min(wait_s, max(0.002, self.core.wake_at_s - self.world.clock.now_s + 0.001))
            self.world.clock.after(wait_s, run)

        self.world.clock.after(self._rng.uniform(0.0, TICK_S), run)

    def _idle(self) -> None:
        """The device has nothing to do: say why."""
        core, cause = self.core, figures.NO_LEASE
        if not core.loaded:
            cause = figures.NO_PLACE
        elif core.training.round is not None:
            cause = figures.BARRIER
        elif core.table.held:
            cause = figures.PIPELINE
        self.world.books.begin(self.machine.worker_id, cause)

    # ------------------------------------------------------------------ its end

    def die(self, *, silently: bool) -> None:
        self.alive = False
        if self.world.engines.get(self.machine.worker_id) is self:
            del self.world.engines[self.machine.worker_id]
        for transfer in self._loading:
            self.world.links.cancel(transfer)
        for push in list(self.pushes):
            push.sender_died(silently=silently)
        for push in list(self.incoming):
            push.receiver_died(silently=silently)

    # ------------------------------------------------------------------ effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case SendControl():
                self._say(effect.message)
            case SendMicrobatch():
                self._send_microbatch(effect)
            case SendPart():
                self._send_part(effect)
            case SendPair():
                self._send_pair(effect)
            case SendWord():
                self._send_word(effect)
            case ForgetPair():
                for push in self._pair_pushes.pop(effect.key, []):
                    push.break_off()
            case UpdatePeers():
                self._place(effect.assignment)
            case ForgetMicrobatch() | ForgetPart() | KeepHistory():
                pass
            case Stop():
                self._stopped(effect)
            case SendGroup() | ForgetGroup() | GroupWork():
                raise NotImplementedError("diloco and sparseloco are not simulated in time yet")
            case Load():
                self.world.books.begin(self.machine.worker_id, figures.STATE)
                self._load(effect.assignment)
            case _:
                self._work(effect)

    def _place(self, assignment: Assignment) -> None:
        self._stages = assignment.stages
        self._recompute = assignment.recompute

    def _load(self, assignment: Assignment) -> None:
        """From all donors at once, an equal part each."""
        world = self.world
        self._place(assignment)
        span = assignment.stages[assignment.span.first_stage : assignment.span.last_stage + 1]
        donors = [
            d.worker_id for d in assignment.donors if d.worker_id == KEEPER or d.worker_id in world.engines
        ]
        if not donors:
            failed = LoadFailed(assignment.plan_version, "no donor is left")
            world.clock.after(BRIEF_S, lambda: self.handle(failed))
            return
        size = world.costs.state_bytes(span, fresh=assignment.version == 0) / len(donors)
        self._loading = []

        def arrived() -> None:
            if not self.alive or not all(transfer.over for transfer in self._loading):
                return
            names = world.costs.profile.block_names[span[0].first_block : span[-1].last_block + 1]
            digests = dict.fromkeys(names, f"v{assignment.version}")
            self.handle(SpanLoaded(assignment.plan_version, assignment.version, digests))

        self._loading = [
            world.links.start(world.site_of(donor), self.machine.site, size, "state", arrived)
            for donor in donors
        ]

    # ------------------------------------------------------------------ the device

    def _work(self, effect: DeviceEffect) -> None:
        cause, seconds = self._account(effect)
        seconds *= self._slowness() * self._rng.uniform(1 - NOISE, 1 + NOISE)
        self.world.books.begin(self.machine.worker_id, cause)
        self.world.clock.after(seconds, lambda: self.handle(self._outcome(effect, seconds)))

    def _account(self, effect: DeviceEffect) -> tuple[str, float]:
        """What it counts as, and its seconds."""
        costs, machine = self.world.costs, self.machine
        match effect:
            case ComputeForward():
                run = self._stages[effect.first_stage : effect.last_stage + 1]
                return figures.COMPUTE, costs.forward_s(machine, run)
            case ComputeBackward():
                return figures.COMPUTE, self._backward_s(effect)
            case StepStages():
                return figures.OPTIMIZER, costs.step_s(
                    machine, [self._stages[s.stage] for s in effect.stages]
                )
            case ApplyStep() | ReplayStep():
                return figures.OPTIMIZER, costs.step_s(machine, self._span())
            case OpenExchange():
                elements = self._elements(effect.group.group, effect.purpose)
                self._vectors[effect.group.group] = (effect.group, elements)
                return figures.EXCHANGE, costs.pass_s(machine, "encode", elements)
            case ReducePart() | Assemble():
                _, elements = self._vectors[effect.group]
                what = "reduce" if isinstance(effect, ReducePart) else "assemble"
                return figures.EXCHANGE, costs.pass_s(machine, what, elements)
            case TakeOuterStep():
                self._warms_up[effect.stage] = effect.warmup
                return figures.EXCHANGE, costs.pass_s(machine, "outer", self._fragment(effect.stage))
            case EncodePair():
                return figures.EXCHANGE, costs.pass_s(machine, "encode", self._fragment(effect.key.stage))
            case JudgePair():
                return figures.EXCHANGE, costs.pass_s(machine, "judge", self._fragment(effect.key.stage))
            case CommitPair():
                return figures.EXCHANGE, costs.pass_s(machine, "commit", self._fragment(effect.key.stage))
            case TakeCopy() | DigestState() | AdoptState():
                return figures.STATE, costs.step_s(machine, self._span())
            case _:
                return figures.OPTIMIZER, BRIEF_S

    def _backward_s(self, effect: ComputeBackward) -> float:
        held = self.core.table.held.get(effect.key)
        if held is None:
            # Dropped while it waited for the device's outcome.
            return BRIEF_S
        run = self._stages[held.entry_stage : held.exit_stage + 1]
        ends = held.exit_stage + 1 == len(self._stages)
        streams = self.core.stream is not None
        return self.world.costs.backward_s(self.machine, run, again=self._recompute or (streams and not ends))

    def _span(self) -> tuple[Stage, ...]:
        assignment = self.core.assignment
        if assignment is None:
            return ()
        return assignment.stages[assignment.span.first_stage : assignment.span.last_stage + 1]

    def _fragment(self, stage: int) -> float:
        return self.world.costs.trained(self._stages[stage]) / self.world.costs.fragments

    def _elements(self, group: str, purpose: ExchangePurpose) -> float:
        costs = self.world.costs
        if not group.startswith("stage:"):
            return costs.profile.tied_count
        stage = self._stages[int(group.removeprefix("stage:"))]
        if purpose is ExchangePurpose.STATE:
            return costs.state_bytes([stage], fresh=False) / 4
        return costs.trained(stage)

    def _outcome(self, effect: DeviceEffect, seconds: float) -> Event:
        match effect:
            case ComputeForward(key, _, last, _):
                if last + 1 < len(self._stages):
                    return ForwardComputed(key, seconds)
                count = self._targets() if key.kind is not LeaseKind.GENERATE else 1
                return ForwardComputed(key, seconds, _LOSS * count, count, 1)
            case ComputeBackward(key):
                return BackwardComputed(key, seconds)
            case GroupWork():
                raise AssertionError("refused when it was asked for")
            case ClearGradients():
                return GradientsCleared(effect.step, effect.attempt)
            case OpenExchange():
                return ExchangePrepared(effect.step, effect.attempt, effect.group.group)
            case ReducePart():
                return PartReduced(effect.step, effect.attempt, effect.group, effect.pass_number)
            case Assemble():
                digest = _digest(effect.step, effect.group)
                return AggregateAssembled(effect.step, effect.attempt, effect.group, digest, 1.0)
            case ApplyStep():
                return StepApplied(effect.step)
            case StepStages():
                return StagesStepped(tuple(step.stage for step in effect.stages), (1.0,) * len(effect.stages))
            case Settle():
                return Settled(effect.version)
            case ReplayStep():
                return StepReplayed(effect.step, self._replayed(effect.step))
            case TakeCopy() | DigestState() | AdoptState():
                names = [
                    self.world.costs.profile.block_names[b] for stage in self._span() for b in stage.blocks
                ]
                return StateDigested(effect.version, dict.fromkeys(names, f"v{effect.version}"))
            case TakeOuterStep():
                return OuterStepTaken(effect.stage, effect.slot)
            case EncodePair():
                return PairEncoded(effect.key, f"{effect.key.round_id:064x}")
            case JudgePair():
                return PairJudged(effect.key, 1.0)
            case CommitPair():
                return PairCommitted(effect.key, 1.0, 1.0)
            case Load():
                raise AssertionError("a load has an outcome of its own")

    def _targets(self) -> int:
        return self.world.costs.job.train.microbatch * self.world.costs.profile.sequence_length

    def _replayed(self, step: int) -> dict[str, int]:
        assignment = self.core.assignment
        assert assignment is not None
        groups = [f"stage:{stage}" for stage in assignment.span.stages]
        last = len(assignment.stages) - 1
        if self.world.costs.profile.tied_count and {0, last} & set(assignment.span.stages):
            groups.append("tied")
        return {group: _digest(step, group) for group in groups}

    # ------------------------------------------------------------------ pushes

    def _send_microbatch(self, effect: SendMicrobatch) -> None:
        header, me = effect.header, self.machine.worker_id
        forward = effect.direction is Direction.FORWARD
        boundary = self._stages[header.stage - 1] if forward else self._stages[max(0, header.stage)]

        def report(outcome: Outcome) -> None:
            if isinstance(outcome, Receipt):
                self.handle(MicrobatchSent(effect.direction, header.key, effect.to, outcome))
                return
            self.handle(MicrobatchNotSent(effect.direction, header.key, effect.to, *explain(outcome)))

        ends = Ends(
            lambda to: to.core.admit(effect.direction, header, me, self.world.clock.now_s),
            lambda to: to.handle(MicrobatchArrived(effect.direction, header, me)),
            lambda to: to.handle(ArrivalAborted(effect.direction, header, me, "broken")),
            report,
        )
        size = self.world.costs.boundary_bytes(boundary, backward=not forward)
        Push(self.world, self, effect.to, size, effect.direction.value, ends, urgent=True)

    def _send_part(self, effect: SendPart) -> None:
        header, me = effect.header, self.machine.worker_id
        group, elements = self._vectors[header.group]

        def report(outcome: Outcome) -> None:
            if isinstance(outcome, Receipt):
                self.handle(PartSent(effect.leg, header, effect.to))
                return
            _, refusal, reason = explain(outcome)
            self.handle(PartNotSent(effect.leg, header, effect.to, refusal, reason))

        ends = Ends(
            lambda to: to.core.admit_part(effect.leg, header, me, self.world.clock.now_s),
            lambda to: to.handle(PartArrived(effect.leg, header, me)),
            lambda to: to.handle(PartAborted(effect.leg, header, me, "broken")),
            report,
        )
        member = group.members[header.part]
        size = self.world.costs.part_bytes(
            round(elements), member.share, len(group.members), aggregate=effect.leg is Leg.AGGREGATE
        )
        Push(self.world, self, effect.to, size, "exchange", ends, urgent=True)

    def _send_pair(self, effect: SendPair) -> None:
        key, me = effect.key, self.machine.worker_id
        header = key.header(effect.sha256)

        def report(outcome: Outcome) -> None:
            if isinstance(outcome, Receipt):
                self.handle(PairSent(key))
            else:
                self.handle(PairNotSent(key, *explain(outcome)[1:]))

        def admit(to: Engine) -> Admission:
            return to.core.meeting.admit(header, me, self.world.clock.now_s)

        ends = Ends(
            admit,
            lambda to: to.handle(PairArrived(header, me)),
            lambda to: to.handle(PairAborted(header, me, "broken")),
            report,
            lambda end: end.handle(PairMoved(key)),
        )
        size = self.world.costs.swap_bytes(
            self._stages[key.stage], warmup=self._warms_up.get(key.stage, False)
        )
        push = Push(self.world, self, effect.to, size, "exchange", ends, urgent=False)
        self._pair_pushes.setdefault(key, []).append(push)

    def _send_word(self, effect: SendWord) -> None:
        word, me, world = effect.word, self.machine.worker_id, self.world
        one_way_s = world.swarm.one_way_s(self.machine.site, world.site_of(effect.to))

        def told() -> None:
            to = world.engines.get(effect.to)
            if to is None:
                world.clock.after(one_way_s, partial(answer, NOT_CONNECTED))
                return
            rejection = to.core.meeting.judge_word(word, me, world.clock.now_s)
            world.clock.after(one_way_s, partial(answer, rejection))
            if rejection is None:
                to.handle(WordTold(word, me))

        def answer(outcome: Rejection | str | None) -> None:
            self.handle(WordSent(word) if outcome is None else WordNotSent(word, *explain(outcome)[1:]))

        world.clock.after(one_way_s, told)


def _digest(step: int, group: str) -> int:
    """What all replicas have of a step's aggregate."""
    return zlib.crc32(f"{step}:{group}".encode())
