"""The owner's machine in a timed simulation: the real coordinator's core, its planner, and a keeper."""

from __future__ import annotations

from collections.abc import Callable

from starlings_coordinator.core.core import Core
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
from starlings_coordinator.core.records import PlanAdopted, Record
from starlings_protos.messages import KEEPER, Hello, PlanReply, PlanRequest, Refused, ToCoordinator, WorkerId
from starlings_simulator.timed.figures import Point
from starlings_simulator.timed.home import Home
from starlings_simulator.timed.links import Transfer
from starlings_simulator.timed.world import World

STARTED_AT_WALL_S = 1_700_000_000.0
TICK_S = 1.0
POINT_S = 30.0
# What planning takes, at least and per worker: measured of the planner's process.
PLAN_S, PLAN_S_PER_WORKER = 0.3, 0.005


class Owner:
    def __init__(self, world: World, core: Core, plan: Callable[[PlanRequest], PlanReply]) -> None:
        self.world = world
        self.core = core
        self.ended: JobEnded | None = None
        self.plans = 0
        self._plan = plan
        self._homes: dict[int, Home] = {}
        self._sessions = 0

    def start(self) -> None:
        self.handle(Booted())
        self.handle(KeeperStarted(("keeper:7700",), (0,)))
        self._tick()
        self._look()

    def handle(self, event: Event) -> None:
        now_s = self.world.clock.now_s
        records, effects = self.core.handle(event, Now(now_s, STARTED_AT_WALL_S + now_s, "boot"))
        for record in records:
            self._written(record)
        for effect in effects:
            self._execute(effect)

    def _later(self, after_s: float, event: Event) -> None:
        self.world.clock.after(after_s, lambda: self.handle(event))

    def _written(self, record: Record) -> None:
        if isinstance(record, PlanAdopted):
            self.plans += 1
            self.world.books.note("plan", record.reason)

    def _tick(self) -> None:
        if self.ended is None:
            self.handle(Ticked())
            self.world.clock.after(TICK_S, self._tick)

    def _look(self) -> None:
        """How far the job is, now and then."""
        core = self.core
        holders = len(core.state.spans) if core.plan_is_live else 0
        self.world.books.points.append(
            Point(self.world.clock.now_s, core.state.tokens, len(self.world.engines), holders)
        )
        self.world.clock.after(POINT_S, self._look)

    # ------------------------------------------------------------------ streams

    def connected(self, home: Home, hello: Hello) -> int:
        self._sessions += 1
        session = self._sessions
        self._homes[session] = home
        # The worker knows its session before anything is said on it.
        home.session = session
        self.handle(WorkerConnected(session, hello))
        return session

    def said(self, session: int, home: Home, message: ToCoordinator) -> None:
        if self._homes.get(session) is home:
            self.handle(WorkerSaid(session, home.machine.worker_id, message))

    def disconnected(self, session: int) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            self.handle(WorkerDisconnected(session, home.machine.worker_id))

    # ------------------------------------------------------------------ effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Send():
                home = self._homes.get(effect.session)
                if home is not None:
                    home.told(effect.session, effect.message)
            case CloseSession():
                home = self._homes.pop(effect.session, None)
                if home is not None:
                    if effect.refusal is not None:
                        home.told(effect.session, Refused(effect.refusal, effect.message))
                    home.closed(effect.session)
            case ComputePlan():
                reply = self._plan(effect.request)
                seconds = PLAN_S + PLAN_S_PER_WORKER * len(effect.request.workers)
                self._later(seconds, PlanComputed(reply))
            case SaveCheckpoint():
                self._save(effect)
            case Announce():
                self.world.books.note(effect.kind, effect.text)
            case JobEnded():
                self.ended = effect
            case Answer():
                pass  # Nobody commands here.

    def _save(self, effect: SaveCheckpoint) -> None:
        """The keeper pulls each block from the first of its donors that is there."""
        world, costs = self.world, self.world.costs
        transfers: list[Transfer] = []
        size_of = {block.name: block.parameter_count for block in costs.profile.blocks}
        total = 0.0

        def arrived() -> None:
            if all(transfer.over for transfer in transfers):
                self.handle(CheckpointSaved(effect.version, f"checkpoints/{effect.version}", int(total)))

        wanted: list[tuple[WorkerId, float]] = []
        for name, donors, _ in effect.donors:
            there = [peer.worker_id for peer in donors if peer.worker_id in world.engines]
            if not there:
                self._later(1.0, CheckpointFailed(effect.version, f"nobody has block {name} any more"))
                return
            wanted.append((there[0], size_of[name] * costs.state_bytes_per_parameter))
        for donor, size in wanted:
            total += size
            transfers.append(
                world.links.start(world.site_of(donor), world.site_of(KEEPER), size, "checkpoint", arrived)
            )
