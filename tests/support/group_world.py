"""Both halves of exchanges in groups on a virtual clock, with the worker's real device: torch, codecs, real bytes.

Replicas train by gradient steps towards targets of their own. What may go wrong is asked for by tests.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from starlings_coordinator.core.grouping.stage import GroupStage
from starlings_coordinator.core.pairing.links import PassiveEstimates
from starlings_coordinator.core.pairing.rounds import PairSettings, Told
from starlings_coordinator.core.pairing.weights import TokenCount
from starlings_job.exchange_rules import ExchangeRules
from starlings_protos.group_messages import (
    GroupHeader,
    GroupHeld,
    GroupLeg,
    GroupMatched,
    GroupPrepared,
)
from starlings_protos.messages import Receipt, Refusal, Span, WorkerId
from starlings_protos.pair_messages import RoundOutcome, RoundReady
from starlings_worker.core.admission import Duplicate, Rejection
from starlings_worker.core.groups.group_rounds import GroupRounds
from starlings_worker.core.groups.stage_groups import Said
from starlings_worker.core.groups.work import (
    Applied,
    Apply,
    Displace,
    ForgetGroup,
    GroupArrived,
    GroupKey,
    GroupNetworkEffect,
    GroupNotSent,
    GroupSent,
    GroupWork,
    GroupWorked,
)
from starlings_worker.group_device import GroupDevice

STEP_S = 1.0
TOKENS_PER_STEP = 100
DELAY_S = 0.02
DEVICE_S = 0.01
TICK_S = 0.1
UNANSWERED_S = 1.0
RATE = 0.05
SHAPES = ((8, 16), (16,), (24, 16))


@dataclass(frozen=True)
class _Slot:
    shape: tuple[int, ...]
    start: int
    stop: int


class Vector:
    """What the device knows of a group's vector."""

    def __init__(self, values: torch.Tensor) -> None:
        self.parameters = values
        self.slots: list[_Slot] = []
        start = 0
        for shape in SHAPES:
            stop = start + torch.Size(shape).numel()
            self.slots.append(_Slot(shape, start, stop))
            start = stop
        assert start == values.numel()
        self.size = start


SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)


@dataclass
class Worker:
    world: GroupWorld
    worker_id: WorkerId
    incarnation: int
    target: torch.Tensor
    start: torch.Tensor
    alive: bool = True
    frozen_until_s: float = 0.0
    outcomes: list[RoundOutcome] = field(default_factory=list)
    steps: int = 0
    # Changes what it sends: a poisoner.
    poison: Callable[[torch.Tensor], None] | None = None
    counters: Counter[str] = field(default_factory=Counter)
    # Seconds in which a round kept it from training.
    held_s: float = 0.0
    # By slot: weights, starting point and momentum at its displacement; the last two after its outer step.
    before: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    after: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # Slots after which it stood at which anchor.
    anchors: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        self.vector = Vector(self.start.clone())
        self.device = GroupDevice(world.rules, {0: self.vector})  # type: ignore[dict-item]
        self._queue: list[GroupWork] = []
        self._busy = False
        overlapped = world.rules.merge_alpha > 0
        self.rounds = GroupRounds(
            self.worker_id, overlapped, self._push, self._emit, self._say, self.counters
        )
        self.rounds.hold(Span(0, 0))
        world.after(world.rng.uniform(0.5, 1.5) * STEP_S, self._step)
        world.after(TICK_S, self._tick)

    # ------------------------------------------------------------------ life

    def do(self, action: Callable[[], None]) -> None:
        """Now, or when it is not frozen any more; never after its death."""
        if not self.alive:
            return
        if self.frozen_until_s > self.world.now_s:
            self.world.at(self.frozen_until_s + 1e-6, lambda: self.do(action))
        else:
            action()

    def _tick(self) -> None:
        if self.alive:
            self.do(lambda: self.rounds.look_at_time(self.world.now_s))
            self.held_s += TICK_S * self.rounds.holds_training
            self.world.after(TICK_S, self._tick)

    def _step(self) -> None:
        if not self.alive:
            return

        def step() -> None:
            if self.rounds.holds_training:
                return
            theta = self.vector.parameters
            theta.sub_(theta - self.target, alpha=RATE)
            self.steps += 1
            self.rounds.inner_stepped(0, TOKENS_PER_STEP, STEP_S, self.world.now_s)

        self.do(step)
        self.world.after(STEP_S, self._step)

    # ------------------------------------------------------------------ device

    def _push(self, work: GroupWork) -> None:
        self._queue.append(work)
        self.world.after(0.0, self._go_on)

    def _go_on(self) -> None:
        if self._busy or not self._queue or not self.alive:
            return
        self._busy = True
        work = self._queue.pop(0)
        self.world.after(DEVICE_S, lambda: self.do(lambda: self._worked(work)))

    def _worked(self, work: GroupWork) -> None:
        if self.poison is not None and isinstance(work.task, Displace):
            # What it sends is not what it has found: the honest displacement is put back behind it.
            honest = self.vector.parameters.clone()
            self.poison(self.vector.parameters)
            done = self.device.execute(work)
            self.vector.parameters.copy_(honest)
        else:
            done = self.device.execute(work)
        self._remember(done)
        self._busy = False
        self.rounds.handle(done, self.world.now_s)
        self._go_on()

    def _remember(self, done: GroupWorked) -> None:
        match done.task:
            case Displace(key):
                self.before[key.slot] = (self.vector.parameters.clone(), self.phi, self.momentum)
            case Apply(key) if isinstance(done.result, Applied):
                self.after[key.slot] = (self.phi, self.momentum)

    # ------------------------------------------------------------------ network

    def _say(self, message: Said) -> None:
        if isinstance(message, RoundOutcome):
            self.outcomes.append(message)
            stage = self.rounds.stages[0]
            if stage.round is not None and stage.round.anchor is not None:
                self.anchors[message.slot] = stage.round.anchor
        self.world.after(self.world.delay_s(), lambda: self.world.heard(self, message))

    def _emit(self, effect: GroupNetworkEffect) -> None:
        world = self.world
        if isinstance(effect, ForgetGroup):
            self.device.forget(effect.key)
            return
        header, to = effect.header, effect.to
        payload = self.device.outgoing(header)
        if not payload:
            world.after(0.0, lambda: self._not_sent(header, to, Refusal.UNSPECIFIED))
            return
        tensors = {part.name: (bytes(part.data), part.codec) for part in payload}
        world.bytes_sent[self.worker_id] += sum(len(data) for data, _ in tensors.values())
        if world.loses(self.worker_id, to, header):
            world.after(UNANSWERED_S, lambda: self._not_sent(header, to, Refusal.UNSPECIFIED))
            return
        delay_s = world.anchor_s if header.leg is GroupLeg.ANCHOR else 0.0
        world.after(delay_s + world.delay_s(), lambda: self._deliver(header, to, tensors))

    def _deliver(self, header: GroupHeader, to: WorkerId, tensors: Mapping[str, tuple[bytes, str]]) -> None:
        world, receiver = self.world, self.world.workers.get(to)
        if receiver is None or receiver.frozen_until_s > world.now_s:
            world.after(UNANSWERED_S, lambda: self._not_sent(header, to, Refusal.UNSPECIFIED))
            return
        answer = receiver.rounds.admit(header, self.worker_id, Receipt(0, 0, 0.0), world.now_s)
        if isinstance(answer, Rejection):
            world.after(world.delay_s(), lambda: self._not_sent(header, to, answer.refusal))
            return
        if not isinstance(answer, Duplicate):
            assert receiver.device.keep(header, self.worker_id, tensors)
            receiver.rounds.handle(GroupArrived(header, self.worker_id), world.now_s)
        world.after(
            world.delay_s(),
            lambda: self.do(lambda: self.rounds.handle(GroupSent(header, to), world.now_s)),
        )

    def _not_sent(self, header: GroupHeader, to: WorkerId, refusal: Refusal) -> None:
        event = GroupNotSent(header, to, refusal)
        self.do(lambda: self.rounds.handle(event, self.world.now_s))

    # ------------------------------------------------------------------ looking

    @property
    def phi(self) -> torch.Tensor:
        states = self.device._states
        return torch.cat([states[key].phi for key in sorted(states)])

    @property
    def momentum(self) -> torch.Tensor:
        states = self.device._states
        return torch.cat([states[key].momentum for key in sorted(states)])


class GroupWorld:
    def __init__(
        self, seed: int, workers: int, rules: ExchangeRules, *, start: torch.Tensor | None = None
    ) -> None:
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.seed, self.rules = seed, rules
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.loss = 0.0
        self.jitter_s = 0.0
        # What an exact starting point takes on the links, beside that.
        self.anchor_s = 0.0
        # (sender, receiver, leg) that are lost; None stands for anybody.
        self.cut: set[tuple[WorkerId | None, WorkerId | None, GroupLeg]] = set()
        self.bytes_sent: Counter[WorkerId] = Counter()
        self.workers: dict[WorkerId, Worker] = {}
        self.matches: dict[int, GroupMatched] = {}
        self.all_lives: list[Worker] = []
        self.start = torch.randn(SIZE, generator=self.torch_rng) if start is None else start
        self.coordinator = self._coordinator()
        for number in range(workers):
            self.join(WorkerId(f"w{number}"))
        self.after(TICK_S, self._tick)

    def _coordinator(self) -> GroupStage:
        settings = PairSettings(self.rules, self.seed, 10**9, SIZE)
        return GroupStage(0, settings, PassiveEstimates(), self, first_slot=1)

    # ------------------------------------------------------------------ the ledger

    def tokens(self, worker_id: WorkerId, stage: int) -> TokenCount:
        steps = sum(life.steps for life in self.all_lives if life.worker_id == worker_id)
        return TokenCount(float(steps * TOKENS_PER_STEP), 1e12, 0.0)

    # ------------------------------------------------------------------ time

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = until_s

    def run_slots(self, slots: int) -> None:
        """Until so many more slots have begun."""
        while not self.coordinator.clock.running:
            self.run(self.now_s + 1.0)
        last = self.coordinator.clock.slot_at(self.now_s) + slots
        while self.coordinator.clock.slot_at(self.now_s) < last:
            self.run(self.now_s + 0.5)

    def delay_s(self) -> float:
        return DELAY_S + self.rng.uniform(0, self.jitter_s)

    def loses(self, sender: WorkerId, to: WorkerId, header: GroupHeader) -> bool:
        cut = any((a, b, header.leg) in self.cut for a in (sender, None) for b in (to, None))
        return cut or self.rng.random() < self.loss

    # ------------------------------------------------------------------ the coordinator's shell

    def _tick(self) -> None:
        self.tell(self.coordinator.look_at_time(0, self.now_s))
        self.after(TICK_S, self._tick)

    def heard(self, worker: Worker, message: Said) -> None:
        if self.workers.get(worker.worker_id) is not worker:
            return
        who = (worker.worker_id, worker.incarnation)
        match message:
            case RoundReady():
                self.tell(self.coordinator.ready(*who, message, 0, self.now_s))
            case RoundOutcome():
                self.coordinator.outcome(*who, message)
            case GroupHeld() | GroupPrepared():
                self.tell(self.coordinator.said(*who, message, self.now_s))

    def tell(self, told: list[Told]) -> None:
        for worker_id, message in told:
            if isinstance(message, GroupMatched):
                self.matches[message.slot] = message
            worker = self.workers.get(worker_id)
            if worker is not None:
                self.after(self.delay_s(), lambda w=worker, m=message: self._told(w, m))

    def _told(self, worker: Worker, message: object) -> None:
        worker.do(lambda: worker.rounds.told(message, self.now_s))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ what happens to workers

    def join(self, worker_id: WorkerId, start: torch.Tensor | None = None) -> Worker:
        incarnation = 1 + sum(life.worker_id == worker_id for life in self.all_lives)
        target = torch.randn(SIZE, generator=self.torch_rng)
        worker = Worker(
            self, worker_id, incarnation, target, (self.start if start is None else start).clone()
        )
        self.workers[worker_id] = worker
        self.all_lives.append(worker)
        self.tell(self.coordinator.joined(worker_id, incarnation, "", self.now_s))
        return worker

    def kill(self, worker_id: WorkerId, *, noticed_after_s: float = 2.0) -> None:
        worker = self.workers[worker_id]
        worker.alive = False

        def noticed() -> None:
            if self.workers.get(worker_id) is worker:
                del self.workers[worker_id]
                self.coordinator.left(worker_id)

        self.after(noticed_after_s, noticed)

    def freeze(self, worker_id: WorkerId, for_s: float) -> None:
        self.workers[worker_id].frozen_until_s = self.now_s + for_s

    def restart_coordinator(self) -> None:
        self.coordinator = self._coordinator()
        self.coordinator._first_slot = 1000
        for worker in list(self.workers.values()):
            self.tell(self.coordinator.joined(worker.worker_id, worker.incarnation, "", self.now_s))
            worker.do(lambda w=worker: w.rounds.reconnected(self.now_s))

    # ------------------------------------------------------------------ promises

    def check(self) -> None:
        """Whoever applied the same round stands at the same point, bit for bit; and each slot has one outcome."""
        by_round: dict[int, dict[WorkerId, str]] = {}
        for life in self.all_lives:
            slots = [o.slot for o in life.outcomes]
            assert len(slots) == len(set(slots)), f"{life.worker_id} spoke twice of a slot"
            for outcome in life.outcomes:
                if outcome.result.name == "COMMITTED" and outcome.slot in life.anchors:
                    by_round.setdefault(outcome.round_id, {})[life.worker_id] = life.anchors[outcome.slot]
        for round_id, anchors in by_round.items():
            assert len(set(anchors.values())) == 1, f"round {round_id} parted its members: {anchors}"

    def key_of(self, worker_id: WorkerId) -> GroupKey | None:
        found = self.workers[worker_id].rounds.stages[0].round
        return found.key if found is not None else None
