"""The coordinator's shell: sessions, ticks, planner and keeper around a core, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from starlings_coordinator.core.effects import (
    Announce,
    CloseSession,
    ComputePlan,
    Effect,
    JobEnded,
    SaveCheckpoint,
    Send,
)
from starlings_coordinator.core.events import (
    Booted,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    KeeperStarted,
    Now,
    PlanComputed,
    Ticked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from starlings_protos.messages import (
    Assignment,
    Heartbeat,
    HeartbeatAck,
    Hello,
    LeaseGrant,
    MicrobatchDone,
    PlanReply,
    PlanRequest,
    Refused,
    StepCommitted,
    ToCoordinator,
)
from starlings_simulator.control import ControlStream
from starlings_simulator.network import Process
from starlings_simulator.world import World

TICK_S = 0.25


class CoordinatorCore(Protocol):
    """What the shell needs of a core."""

    def handle(self, event: Event, now: Now) -> tuple[tuple[object, ...], tuple[Effect, ...]]: ...

    def validate(self) -> None: ...

    def waiting_words(self) -> str: ...


class Coordinator:
    def __init__(
        self,
        world: World,
        core: CoordinatorCore,
        plan: Callable[[PlanRequest], PlanReply],
        keeper: Keeper,
        rng: random.Random,
    ) -> None:
        self.world = world
        self.core = core
        self.process = Process("coordinator")
        self._plan = plan
        self._keeper = keeper
        self._rng = rng
        self._streams: dict[int, ControlStream] = {}
        self.ended: JobEnded | None = None
        self.handle(Booted())
        self.handle(KeeperStarted(("keeper:7700",), keeper.versions))
        self._tick()

    def handle(self, event: Event) -> None:
        quiet = isinstance(event, Ticked) or (
            isinstance(event, WorkerSaid) and isinstance(event.message, Heartbeat)
        )
        if not quiet:
            self.world.note("coordinator", "<-", event)
        now_s = self.world.now_s
        _, effects = self.core.handle(event, Now(now_s, 1_700_000_000.0 + now_s, "boot"))
        self.core.validate()
        for effect in effects:
            if not (isinstance(effect, Send) and isinstance(effect.message, HeartbeatAck)):
                self.world.note("coordinator", "->", effect)
            self._execute(effect)
        self.world.happened()

    def _tick(self) -> None:
        def ticked() -> None:
            if self.ended is None:
                self.handle(Ticked())
                self._tick()

        self.world.clock.after(TICK_S, lambda: self.process.deliver(ticked))

    # ------------------------------------------------------------------ streams

    def connected(self, stream: ControlStream, hello: Hello) -> None:
        self._streams[stream.session] = stream
        self.handle(WorkerConnected(stream.session, hello))

    def said(self, stream: ControlStream, message: ToCoordinator) -> None:
        if isinstance(message, MicrobatchDone):
            self.world.checker.done(stream.worker_id, message)
        self.handle(WorkerSaid(stream.session, stream.worker_id, message))

    def disconnected(self, stream: ControlStream) -> None:
        if self._streams.pop(stream.session, None) is not None:
            self.handle(WorkerDisconnected(stream.session, stream.worker_id))

    # ------------------------------------------------------------------ effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case CloseSession():
                stream = self._streams.get(effect.session)
                if stream is not None:
                    if effect.refusal is not None:
                        stream.down(Refused(effect.refusal, effect.message))
                    stream.close()
            case ComputePlan():
                request = effect.request
                self.world.clock.after(
                    self._rng.uniform(0.05, 0.3),
                    lambda: self.process.deliver(lambda: self.handle(PlanComputed(self._plan(request)))),
                )
            case SaveCheckpoint():
                self._save(effect)
            case Announce():
                pass
            case JobEnded():
                self.ended = effect

    def _send(self, effect: Send) -> None:
        checker = self.world.checker
        match effect.message:
            case LeaseGrant(leases):
                for lease in leases:
                    checker.granted(effect.worker_id, lease)
            case StepCommitted():
                checker.step_committed(effect.message)
            case Assignment():
                checker.rewound(effect.message.version)
            case _:
                pass
        stream = self._streams.get(effect.session)
        if stream is not None:
            stream.down(effect.message)

    def _save(self, effect: SaveCheckpoint) -> None:
        def save() -> None:
            if self._keeper.save(effect):
                self.handle(CheckpointSaved(effect.version, f"checkpoints/{effect.version}", 1))
            else:
                self.handle(CheckpointFailed(effect.version, "a donor is gone"))

        self.world.clock.after(self._rng.uniform(0.2, 0.6), lambda: self.process.deliver(save))


class Keeper(Protocol):
    @property
    def versions(self) -> tuple[int, ...]: ...

    def save(self, effect: SaveCheckpoint) -> bool: ...
