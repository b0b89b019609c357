"""A worker's machine:

the supervisor's control stream, heartbeats and engine starts, and what faults do to them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from starlings_protos.messages import (
    EngineDown,
    Finish,
    Heartbeat,
    HeartbeatAck,
    Hello,
    ProbeReport,
    Refusal,
    Refused,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerId,
)
from starlings_protos.stream_messages import JobPaused
from starlings_simulator.control import ControlStream, CoordinatorEnd
from starlings_simulator.engine import Engine, EngineSpec
from starlings_simulator.network import Network, Process
from starlings_simulator.symbolic import require
from starlings_simulator.world import World
from starlings_worker.core.effects import Stop
from starlings_worker.core.events import ControlLost, ControlRestored, DrainRequested
from starlings_worker.core.vitals import heartbeat

STARTED_AT_WALL_S = 1_700_000_000.0
RECONNECT_S = (0.3, 2.0)
# Refusals that no new stream cures.
FOR_GOOD = (
    Refusal.REVOKED,
    Refusal.VERSION,
    Refusal.JOB_MISMATCH,
    Refusal.NOT_YOU,
    Refusal.NO_ROOM,
    Refusal.EVICTED,
)


@dataclass(frozen=True, slots=True)
class HostSpec:
    engine: EngineSpec
    host_id: str
    memory_bytes: int
    forward_seconds: dict[str, float] = field(default_factory=dict)
    backward_seconds: dict[str, float] = field(default_factory=dict)
    job_digest: str = ""


class Host:
    """Survives its lives: `start` begins one, `kill` ends it without a word."""

    def __init__(
        self,
        world: World,
        network: Network,
        spec: HostSpec,
        coordinator: Callable[[], CoordinatorEnd | None],
        next_session: Callable[[], int],
        rng: random.Random,
    ) -> None:
        self.world = world
        self.spec = spec
        self._network = network
        self._coordinator = coordinator
        self._next_session = next_session
        self._rng = rng
        self.process = Process(spec.engine.worker_id, alive=False)
        self.engine: Engine | None = None
        self.engine_incarnation = -1
        self._engine_down: EngineDown | None = None
        # The stream on which that was said.
        self._told_on = -1
        self.stream: ControlStream | None = None
        self._nonce = 0
        self.wall_offset_s = 0.0
        self._heartbeat_s = 2.0
        self.stopped: Stop | None = None
        self.refused: Refused | None = None

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.engine.worker_id

    @property
    def running(self) -> bool:
        return self.process.alive

    # ------------------------------------------------------------------ lives

    def start(self) -> None:
        if self.process.alive or self.stopped is not None:
            return
        self.process = Process(self.worker_id)
        self._nonce = self._rng.getrandbits(60)
        self._engine_down = None
        self.world.note(self.worker_id, "!!", "starts")
        self._connect()
        self._beat(self.process)

    def come_back(self) -> bool:
        """Started again after it left in order; False while it is still leaving."""
        if self.process.alive:
            return False
        self.stopped = None
        self.start()
        return True

    def kill(self) -> None:
        """SIGKILL of supervisor and engine, or a power cut."""
        if not self.process.alive:
            return
        self.world.note(self.worker_id, "!!", "is killed")
        self.process.kill()
        self._end_engine()
        self.world.checker.gone(self.worker_id)
        if self.stream is not None:
            self.stream.break_off()
            self.stream = None

    def kill_engine(self, reason: str) -> None:
        """The engine crashes; the supervisor says so and starts another when it is welcome."""
        if not self.process.alive or self.engine is None:
            return
        self.world.note(self.worker_id, "!!", f"the engine crashes: {reason}")
        self._end_engine()
        self.world.checker.gone(self.worker_id)
        self._engine_down, self._told_on = EngineDown(reason, True), -1
        if self.stream is not None:
            self.process.deliver(self._say_engine_down)

    def _say_engine_down(self) -> None:
        """Said once on every stream until the next life begins: a coordinator that missed it would count on gradient
        that is gone.
        """
        stream = self.stream
        if stream is not None and self._engine_down is not None and stream.session != self._told_on:
            self._told_on = stream.session
            stream.up(self._engine_down)

    def freeze(self) -> None:
        self.world.note(self.worker_id, "!!", "freezes")
        self.process.freeze()
        if self.engine is not None:
            self.engine.process.freeze()

    def thaw(self) -> None:
        self.world.note(self.worker_id, "!!", "thaws")
        self.process.thaw()
        if self.engine is not None:
            self.engine.process.thaw()

    def drain(self, within_s: float) -> None:
        """SIGTERM: without an engine there is nothing to be left in order."""
        engine = self.engine
        if engine is None:
            self.kill()
            return
        self.world.note(self.worker_id, "!!", "is asked to leave")
        asked = DrainRequested("the user wants it back", within_s)
        engine.process.deliver(lambda: engine.handle(asked))

    def _end_engine(self) -> None:
        if self.engine is not None:
            self.engine.process.kill()
            self._network.receivers.pop(self.worker_id, None)
            self.engine = None

    # ------------------------------------------------------------------ the control stream

    def _connect(self) -> None:
        """Open a stream, or try again after a jittered while."""
        process = self.process

        def attempt() -> None:
            coordinator = self._coordinator()
            cut = self._network.is_cut(self.worker_id, "coordinator")
            if coordinator is None or cut:
                self.world.clock.after(self._rng.uniform(*RECONNECT_S), lambda: process.deliver(attempt))
                return
            stream = ControlStream(
                self.world, self._network, self.worker_id, self, coordinator, self._next_session()
            )
            self.stream = stream
            stream.begin(self._hello())

        self.world.clock.after(self._rng.uniform(0.01, 0.3), lambda: process.deliver(attempt))

    def _hello(self) -> Hello:
        engine = self.spec.engine
        return Hello(
            worker_id=self.worker_id,
            protocol_min=1,
            protocol_max=1,
            version="0.1.0",
            job_digest=self.spec.job_digest,
            numeric_class=engine.numeric_class,
            host_id=self.spec.host_id,
            wall_time_s=STARTED_AT_WALL_S + self.world.now_s + self.wall_offset_s,
            incarnation=self.engine_incarnation if self.engine is not None else 0,
            session_nonce=self._nonce,
        )

    def say(self, message: ToCoordinator) -> None:
        if self.stream is not None:
            self.stream.up(message)

    def heard(self, stream: ControlStream, message: ToWorker) -> None:
        if stream is not self.stream:
            return
        match message:
            case Welcome():
                self._welcomed(message)
            case Refused():
                self.world.note(self.worker_id, "<-", message)
                self.refused = message
                if message.refusal in FOR_GOOD:
                    self._end(Stop(False, message.message))
                else:
                    stream.break_off()  # It comes back, and the engine lives on until a Welcome fences it.
            case HeartbeatAck():
                pass
            case Finish() if self.engine is None:
                self._end(Stop(message.done, message.reason, drained=True))
            case _:
                if self.engine is not None:
                    self.engine.hear(message)

    def lost(self, stream: ControlStream) -> None:
        if stream is not self.stream:
            return
        self.stream = None
        if self.engine is not None:
            self.engine.handle(ControlLost())
        if self.stopped is None:
            self._connect()

    def _welcomed(self, message: Welcome) -> None:
        self.world.note(self.worker_id, "<-", f"Welcome(incarnation={message.incarnation})")
        self._heartbeat_s = message.heartbeat_interval_s or self._heartbeat_s
        if self.engine is not None and message.incarnation != self.engine_incarnation:
            # The coordinator took the old life for lost: it is fenced, so it ends. For that there must be a cause.
            require(
                self.world.harmed(self.worker_id, self.engine.started_at_s),
                f"{self.worker_id} is fenced, and nothing has happened to it since its engine was started",
            )
            self._end_engine()
            self.world.checker.gone(self.worker_id)
        if self._engine_down is not None and message.incarnation == self.engine_incarnation:
            self._say_engine_down()
            return
        if self.engine is None:
            self._engine_down = None
            self.engine_incarnation = message.incarnation
            self._start_engine(message.probe_now)
            self._tell_of_pause(message)
            return
        self.engine.handle(ControlRestored())
        self._tell_of_pause(message)
        if message.probe_now:
            self._probe()

    def _tell_of_pause(self, message: Welcome) -> None:
        if self.engine is not None and message.paused != self.engine.core.paused:
            self.engine.hear(JobPaused(message.paused, message.pause_reason))

    def _start_engine(self, probe_now: bool) -> None:
        process = Process(self.worker_id)
        supervisor = self.process

        def started() -> None:
            if self.engine is None or self.engine.process is not process:
                return
            if probe_now:
                self._probe()

        self.engine = Engine(
            self.world,
            self._network,
            self.spec.engine,
            process,
            self.engine_incarnation,
            self._rng,
            self.say,
            self._stop_asked,
        )
        self.world.clock.after(self._rng.uniform(0.3, 0.8), lambda: supervisor.deliver(started))

    def _probe(self) -> None:
        process = self.process

        def report() -> None:
            self.say(
                ProbeReport(
                    self.spec.forward_seconds,
                    self.spec.backward_seconds,
                    self.spec.memory_bytes,
                    (f"{self.worker_id}:7710",),
                )
            )

        self.world.clock.after(self._rng.uniform(0.1, 0.4), lambda: process.deliver(report))

    def _beat(self, process: Process) -> None:
        def beat() -> None:
            if self.stream is not None:
                core = self.engine.core if self.engine is not None else None
                now_s = self.world.clock.now_s
                self.stream.up(heartbeat(core, now_s) if core is not None else Heartbeat())
            self.world.clock.after(self._heartbeat_s, lambda: process.deliver(beat))

        self.world.clock.after(self._heartbeat_s, lambda: process.deliver(beat))

    def _stop_asked(self, effect: Stop) -> None:
        self._end(effect)

    def _end(self, effect: Stop) -> None:
        """In order: the supervisor leaves too."""
        self.world.note(self.worker_id, "**", effect)
        self.stopped = effect
        self.world.harm(self.worker_id)
        self.process.kill()
        self._end_engine()
        self.world.checker.gone(self.worker_id)
        if self.stream is not None:
            self.stream.break_off()
            self.stream = None
