"""An `async` job in trouble, whole in one process: the real core of the coordinator, and workers whose weights are the
multisets of samples that they added. So what the ledger says can be compared with what is true.

A microbatch in flight has a route; its hops add it from the last to the first, which then reports it. Whoever is lost
takes its weights along; who was the next hop of others makes them send again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from starlings_coordinator.core.effects import Effect, SaveCheckpoint
from starlings_coordinator.core.events import (
    EvictionRequested,
    PauseRequested,
    ResumeRequested,
    WorkerDisconnected,
)
from starlings_protos.messages import (
    Assignment,
    EngineDown,
    Hop,
    Lease,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    StateWanted,
    Welcome,
    WorkerId,
)
from support.core_world import Fake, World
from support.streaming_world import streaming, trained

SLOTS = 4
Weights = dict[int, "Counter[int]"]


@dataclass
class Flight:
    lead: WorkerId
    lease: Lease
    route: tuple[Hop, ...]
    # So many hops, from the first on, have not added it yet.
    left: int

    def passes(self, worker_id: WorkerId) -> bool:
        return any(hop.worker_id == worker_id for hop in self.route)


@dataclass
class Replica:
    """Of one life. `own`: what it added itself, without what it copied."""

    weights: Weights
    own: Weights
    cut_off: bool = False
    dead: bool = False
    # Repeated on a new stream; far longer than a second of it.
    said: deque[MicrobatchDone] = field(default_factory=lambda: deque(maxlen=64))


def copy_of(weights: Weights) -> Weights:
    return {stage: Counter(samples) for stage, samples in weights.items()}


class Chaos(World):
    def __init__(self, seed: int, steps: int = 24) -> None:
        self.rng = random.Random(f"streaming:{seed}")
        rng, names = self.rng, [f"w{index}" for index in range(self.rng.randint(3, 6))]
        layouts = [
            [(0, 2)],
            [(0, 0), (1, 1), (2, 2)],
            [(0, 1), (2, 2)],
            [(0, 2), (0, 0), (1, 2)],
            [(0, 0), (1, 2)],
        ]
        layout = rng.choice(layouts)
        spans = {name: layout[index % len(layout)] for index, name in enumerate(names)}
        every = rng.choice([0, 1, 3])
        super().__init__(streaming(steps, checkpoint={"every": every}), spans)
        self.replicas: dict[WorkerId, Replica] = {}
        self.flights: list[Flight] = []
        self.copies: dict[tuple[WorkerId, int], Weights] = {}
        self.saved: dict[int, Weights] = {0: {stage: Counter() for stage in range(3)}}
        self.loaded_base: dict[WorkerId, int] = {}
        self.delayed: list[tuple[float, WorkerId, int, MicrobatchDone]] = []
        self.faults: Counter[str] = Counter()
        self.commands = 0
        self.boot()
        for name in names:
            self.enter(name)

    # ---------------------------------------------------------------- the world's side

    def enter(self, name: str) -> None:
        self.drop(WorkerId(name))
        self.loaded_base.pop(WorkerId(name), None)
        self.join(name, lazy=True)

    def restart(self, after_s: float = 5.0, versions: tuple[int, ...] = (0,)) -> None:
        super().restart(after_s, tuple(sorted(self.saved)))

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SaveCheckpoint):
            names = self.config.profile.block_names
            weights: Weights = {}
            for number, stage in enumerate(self.stages):
                sources = {
                    peers[0].worker_id
                    for block, peers, _ in effect.donors
                    if block in {names[b] for b in stage.blocks}
                }
                assert len(sources) == 1, f"stage {number} is saved from {sources}"
                known = self.copies.get((min(sources), effect.version))
                weights[number] = Counter(known[number]) if known is not None else Counter()
            self.saved[effect.version] = weights
        super()._carry_out(effect)

    def _react(self, fake: Fake, message: Any) -> None:
        match message:
            case Welcome() if message.incarnation != fake.incarnation:
                self.drop(fake.worker_id)
                self.loaded_base.pop(fake.worker_id, None)
                fake.leases = []
            case Assignment() if message.observer and not fake.observing:
                assert all(peer.worker_id in self.core.state.spans for peer in message.donors)
                weights: Weights = {}
                for stage in message.span.stages:
                    donors = [p.worker_id for p in message.donors if p.span is not None and stage in p.span]
                    # Whoever is asked first for a block: the donors of a stage must have one state.
                    states = [self.copies[d, message.version][stage] for d in donors]
                    mixed = any(s != states[0] for s in states[1:])
                    assert not mixed, f"stage {stage} is mixed of {donors}"
                    weights[stage] = Counter(states[0])
                self.replicas[fake.worker_id] = Replica(weights, {s: Counter() for s in weights})
                self.loaded_base[fake.worker_id] = message.base_plan_version
            case Assignment() if not message.observer and not fake.observing:
                if self.loaded_base.get(fake.worker_id, -1) < message.base_plan_version:
                    self.drop(fake.worker_id)
                    self.loaded_base[fake.worker_id] = message.base_plan_version
                    saved = {s: Counter(self.saved[message.version][s]) for s in message.span.stages}
                    self.replicas[fake.worker_id] = Replica(saved, {s: Counter() for s in saved})
                    fake.leases = []
            case StateWanted() if fake.worker_id in self.replicas:
                self.copies[fake.worker_id, message.version] = copy_of(self.replicas[fake.worker_id].weights)
            case _:
                pass
        super()._react(fake, message)

    def drop(self, worker_id: WorkerId) -> None:
        """Its weights are gone, and what it led; what passed through it goes another way."""
        self.replicas.pop(worker_id, None)
        self.flights = [flight for flight in self.flights if flight.lead != worker_id]
        for flight in list(self.flights):
            place = next((i for i, hop in enumerate(flight.route) if hop.worker_id == worker_id), -1)
            if place < 0 or flight.left <= place:
                continue  # It has done its part.
            self.flights.remove(flight)
            rest = self.way(flight.route[:place], flight.route[place].first_stage)
            if rest:
                self.flights.append(Flight(flight.lead, flight.lease, rest, len(rest)))
            elif flight.lead in self.fakes:
                self.fakes[flight.lead].leases.insert(0, flight.lease)

    # ---------------------------------------------------------------- the workers' side

    def way(self, hops: tuple[Hop, ...], stage: int) -> tuple[Hop, ...]:
        """A random way on through the stages; () when there is none."""
        spans = self.core.state.spans
        while stage < len(self.stages):
            seen = {hop.worker_id for hop in hops}
            free = [
                w
                for w, span in sorted(spans.items())
                if stage in span and w not in seen and w in self.replicas and not self.replicas[w].dead
                if sum(flight.passes(w) for flight in self.flights) < SLOTS
            ]
            if not free:
                return ()
            chosen = self.rng.choice(free)
            hops = (*hops, Hop(chosen, stage, spans[chosen].last_stage))
            stage = spans[chosen].last_stage + 1
        return hops

    def work(self) -> None:
        """Half a second of everybody's: a microbatch more under way, and each of those a hop or more on."""
        for worker_id, replica in sorted(self.replicas.items()):
            fake = self.fakes.get(worker_id)
            if fake is None or not fake.leases or replica.dead or worker_id not in self.core.state.spans:
                continue
            if sum(flight.passes(worker_id) for flight in self.flights) >= SLOTS:
                continue
            span = self.core.state.spans[worker_id]
            route = self.way((Hop(worker_id, 0, span.last_stage),), span.last_stage + 1)
            if route:
                lease = fake.leases.pop(0)
                self.flights.append(Flight(worker_id, lease, route, len(route)))
        finished: set[WorkerId] = set()
        for flight in list(self.flights):
            for _ in range(self.rng.choice([0, 1, 2, 3])):
                if flight.left and not (flight.left == 1 and flight.lead in finished):
                    self.add(flight, finished)

    def add(self, flight: Flight, finished: set[WorkerId]) -> None:
        hop = flight.route[flight.left - 1]
        replica = self.replicas.get(hop.worker_id)
        if replica is None or replica.dead:
            return
        flight.left -= 1
        for stage in range(hop.first_stage, hop.last_stage + 1):
            replica.weights[stage].update(flight.lease.samples)
            replica.own[stage].update(flight.lease.samples)
        if flight.left:
            return
        # One a look, so that nobody is ever faster than usual.
        finished.add(flight.lead)
        self.flights.remove(flight)
        count = 64 * len(flight.lease.samples)
        done = MicrobatchDone(flight.lease.key, flight.route, float(count), count)
        fake = self.fakes[flight.lead]
        replica.said.append(done)
        if replica.cut_off:
            return
        for _ in range(1 + (self.rng.random() < 0.1)):
            delay_s = self.rng.uniform(0.5, 4.0) if self.rng.random() < 0.2 else 0.0
            self.delayed.append((self.now_s + delay_s, flight.lead, fake.session, done))

    def _work(self, fake: Fake, lease: Lease) -> None:
        if lease.key.kind is not LeaseKind.TRAIN:
            super()._work(fake, lease)

    def look(self) -> None:
        """Half a second."""
        self.work()
        due = [entry for entry in self.delayed if entry[0] <= self.now_s]
        self.delayed = [entry for entry in self.delayed if entry[0] > self.now_s]
        for _, worker_id, session, done in due:
            fake = self.fakes.get(worker_id)
            if fake is not None and fake.session == session:
                self.say(fake, done)
        for fake in self.fakes.values():
            if fake.worker_id in self.core.members and not fake.mute and len(fake.leases) < 12:
                self.say(fake, LeaseRequest(self.rng.choice([1, 4, 16])))
        self.settle()
        self.tick(0.5)
        for worker_id, replica in list(self.replicas.items()):
            if worker_id not in self.core.members and (replica.cut_off or replica.dead):
                self.drop(worker_id)
        self.check()

    # ---------------------------------------------------------------- trouble

    def hurt(self) -> None:
        rng = self.rng
        living = [
            w
            for w, r in sorted(self.replicas.items())
            if not r.cut_off and not r.dead and w in self.core.members
        ]
        kind = rng.choice(["crash", "engine", "cut", "restart", "back"])
        if kind == "restart":
            self.delayed.clear()
            self.restart(rng.choice([0.5, 3.0]))
            for worker_id in living:
                if rng.random() < 0.8:
                    self.again(worker_id)
                else:
                    self.replicas[worker_id].cut_off = self.fakes[worker_id].mute = True
        elif kind == "back":
            for worker_id, replica in list(self.replicas.items()):
                if replica.cut_off and not replica.dead:
                    self.again(worker_id)
        elif not living:
            return
        else:
            victim = rng.choice(living)
            fake, replica = self.fakes[victim], self.replicas[victim]
            if kind == "engine":
                self.end_engine(fake)
            else:
                fake.mute = replica.cut_off = True
                replica.dead = kind == "crash"
                self.feed(WorkerDisconnected(fake.session, victim))
                self.settle()
        self.faults[kind] += 1

    def command(self) -> None:
        """The owner pauses, goes on, sends somebody away for a moment."""
        self.commands += 1
        kind = self.rng.choice(["pause", "resume", "resume", "evict"])
        if kind == "pause":
            self.feed(PauseRequested(self.commands, "simulated"))
        elif kind == "resume":
            self.feed(ResumeRequested(self.commands))
        else:
            victim = self.rng.choice(sorted(self.spans))
            self.feed(EvictionRequested(self.commands, victim, "simulated", self.rng.choice([2.0, 6.0])))
            if not self.answers[-1].refused:
                self.drop(victim)
                self.fakes[victim].mute = False
        self.settle()
        self.faults[f"owner: {kind}"] += 1

    def end_engine(self, fake: Fake) -> None:
        self.drop(fake.worker_id)
        self.say(fake, EngineDown("simulated", restarting=True))
        self.settle()

    def again(self, worker_id: WorkerId) -> None:
        """The same process on a new stream: it repeats what it said; or it learns that it is a new life."""
        fake, replica = self.fakes[worker_id], self.replicas.get(worker_id)
        fake.mute = False
        self.reconnect(worker_id)
        if replica is not None and self.replicas.get(worker_id) is replica:
            replica.cut_off = False
            for done in replica.said:
                self.say(fake, done)
            self.settle()

    def heal(self) -> None:
        for worker_id in sorted(self.spans):
            if worker_id in self.core.state.evicted:
                continue
            replica = self.replicas.get(worker_id)
            if replica is not None and replica.dead:
                self.enter(worker_id)
            elif replica is not None and replica.cut_off:
                self.again(worker_id)
            elif worker_id not in self.core.members:
                self.enter(worker_id)

    # ---------------------------------------------------------------- what must hold

    def check(self) -> None:
        core = self.core
        state, acknowledged = core.state, trained(self)
        assert len(set(acknowledged)) == len(acknowledged), "a sample is acknowledged twice in one epoch"
        assert len(acknowledged) == state.leased.samples_acknowledged
        if core.phase.value != "training":
            assert core.phase.value in ("finishing", "done") or core.waiting_words()
            return
        samples = Counter(
            sample for epoch, position in acknowledged for sample in self.sample_at(epoch, position)
        )
        for stage in range(len(self.stages)):
            holders = [w for w, span in state.spans.items() if stage in span and w in self.replicas]
            added = sum((self.replicas[w].own[stage] for w in holders), Counter[int]())
            twice = sum(count - 1 for count in added.values() if count > 1)
            assert twice <= state.samples_repeated, (
                f"stage {stage} added {twice} samples twice, {state.samples_repeated} are counted"
            )
            known = set().union(*(self.replicas[w].weights[stage] for w in holders))
            gone = sum(count for sample, count in samples.items() if sample not in known)
            assert gone <= state.samples_unmerged, (
                f"{gone} samples are in no replica of stage {stage}, {state.samples_unmerged} are counted"
            )

    def sample_at(self, epoch: int, position: int) -> tuple[int, ...]:
        return self.core.schedule.leasing._shards.samples_at(epoch, position, position + 1)  # type: ignore[attr-defined]


def play(seed: int, *, commands: bool = False) -> Chaos:
    """Trouble, then calm, until the job ends. `commands`: the owner's as well."""
    world = Chaos(seed)
    rng = world.rng
    for _ in range(12):
        if world.core.phase.value == "training":
            break
        world.look()
    troubles = sorted(rng.uniform(0, 30) for _ in range(rng.randint(1, 8)))
    began_s = world.now_s
    while troubles and world.ended is None and world.core.phase.value != "finishing":
        if world.now_s - began_s >= troubles[0]:
            troubles.pop(0)
            world.hurt()
        if commands and rng.random() < 0.15:
            world.command()
        world.look()
    if commands:
        world.feed(ResumeRequested(0))
        world.settle()
    world.heal()
    for _ in range(600):
        if world.ended is not None:
            break
        world.look()
        if world.core.phase.value == "gathering":
            world.heal()
    assert world.ended is not None, f"hangs: {world.core.phase} {world.core.waiting_words()}"
    assert world.ended.exit_code == 0, world.ended.reason
    assert not world.core.state.leased.blocks
    return world
