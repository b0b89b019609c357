"""The coordinator's shell: sessions, ticks, planner and keeper around a core, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from starlings_coordinator.core.effects import (
    Announce,
    Answer,
    CloseSession,
    ComputePlan,
    Effect,
    JobEnded,
    SaveCheckpoint,
    Send,
)
from starlings_coordinator.core.events import (
    Booted,
    Event,
    KeeperStarted,
    Now,
    PlanComputed,
    Ticked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from starlings_coordinator.core.records import PlanAdopted, StepRecorded, WorkerAdmitted
from starlings_protos.messages import (
    Assignment,
    ExchangeOpened,
    Heartbeat,
    HeartbeatAck,
    Hello,
    LeaseGrant,
    MicrobatchDone,
    PlanReply,
    PlanRequest,
    Prepared,
    Refused,
    Span,
    Standby,
    StepCommitted,
    ToCoordinator,
    WorkerId,
)
from starlings_simulator.control import ControlStream
from starlings_simulator.faults import Moment
from starlings_simulator.keeper import SimulatedKeeper
from starlings_simulator.network import Process
from starlings_simulator.world import World

TICK_S = 0.5
# How a loss is announced for which there must be a cause outside the coordinator.
ABSENCE = ("its connection ended", "nothing was heard", "it was started again")
STARTED_AT_WALL_S = 1_700_000_000.0


class CoordinatorCore(Protocol):
    """What the shell needs of a core."""

    def handle(self, event: Event, now: Now) -> tuple[tuple[object, ...], tuple[Effect, ...]]: ...

    def validate(self) -> None: ...

    def waiting_words(self) -> str: ...

    @property
    def phase(self) -> object: ...


class Coordinator:
    """Survives its lives: `crash` ends one, `start` begins the next from the log. `restore(log)` makes a core of it."""

    def __init__(
        self,
        world: World,
        restore: Callable[[Sequence[object]], CoordinatorCore],
        plan: Callable[[PlanRequest], PlanReply],
        keeper: SimulatedKeeper,
        rng: random.Random,
    ) -> None:
        self.world = world
        self._restore = restore
        self.process = Process("coordinator")
        self._plan = plan
        self._keeper = keeper
        self._rng = rng
        self._streams: dict[int, ControlStream] = {}
        # Connections of which the process has not heard yet: they end with it.
        self._dialled: list[ControlStream] = []
        self._planned: dict[WorkerId, Span] = {}
        self._log: list[object] = []
        # Which records are its last when it is to die in the worst moment; () when it is not.
        self._dies_after: tuple[type, ...] = ()
        self.wall_offset_s = 0.0
        self.ended: JobEnded | None = None
        # To the owner's commands.
        self.answers: list[Answer] = []
        self.core = restore(())
        self.start()

    def start(self) -> None:
        if not self.process.alive:
            self.world.note("coordinator", "!!", f"starts again with {len(self._log)} records")
            self.process = Process("coordinator")
            self.core = self._restore(self._log)
        self.handle(Booted())
        self.handle(KeeperStarted(("keeper:7700",), self._keeper.versions))
        self._tick()

    def crash(self) -> None:
        """At once, or in the worst moment: the next records are written, their effects never leave."""
        if not self.process.alive:
            return
        if self._rng.random() < 0.5:
            self._die()
        else:
            self._dies_after = (object,)
            process = self.process
            self.world.clock.after(2.0, lambda: self._die() if self.process is process else None)

    def crash_after(self, *kinds: type) -> None:
        """As soon as such a record is written, before anybody hears of it."""
        if self.process.alive:
            self._dies_after = kinds

    def crash_now(self) -> None:
        self._die()

    def _die(self) -> None:
        if not self.process.alive or self.ended is not None:
            return
        self.world.note("coordinator", "!!", "crashes")
        self._dies_after = ()
        self.process.kill()
        for stream in [*self._streams.values(), *self._dialled]:
            stream.break_off()
        self._streams.clear()
        self._dialled.clear()

    def handle(self, event: Event) -> None:
        quiet = isinstance(event, Ticked) or (
            isinstance(event, WorkerSaid) and isinstance(event.message, Heartbeat)
        )
        if not quiet:
            self.world.note("coordinator", "<-", event)
        now_s = self.world.now_s
        wall_s = STARTED_AT_WALL_S + now_s + self.wall_offset_s
        records, effects = self.core.handle(event, Now(now_s, wall_s, "boot"))
        if records or effects or not quiet:
            self.core.validate()
        self._log += records
        for record in records:
            self._written(record)
        if any(isinstance(record, self._dies_after) for record in records):
            self._die()
            return
        for effect in effects:
            if not (isinstance(effect, Send) and isinstance(effect.message, HeartbeatAck)):
                self.world.note("coordinator", "->", effect)
            self._execute(effect)
        self.world.happened()

    def _written(self, record: object) -> None:
        match record:
            case WorkerAdmitted():
                self.world.checker.admitted(record)
            case StepRecorded():
                self.world.checker.recorded(record)
                self.world.reached(Moment.COMMIT_WRITTEN, None)
            case PlanAdopted():
                self._adopted(record)
                self.world.reached(Moment.PLAN_WRITTEN, None)
            case _:
                pass

    def _tick(self) -> None:
        def ticked() -> None:
            if self.ended is None:
                self.handle(Ticked())
                self._tick()

        process = self.process
        self.world.clock.after(TICK_S, lambda: process.deliver(ticked))

    # ------------------------------------------------------------------ streams

    def dialled(self, stream: ControlStream) -> None:
        self._dialled.append(stream)

    def connected(self, stream: ControlStream, hello: Hello) -> None:
        self._dialled.remove(stream)
        self._streams[stream.session] = stream
        self.handle(WorkerConnected(stream.session, hello))

    def said(self, stream: ControlStream, message: ToCoordinator) -> None:
        if isinstance(message, MicrobatchDone):
            self.world.checker.done(stream.worker_id, message)
        if isinstance(message, Prepared):
            self.world.checker.said_prepared(stream.worker_id, message)
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
                request, process = effect.request, self.process
                self.world.clock.after(
                    self._rng.uniform(0.05, 0.3),
                    lambda: process.deliver(lambda: self.handle(PlanComputed(self._plan(request)))),
                )
            case SaveCheckpoint():
                self._save(effect)
            case Announce():
                self._announced(effect)
            case JobEnded():
                self.ended = effect
            case Answer():
                self.answers.append(effect)

    def _send(self, effect: Send) -> None:
        checker = self.world.checker
        match effect.message:
            case LeaseGrant(leases):
                for lease in leases:
                    checker.granted(effect.worker_id, lease)
            case StepCommitted():
                checker.step_committed(effect.message)
            case ExchangeOpened():
                checker.opened(effect.message)
            case Assignment():
                checker.planned(effect.worker_id, effect.message, self.world.now_s)
            case Standby():
                checker.observing.discard(effect.worker_id)
            case _:
                pass
        stream = self._streams.get(effect.session)
        if stream is not None:
            stream.down(effect.message)

    def _adopted(self, record: PlanAdopted) -> None:
        """Whoever loses its place is no holder that training could go on with, if it was sent away: the plan's reason
        says so, also when the coordinator dies before it can announce it.
        """
        spans = dict(record.spans)
        dropped = self._planned.keys() - spans.keys()
        self._planned = spans
        self.world.checker.adopted(record, dropped)
        if not any(words in record.reason for words in ABSENCE):
            self.world.harm(*sorted(dropped))

    def _announced(self, effect: Announce) -> None:
        """Who is sent away, or leaves, is no holder that training could go on with."""
        worker_id, _, reason = effect.text.replace(":", " ").partition(" ")
        absent = any(words in reason for words in ABSENCE)
        if effect.kind in ("leave", "catch_up_failed") or (effect.kind == "lost" and not absent):
            self.world.harm(WorkerId(worker_id))

    def _save(self, effect: SaveCheckpoint) -> None:
        def save() -> None:
            self.handle(self._keeper.save(effect))

        process = self.process
        self.world.clock.after(self._rng.uniform(0.2, 0.6), lambda: process.deliver(save))
