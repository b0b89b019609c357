"""A worker's machine in a timed simulation: its control stream, heartbeats and engine, as long as it is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from starlings_protos.messages import (
    Finish,
    Heartbeat,
    HeartbeatAck,
    Hello,
    LeaseGrant,
    ProbeReport,
    Refused,
    ToCoordinator,
    ToWorker,
    Welcome,
)
from starlings_protos.stream_messages import JobPaused
from starlings_simulator.timed import figures
from starlings_simulator.timed.engine import Engine
from starlings_simulator.timed.machines import Machine
from starlings_simulator.timed.world import World
from starlings_worker.core.effects import Stop
from starlings_worker.core.events import ControlRestored, DrainRequested
from starlings_worker.core.vitals import heartbeat

# From the start of a process to its first word, and of an engine to its first.
START_S = (0.5, 1.5)
ENGINE_START_S = (3.0, 6.0)
PROBE_S = (2.0, 5.0)
AGAIN_S = (1.0, 5.0)


class ControlEnd(Protocol):
    """The coordinator as its workers see it. Calls take no time: the way there is `Home`'s business."""

    def connected(self, home: Home, hello: Hello) -> int: ...
    def said(self, session: int, home: Home, message: ToCoordinator) -> None: ...
    def disconnected(self, session: int) -> None: ...


class Home:
    """`come` and `go` are what availability does; between them it lives as a worker does."""

    def __init__(
        self,
        world: World,
        machine: Machine,
        coordinator: ControlEnd,
        rng: random.Random,
        slowness: Callable[[], float],
    ) -> None:
        self.world = world
        self.machine = machine
        self.present = False
        self.session: int | None = None
        self.engine: Engine | None = None
        self._coordinator = coordinator
        self._rng = rng
        self._slowness = slowness
        self._incarnation = 0
        self._heartbeat_s = 2.0
        # Rises with every coming and going: what was asked for before does not happen.
        self._life = 0
        self._told_s = 0.0

    # ------------------------------------------------------------------ coming and going

    def come(self) -> None:
        if self.present:
            return
        self.present = True
        self._life += 1
        self.world.vanished.discard(self.machine.worker_id)
        self.world.books.begin(self.machine.worker_id, figures.START)
        self._later(self._rng.uniform(*START_S), self._dial)

    def notice(self, within_s: float) -> None:
        """It will go, and knows."""
        if self.engine is not None:
            self.engine.handle(DrainRequested("the machine is wanted back", within_s))

    def go(self, *, silently: bool) -> None:
        """Without a word."""
        if not self.present:
            return
        worker_id, session = self.machine.worker_id, self.session
        self._leave(silently=silently)
        if silently:
            self.world.vanished.add(worker_id)
        elif session is not None:
            self.world.clock.after(
                self.world.control_s(worker_id), lambda: self._coordinator.disconnected(session)
            )

    def _leave(self, *, silently: bool) -> None:
        self.present = False
        self._life += 1
        self.session = None
        if self.engine is not None:
            self.engine.die(silently=silently)
            self.engine = None
        self.world.books.gone(self.machine.worker_id)

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        life = self._life
        self.world.clock.after(after_s, lambda: call() if self._life == life else None)

    # ------------------------------------------------------------------ the control stream

    def _dial(self) -> None:
        machine = self.machine
        hello = Hello(
            worker_id=machine.worker_id,
            protocol_min=1,
            protocol_max=1,
            version="0.1.0",
            numeric_class=machine.numeric_class,
            host_id=machine.host_id,
            site=machine.site,
            region=machine.region,
            device_class=machine.device_class,
            incarnation=self._incarnation if self.engine is not None else 0,
            session_nonce=self._rng.getrandbits(60),
        )

        def connected() -> None:
            self.session = self._coordinator.connected(self, hello)

        self._later(self.world.control_s(machine.worker_id), connected)

    def say(self, message: ToCoordinator) -> None:
        session = self.session
        if session is not None:
            self._later(
                self.world.control_s(self.machine.worker_id),
                lambda: self._coordinator.said(session, self, message),
            )

    def told(self, session: int, message: ToWorker) -> None:
        """By the coordinator; messages keep their order, and a grant brings its samples' bytes."""
        way_s = self.world.control_s(self.machine.worker_id)
        if isinstance(message, LeaseGrant):
            site = self.world.swarm.sites.get(self.world.swarm.owner_site)
            size = sum(self.world.costs.lease_bytes(len(lease.samples)) for lease in message.leases)
            self.world.links.sent_bytes["tokens"] += size
            way_s += size / site.up_bytes_per_s if site is not None else 0.0
        now_s = self.world.clock.now_s
        self._told_s = max(self._told_s, now_s + way_s)

        def heard() -> None:
            if self.session == session:
                self._hear(message)

        self._later(self._told_s - now_s, heard)

    def closed(self, session: int) -> None:
        """By the coordinator."""

        def lost() -> None:
            if self.session == session:
                self.session = None
                if self.engine is not None:
                    self.engine.die(silently=False)
                    self.engine = None
                self.world.books.begin(self.machine.worker_id, figures.START)
                self._later(self._rng.uniform(*AGAIN_S), self._dial)

        self._later(self.world.control_s(self.machine.worker_id), lost)

    def _hear(self, message: ToWorker) -> None:
        match message:
            case Welcome():
                self._welcomed(message)
            case HeartbeatAck():
                self._heartbeat_s = message.heartbeat_interval_s or self._heartbeat_s
            case Refused():
                self.world.books.note("refused", f"{self.machine.worker_id}: {message.message}")
            case Finish() if self.engine is None:
                self._stop_asked(Stop(message.done, message.reason))
            case _ if self.engine is not None:
                self.engine.hear(message)
            case _:
                pass

    def _welcomed(self, message: Welcome) -> None:
        self._heartbeat_s = message.heartbeat_interval_s or self._heartbeat_s
        self._incarnation = message.incarnation
        if self.engine is not None:
            self.engine.die(silently=False)
        self.engine = None

        def started() -> None:
            self.engine = Engine(
                self.world, self.machine, self._rng, self._slowness, self.say, self._stop_asked
            )
            # The assignment may be on its way already, and needs a core that speaks.
            self.engine.handle(ControlRestored())
            if message.paused:
                self.engine.hear(JobPaused(True, message.pause_reason))
            if message.probe_now:
                self._later(self._rng.uniform(*PROBE_S), self._probe)

        # A probe is what the coordinator waits for, so nothing for the engine comes before it is there.
        started() if not message.probe_now else self._later(self._rng.uniform(*ENGINE_START_S), started)
        self._beat()

    def _probe(self) -> None:
        machine = self.machine
        site = self.world.swarm.sites[machine.site]
        finite = site.up_bytes_per_s < float("inf")
        self.say(
            ProbeReport(
                machine.forward_seconds,
                machine.backward_seconds,
                machine.memory_bytes,
                (f"{machine.worker_id}:7710",),
                site.up_bytes_per_s if finite else 0.0,
                site.down_bytes_per_s if finite else 0.0,
            )
        )

    def _beat(self) -> None:
        session = self.session

        def beat() -> None:
            if self.session != session or session is None:
                return
            core = self.engine.core if self.engine is not None else None
            self.say(heartbeat(core, self.world.clock.now_s) if core is not None else Heartbeat())
            self._later(self._heartbeat_s, beat)

        self._later(self._heartbeat_s, beat)

    def _stop_asked(self, effect: Stop) -> None:
        """In order: it is gone until it comes again."""
        session, worker_id = self.session, self.machine.worker_id
        self.world.books.note("left", f"{worker_id}: {effect.reason}")
        self._leave(silently=False)
        if session is not None:
            self.world.clock.after(
                self.world.control_s(worker_id), lambda: self._coordinator.disconnected(session)
            )
