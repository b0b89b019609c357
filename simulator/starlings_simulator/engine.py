"""The shell of one engine's life: executes the real worker core's effects on symbols, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from starlings_protos.messages import (
    ExchangeHeader,
    LeaseGrant,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Prepared,
    Receipt,
    Refusal,
    ToCoordinator,
    ToWorker,
    WorkerId,
)
from starlings_simulator.faults import Moment
from starlings_simulator.fetching import Fetching
from starlings_simulator.history import History
from starlings_simulator.network import Envelope, Network, Outcome, Process, Receiver, explain
from starlings_simulator.symbolic import Activation, Device, Piece, Tensors, fingerprint, require
from starlings_simulator.world import World
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    ComputeBackward,
    ComputeForward,
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
    Stop,
    UpdatePeers,
)
from starlings_worker.core.events import (
    AggregateAssembled,
    ArrivalAborted,
    BackwardComputed,
    ComputeFailed,
    ControlReceived,
    Direction,
    Event,
    ExchangePrepared,
    ExchangeRefused,
    ForwardComputed,
    GradientsCleared,
    Leg,
    MicrobatchArrived,
    MicrobatchNotSent,
    MicrobatchSent,
    PartAborted,
    PartArrived,
    PartNotSent,
    PartReduced,
    PartSent,
    StateDigested,
    StepApplied,
    Ticked,
)

# What a fault may lie in wait for.
MOMENTS: dict[type, Moment] = {
    ComputeForward: Moment.FORWARD,
    ComputeBackward: Moment.BACKWARD,
    OpenExchange: Moment.EXCHANGE,
    ReducePart: Moment.EXCHANGE,
    ApplyStep: Moment.COMMITTED,
    Load: Moment.LOAD,
    ReplayStep: Moment.REPLAY,
}
# (leg, step, attempt, group, pass, part, sender)
PartKey = tuple[Leg, int, int, str, int, int, WorkerId]
# Workers with nothing to do are looked at less often.
TICK_S, IDLE_TICK_S = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How fast and how faithful an engine is. Probabilities are per device effect."""

    worker_id: WorkerId
    seconds_per_block: float
    numeric_class: str = ""
    compute_failure: float = 0.0
    load_failure: float = 0.0
    exchange_failure: float = 0.0
    # Of how many steps it keeps the updates at most.
    updates_most: int = 64
    # In which gradients are summed up.
    passes: int = 1


class Engine:
    """One life:

    a process, a core, a device. `say` puts a message on the control stream; `stopped` is called once, on
    Stop.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        spec: EngineSpec,
        process: Process,
        incarnation: int,
        rng: random.Random,
        say: Callable[[ToCoordinator], None],
        stopped: Callable[[Stop], None],
    ) -> None:
        self.world = world
        self.spec = spec
        self.process = process
        self._network = network
        self._rng = rng
        self._say = say
        self._stopped = stopped
        self.incarnation = incarnation
        self.started_at_s = world.now_s
        self.core = world.make_worker_core(spec.worker_id, rng.getrandbits(32))
        self._dice = random.Random(rng.getrandbits(64))
        self.device: Device | None = None
        self.tensors: dict[MicrobatchKey, Tensors] = {}
        self.parts: dict[PartKey, Piece] = {}
        self.history = History(spec.updates_most)
        self.fetching = Fetching(self, rng)
        # The newest life of each peer that showed itself: older ones are fenced.
        self._lives: dict[WorkerId, int] = {}
        network.receivers[spec.worker_id] = Receiver(process, self.admit, self.arrived, self.aborted)
        self._tick()

    # ------------------------------------------------------------------ events in

    def hear(self, message: ToWorker) -> None:
        """A message of the control stream; a grant's records are stored before the core knows of it."""
        if isinstance(message, LeaseGrant):
            for lease in message.leases:
                if lease.key not in self.tensors:
                    self.tensors[lease.key] = Tensors(samples=lease.samples)
        self.handle(ControlReceived(message))

    def handle(self, event: Event) -> None:
        quiet = isinstance(event, Ticked)
        if not quiet:
            self.world.note(self.spec.worker_id, "<-", event)
        effects = self.core.handle(event, self.world.now_s, self._dice)
        for effect in effects:
            self.world.note(self.spec.worker_id, "->", effect)
            self._execute(effect)
        if self.process.alive and (effects or not quiet):
            self.core.validate()
            self._check_memory()
        self.world.happened()

    def _tick(self) -> None:
        """A few times a second, and soon after `wake_at_s`."""

        def ticked() -> None:
            self.process.deliver(run)

        def run() -> None:
            self.handle(Ticked())
            wake_at_s = self.core.wake_at_s
            wait_s = TICK_S if self.core.loaded else IDLE_TICK_S
            if wake_at_s is not None:
                wait_s = min(wait_s, max(0.002, wake_at_s - self.world.now_s))
            if self.process.alive:
                self.world.clock.after(wait_s, ticked)

        self.world.clock.after(TICK_S, ticked)

    # ------------------------------------------------------------------ pushes in

    def admit(self, envelope: Envelope) -> Admission:
        now_s = self.world.now_s
        fenced = self._fence(envelope)
        if fenced is not None:
            return fenced
        if isinstance(envelope.header, MicrobatchHeader):
            assert envelope.direction is not None
            answer = self.core.admit(envelope.direction, envelope.header, envelope.sender, now_s)
        else:
            assert envelope.leg is not None
            answer = self.core.admit_part(envelope.leg, envelope.header, envelope.sender, now_s)
        if isinstance(answer, Rejection):
            self.world.note(self.spec.worker_id, "->", answer)
        self.core.validate()
        return answer

    def _fence(self, envelope: Envelope) -> Rejection | None:
        """A sender shows an assignment that was signed for one life; when a later one is known, that is over."""
        sender = envelope.sender
        assignment = self.core.assignment
        planned = max(
            (p.incarnation for p in (assignment.peers if assignment else ()) if p.worker_id == sender),
            default=0,
        )
        newest = max(self._lives.get(sender, 0), planned)
        if envelope.incarnation < newest:
            return Rejection(Refusal.ASSIGNMENT, f"{sender} lives its life {newest}")
        self._lives[sender] = envelope.incarnation
        return None

    def arrived(self, envelope: Envelope) -> None:
        header = envelope.header
        if isinstance(header, ExchangeHeader):
            assert envelope.leg is not None
            piece: Piece = envelope.payload  # type: ignore[assignment]
            self.parts.setdefault(part_key(envelope.leg, header, envelope.sender), piece)
            self.handle(PartArrived(envelope.leg, header, envelope.sender))
            return
        assert envelope.direction is not None
        tensors = self.tensors.setdefault(header.key, Tensors())
        if envelope.direction is Direction.FORWARD:
            require(isinstance(envelope.payload, Activation), f"{header.key}: no activation")
            assert isinstance(envelope.payload, Activation)
            if tensors.entry is None:
                tensors.entry = envelope.payload
                tensors.samples = envelope.payload.samples
        else:
            tensors.gradient_in = str(envelope.payload)
        self.handle(MicrobatchArrived(envelope.direction, header, envelope.sender))

    def aborted(self, envelope: Envelope) -> None:
        if isinstance(envelope.header, ExchangeHeader):
            assert envelope.leg is not None
            self.handle(PartAborted(envelope.leg, envelope.header, envelope.sender, "broken"))
        else:
            assert envelope.direction is not None
            self.handle(ArrivalAborted(envelope.direction, envelope.header, envelope.sender, "broken"))

    # ------------------------------------------------------------------ effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case SendControl():
                self._say(effect.message)
                if isinstance(effect.message, Prepared):
                    self.world.reached(Moment.PREPARED, self.spec.worker_id)
            case SendMicrobatch():
                self._send_microbatch(effect)
            case SendPart():
                self._send_part(effect)
            case UpdatePeers():
                self.world.checker.assigned(effect.assignment)
                self.fetching.meet(effect.assignment)
            case ForgetMicrobatch():
                self.tensors.pop(effect.key, None)
            case ForgetPart():
                self.parts.pop(part_key(effect.leg, effect.header, effect.sender), None)
            case KeepHistory():
                self.history.keep(effect.versions, effect.updates_from)
            case Stop():
                self._stopped(effect)
            case _:
                if (
                    isinstance(effect, ComputeForward | ComputeBackward)
                    and effect.key.kind is LeaseKind.TRAIN
                ):
                    plan_version = self.core.assignment.plan_version if self.core.assignment else 0
                    self.world.checker.credit.computes(
                        self.spec.worker_id, self.incarnation, plan_version, effect.key
                    )
                if isinstance(effect, Load):
                    self.fetching.begin(effect.assignment)
                moment = MOMENTS.get(type(effect))
                if moment is not None:
                    self.world.reached(moment, self.spec.worker_id)
                seconds = self._seconds(effect)
                self.world.clock.after(
                    seconds, lambda: self.process.deliver(lambda: self._complete(effect, seconds))
                )

    def _seconds(self, effect: Effect) -> float:
        noise = self._rng.uniform(0.8, 1.3)
        block_s = self.spec.seconds_per_block * noise
        match effect:
            case Load():
                return (0.3 + noise * 0.2) * (
                    self._rng.choice([1, 1, 5, 15]) if effect.assignment.observer else 1
                )
            case ComputeForward():
                return block_s * self._blocks(effect.first_stage, effect.last_stage)
            case ComputeBackward():
                held = self.core.table.held.get(effect.key)
                return 2 * block_s * (self._blocks(held.entry_stage, held.exit_stage) if held else 1)
            case _:
                return block_s / 2

    def _blocks(self, first: int, last: int) -> int:
        assert self.device is not None
        return sum(len(self.device.stages[stage].blocks) for stage in range(first, last + 1))

    def _send_microbatch(self, effect: SendMicrobatch) -> None:
        key = effect.header.key
        tensors = self.tensors.get(key)
        forward = effect.direction is Direction.FORWARD
        payload: object = None if tensors is None else tensors.output if forward else tensors.gradient_out
        require(payload is not None, f"{self.spec.worker_id}: nothing to send for {key}")

        def report(outcome: Outcome) -> None:
            if isinstance(outcome, Receipt):
                self.handle(MicrobatchSent(effect.direction, key, effect.to, outcome))
                return
            certain, refusal, reason = explain(outcome)
            self.handle(MicrobatchNotSent(effect.direction, key, effect.to, certain, refusal, reason))

        envelope = Envelope(
            self.spec.worker_id,
            effect.to,
            effect.header,
            payload,
            direction=effect.direction,
            incarnation=self.incarnation,
        )
        self._network.push(self.process, envelope, report)

    def _send_part(self, effect: SendPart) -> None:
        header = effect.header
        require(self.device is not None, "a part is sent before anything is loaded")
        assert self.device is not None
        vector = self.device.vectors.get(header.group)
        require(vector is not None, f"{self.spec.worker_id}: no vector for {header}")
        assert vector is not None
        require(header.pass_number < len(vector.passes), f"{self.spec.worker_id}: {header} is ahead")
        made = vector.passes[header.pass_number]
        payload = made.own if effect.leg is Leg.CONTRIBUTION else made.aggregates.get(vector.position)
        require(payload is not None, f"{self.spec.worker_id}: nothing reduced for {header}")

        def report(outcome: Outcome) -> None:
            if isinstance(outcome, Receipt):
                self.handle(PartSent(effect.leg, header, effect.to))
                return
            _, refusal, reason = explain(outcome)
            self.handle(PartNotSent(effect.leg, header, effect.to, refusal, reason))

        envelope = Envelope(
            self.spec.worker_id, effect.to, header, payload, leg=effect.leg, incarnation=self.incarnation
        )
        self._network.push(self.process, envelope, report)

    # ------------------------------------------------------------------ the device

    def _complete(self, effect: Effect, seconds: float) -> None:
        """The device effect ends now: its symbols change at once, and the core hears of it."""
        if isinstance(effect, Load):
            self.fetching.load(effect.assignment)
            return
        device = self.device
        require(device is not None, f"{effect} before anything was loaded")
        assert device is not None
        match effect:
            case ComputeForward():
                self._forward(device, effect, seconds)
            case ComputeBackward():
                self._backward(device, effect, seconds)
            case ClearGradients():
                device.clear()
                for key in list(self.parts):
                    if key[1] == effect.step and key[2] < effect.attempt:
                        del self.parts[key]
                self.handle(GradientsCleared(effect.step, effect.attempt))
            case OpenExchange() | ReducePart() | Assemble():
                self._exchange(device, effect)
            case ApplyStep():
                self.world.checker.applied(self.spec.worker_id, device, effect)
                aggregates = device.aggregates()
                device.apply(effect.step, effect.learning_rate, effect.clip_factor)
                self.history.applied(effect.step, aggregates)
                if effect.snapshot:
                    self.history.snapshot(device.version, device.states)
                for key in list(self.parts):
                    if key[1] == effect.step:
                        del self.parts[key]
                self.world.checker.holds(self.spec.worker_id, device)
                self.handle(StepApplied(effect.step))
            case ReplayStep():
                self.fetching.replay(device, effect)
            case AdoptState() | DigestState():
                if isinstance(effect, AdoptState):
                    device.adopt()
                    self.parts.clear()
                require(device.version == effect.version, f"digest of {effect.version} at {device.version}")
                if effect.snapshot:
                    self.history.snapshot(device.version, device.states)
                self.handle(StateDigested(device.version, device.digests(self.world.block_names)))
            case _:
                raise AssertionError(f"{effect} is no device effect")

    def drop_everything(self) -> None:
        self.tensors = {}
        self.parts.clear()
        self.device = None
        self.history = History(self.spec.updates_most)

    def _forward(self, device: Device, effect: ComputeForward, seconds: float) -> None:
        key = effect.key
        require(key in self.tensors, f"{self.spec.worker_id}: {key} was forgotten before its forward")
        if self._rng.random() < self.spec.compute_failure:
            self.handle(ComputeFailed(key, "out of memory"))
            return
        tensors = self.tensors[key]
        device.forward(tensors, key, effect.first_stage, effect.last_stage)
        if effect.last_stage != len(device.stages) - 1:
            self.handle(ForwardComputed(key, seconds))
            return
        count = self.world.count_targets(tensors.samples)
        token = int(fingerprint(tensors.samples, key.index), 16) % 251
        next_token = token if key.kind is LeaseKind.GENERATE else 0
        self.handle(ForwardComputed(key, seconds, 2.0 * count, count, next_token))

    def _backward(self, device: Device, effect: ComputeBackward, seconds: float) -> None:
        key = effect.key
        require(key in self.tensors, f"{self.spec.worker_id}: {key} was forgotten before its backward")
        if self._rng.random() < self.spec.compute_failure:
            self.handle(ComputeFailed(key, "non-finite gradient"))
            return
        # Also what was dropped while it ran is in the accumulators now.
        first, last = self.tensors[key].stages
        device.backward(self.tensors[key], key, first, last)
        credit = self.world.checker.credit
        credit.accumulated(self.spec.worker_id, self.incarnation, key, range(first, last + 1))
        self.handle(BackwardComputed(key, seconds))

    def _exchange(self, device: Device, effect: OpenExchange | ReducePart | Assemble) -> None:
        name = effect.group.group if isinstance(effect, OpenExchange) else effect.group
        if self._rng.random() < self.spec.exchange_failure:
            refused = ExchangeRefused(effect.step, effect.attempt, name, self.spec.worker_id, "not finite")
            self.handle(refused)
            return
        if isinstance(effect, OpenExchange):
            device.open(effect.group, effect.purpose, effect.part)
            self.handle(ExchangePrepared(effect.step, effect.attempt, name))
            return
        number = effect.pass_number
        present = device.arrived(name, number)
        for key, part in self.parts.items():
            if key[1:5] == (effect.step, effect.attempt, name, number):
                if key[0] is Leg.CONTRIBUTION:
                    present.contributions[key[6]] = part
                else:
                    present.aggregates[key[5]] = part
        if isinstance(effect, ReducePart):
            device.reduce(name, number)
            self.handle(PartReduced(effect.step, effect.attempt, name, number))
            return
        piece = device.assemble(name, number)
        if piece is None:
            self.handle(ExchangePrepared(effect.step, effect.attempt, name, number + 1))
            return
        digest = int(fingerprint(piece), 16)
        norm = device.squared_norm(name, effect.step)
        self.handle(AggregateAssembled(effect.step, effect.attempt, name, digest, norm))

    # ------------------------------------------------------------------ bounded memory

    def _check_memory(self) -> None:
        """The shell keeps nothing that the core does not know of."""
        table = self.core.table
        stray = [
            key
            for key in self.tensors
            if key not in table.held and key not in table.leases and key not in table.doomed
        ]
        require(not stray or not self.core.loaded, f"{self.spec.worker_id} keeps {stray} for nobody")
        if self.core.loaded:
            limit = 8 * (len(self.core.peers.states) + 1) * (len(self.world.block_names) + 1)
            require(len(self.parts) <= limit, f"{self.spec.worker_id} keeps {len(self.parts)} parts")


def part_key(leg: Leg, header: ExchangeHeader, sender: WorkerId) -> PartKey:
    return (leg, header.step, header.attempt, header.group, header.pass_number, header.part, sender)
