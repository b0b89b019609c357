"""A job, its core and workers that do what they are told: for the tests of the core and of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.effects import (
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
    CheckpointSaved,
    Event,
    KeeperStarted,
    Now,
    PlanComputed,
    Ticked,
    WorkerConnected,
    WorkerSaid,
)
from starlings_coordinator.core.records import (
    PlanAdopted,
    Record,
    StepRecorded,
    StepRetried,
    record_from_json,
    record_to_json,
)
from starlings_coordinator.core.state import Durable, fold
from starlings_job.profile import BlockProfile, Profile
from starlings_job.spec import JobSpec
from starlings_protos.messages import (
    Assignment,
    CatchUpFailed,
    ExchangeOpened,
    ExchangePurpose,
    Finish,
    Hello,
    Hop,
    Lease,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    PlannedWorker,
    PlanReply,
    Prepared,
    PreparedGroup,
    ProbeReport,
    Ready,
    Span,
    Stage,
    Standby,
    StateReport,
    StateWanted,
    StepCommitted,
    StepRestarted,
    ToCoordinator,
    Welcome,
    WorkerId,
)
from starlings_protos.stream_messages import JobPaused, LeasesReturned, TrainingPaused

BLOCKS = 6


def job_spec(**overrides: Any) -> JobSpec:
    """batch 8 in microbatches of 2, 4 steps, everything else by default."""
    record: dict[str, Any] = {
        "job": {"name": "test", "tokens": 4 * 8 * 64, "seed": 7},
        "model": {"preset": "micro"},
        "train": {"batch": 8, "microbatch": 2, "clip": 1.0},
        "swarm": {"min_workers": 1, "settle_s": 1.0},
    }
    for section, values in overrides.items():
        record[section] = {**record.get(section, {}), **values}
    return JobSpec.model_validate(record)


def profile(blocks: int = BLOCKS, tied: bool = False) -> Profile:
    middle = [
        BlockProfile(f"layers.{i}", "layer", 50_000, 50_000, 6_400_000, 200_000, 16_384, 60_000)
        for i in range(blocks - 2)
    ]
    ends = (
        BlockProfile("embed", "embed", 16_384, 16_384, 1, 0, 16_384, 65_536),
        BlockProfile("head", "head", 16_448, 16_448, 2_100_000, 80_000, 65_536, 65_536),
    )
    return Profile((ends[0], *middle, ends[1]), "llama", 64, 256, 65, 16_384 if tied else 0)


def config(*, tied: bool = False, **overrides: Any) -> CoreConfig:
    return CoreConfig(
        job_spec(**overrides), profile(tied=tied), 1000, 6, lambda ids: 64 * len(ids), generated_tokens=3
    )


@dataclass
class Fake:
    """A worker as the coordinator sees it: it answers at once, or not at all when `mute`."""

    worker_id: WorkerId
    session: int
    memory_bytes: int = 1 << 30
    numeric_class: str = "cpu"
    mute: bool = False
    incarnation: int = 0
    assignment: Assignment | None = None
    inbox: list[Any] = field(default_factory=list)
    accumulated: dict[int, set[int]] = field(default_factory=dict)
    # The step and attempt of what it accumulated, and the route of each index.
    epoch: tuple[int, int] = (0, 0)
    routes: dict[int, tuple[Hop, ...]] = field(default_factory=dict)
    version: int = 0
    # Spoils what it reports, for tests.
    digest_offset: int = 0
    finished: Finish | None = None
    hello: Hello = field(default_factory=lambda: Hello(WorkerId(""), 1, 1, ""))
    # Catches up at once, only when `World.catch_up` says so, or not at all.
    pace: str = "fast"
    observing: bool = False
    # `async`: has weights of its own, until all are averaged.
    drifts: bool = False
    # Keeps its leases until `World.train`.
    lazy: bool = False
    leases: list[Lease] = field(default_factory=list)
    unheard: list[StepCommitted] = field(default_factory=list)


class World:
    """Runs the core against fakes until nothing moves. `plan` makes the planner's reply; spans are given by tests."""

    def __init__(self, core_config: CoreConfig, spans: dict[str, tuple[int, int]], stages: int = 3) -> None:
        self.config = core_config
        self.core = Core(core_config)
        self.spans = {WorkerId(w): Span(*span) for w, span in spans.items()}
        self.stages = self._cut(stages)
        self.fakes: dict[WorkerId, Fake] = {}
        self.records: list[Record] = []
        self.ended: JobEnded | None = None
        self.answers: list[Answer] = []
        self.closed: list[CloseSession] = []
        self.saves: list[SaveCheckpoint] = []
        self.plan_requests: list[ComputePlan] = []
        self.now_s = 0.0
        self.save_at_once = True
        # Stop handling events when training reaches this step: tests then interfere.
        self.pause_at: int | None = None
        self._sessions = 0
        self._queue: list[Event] = []

    def _cut(self, count: int) -> tuple[Stage, ...]:
        blocks = len(self.config.profile.blocks)
        bounds = [round(i * blocks / count) for i in range(count + 1)]
        return tuple(Stage(a, b - 1) for a, b in pairwise(bounds))

    # ---------------------------------------------------------------- driving

    def now(self) -> Now:
        return Now(self.now_s, 1_700_000_000 + self.now_s, "boot")

    def feed(self, event: Event) -> tuple[Effect, ...]:
        records, effects = self.core.handle(event, self.now())
        self.records += records
        self.core.validate()
        for effect in effects:
            self._carry_out(effect)
        return effects

    def settle(self) -> None:
        for _ in range(10_000):
            if not self._queue or self.paused:
                return
            self.feed(self._queue.pop(0))
        raise AssertionError("the core and its workers never come to rest")

    @property
    def paused(self) -> bool:
        return (
            self.pause_at is not None
            and self.core.phase.value == "training"
            and self.core.state.step >= self.pause_at
        )

    def go_on(self) -> None:
        self.pause_at = None
        self.settle()

    def tick(self, seconds: float = 0.5) -> None:
        self.now_s += seconds
        for fake in self.fakes.values():
            member = self.core.members.get(fake.worker_id)
            if not fake.mute and member is not None:
                member.detector.heard(self.now_s)
        self.feed(Ticked())
        self.settle()

    def boot(self) -> None:
        self.feed(Booted())
        self.feed(KeeperStarted(("127.0.0.1:1",), (0,)))

    def join(self, name: str, **settings: Any) -> Fake:
        self._sessions += 1
        fake = Fake(WorkerId(name), self._sessions, **settings)
        self.fakes[fake.worker_id] = fake
        hello = Hello(
            fake.worker_id,
            1,
            1,
            "0.1.0",
            numeric_class=fake.numeric_class,
            host_id=name,
            session_nonce=self._sessions,
        )
        fake.hello = hello
        self.feed(WorkerConnected(self._sessions, hello))
        self.settle()
        return fake

    def reconnect(self, name: str, *, incarnation: int | None = None, host_id: str | None = None) -> Fake:
        """The same supervisor on a new stream; its engine is the same unless `incarnation` says otherwise."""
        fake = self.fakes[WorkerId(name)]
        self._sessions += 1
        fake.session = self._sessions
        hello = replace(
            fake.hello,
            host_id=host_id or fake.hello.host_id,
            incarnation=fake.incarnation if incarnation is None else incarnation,
        )
        self.feed(WorkerConnected(fake.session, hello))
        self.settle()
        return fake

    def restart(self, after_s: float = 5.0, versions: tuple[int, ...] = (0,)) -> None:
        """SIGKILL of the coordinator, and a new one on the same log: nobody is connected, what was said on the way is
        lost.
        """
        log = [record_from_json(record_to_json(record)) for record in self.records]
        self._queue.clear()
        self.now_s += after_s
        self.core = Core.restore(self.config, None, tuple(log))
        self.feed(Booted())
        self.feed(KeeperStarted(("127.0.0.1:2",), versions))

    def start(self) -> None:
        """Boot, join everybody of the plan, and let it settle into training."""
        self.boot()
        for name in self.spans:
            self.join(name)
        for _ in range(6):
            if self.core.phase.value in ("training", "finishing", "done"):
                return
            self.tick()

    def run_to_the_end(self) -> None:
        for _ in range(200):
            if self.ended is not None:
                return
            self.tick()
        raise AssertionError(f"not ended: {self.core.phase} {self.core.waiting_words()}")

    def say(self, fake: Fake, message: ToCoordinator) -> None:
        self._queue.append(WorkerSaid(fake.session, fake.worker_id, message))

    # ---------------------------------------------------------------- effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                fake = self.fakes[effect.worker_id]
                assert effect.session == fake.session
                fake.inbox.append(effect.message)
                if not fake.mute:
                    self._react(fake, effect.message)
            case ComputePlan():
                self.plan_requests.append(effect)
                self._queue.append(PlanComputed(self.plan(effect)))
            case SaveCheckpoint():
                self.saves.append(effect)
                if self.save_at_once:
                    self._queue.append(CheckpointSaved(effect.version, f"checkpoints/{effect.version}", 1))
            case CloseSession():
                self.closed.append(effect)
            case JobEnded():
                self.ended = effect
            case Answer():
                self.answers.append(effect)
            case _:
                pass

    def plan(self, effect: ComputePlan) -> PlanReply:
        here = {w.worker_id for w in effect.request.workers}
        spans = {w: s for w, s in self.spans.items() if w in here}
        held = {s for span in spans.values() for s in span.stages}
        missing = sorted(set(range(len(self.stages))) - held)
        if missing:
            return PlanReply(effect.request.request_id, impossible=f"needs 1.0 GB more for stages {missing}")
        workers = tuple(PlannedWorker(w, s, 4, False, 1000) for w, s in spans.items())
        return PlanReply(effect.request.request_id, self.stages, workers, 1.0, 1.0, "compute")

    # ---------------------------------------------------------------- a worker

    def _react(self, fake: Fake, message: Any) -> None:
        match message:
            case Welcome():
                if message.incarnation != fake.incarnation:
                    fake.observing = False
                fake.incarnation = message.incarnation
                if message.probe_now:
                    seconds = {"layer": 0.01, "embed": 0.001, "head": 0.005}
                    self.say(fake, ProbeReport(seconds, seconds, fake.memory_bytes, ("127.0.0.1:9",)))
            case Assignment() if message.observer or fake.observing:
                self._observe(fake, message)
            case Assignment():
                self._assign(fake, message)
                self.say(fake, Ready(message.plan_version, message.version, self.digests(fake)))
                self.say(fake, LeaseRequest(message.slots))
            case LeaseGrant() if fake.lazy and message.leases[0].key.kind is LeaseKind.TRAIN:
                fake.leases += message.leases
            case LeaseGrant():
                for lease in message.leases:
                    self._work(fake, lease)
            case TrainingPaused():
                fake.version, fake.drifts, fake.leases = message.version, True, []
                self.say(fake, LeaseRequest(4))
            case JobPaused() if not message.paused and fake.assignment is not None:
                self.say(fake, LeaseRequest(4))
            case JobPaused() if fake.leases:
                self.say(fake, LeasesReturned(tuple(lease.key for lease in fake.leases)))
                fake.leases = []
            case StepRestarted():
                self._begin(fake, message.step, message.attempt)
            case ExchangeOpened():
                self._exchange(fake, message)
            case StepCommitted() if fake.observing:
                fake.unheard.append(message)
                if fake.pace == "fast":
                    self.catch_up(fake)
            case StepCommitted():
                fake.version = message.step + 1
                self._begin(fake, message.step + 1, 0)
            case Standby():
                fake.observing, fake.unheard, fake.leases = False, [], []
            case StateWanted():
                digests = self.digests(fake, message.version)
                self.say(fake, StateReport(message.version, digests, self.core.state.attempt))
            case Finish():
                fake.finished = message
            case _:
                pass

    @staticmethod
    def _begin(fake: Fake, step: int, attempt: int, *, anew: bool = False) -> None:
        """Gradient of another attempt is void."""
        if anew or fake.epoch != (step, attempt):
            fake.epoch, fake.accumulated, fake.routes = (step, attempt), {}, {}

    def _assign(self, fake: Fake, message: Assignment) -> None:
        """What it has of the present attempt stays when the attempt does; what passed through somebody who is in the
        plan no more is void.
        """
        old, fake.assignment = fake.assignment, message
        same = old is not None and (old.stages, old.span) == (message.stages, message.span)
        self._begin(fake, message.step, message.attempt, anew=not same or fake.version != message.version)
        fake.version = message.version
        present = {fake.worker_id, *(peer.worker_id for peer in message.peers)}
        for index, route in fake.routes.items():
            if self.config.job.train.streams:
                break  # What it has added stays.
            if any(hop.worker_id not in present for hop in route):
                key = MicrobatchKey(LeaseKind.TRAIN, message.step, message.attempt, index)
                self.say(fake, MicrobatchFailed(key, "it was accumulated on a route through a lost worker"))

    def _observe(self, fake: Fake, message: Assignment) -> None:
        again, fake.assignment = fake.observing, message
        fake.observing = message.observer
        if not message.observer:
            # From observer to holder, whether or not it has replayed everything.
            self._begin(fake, message.step, message.attempt, anew=True)
            self.say(fake, LeaseRequest(message.slots))
        elif not again:
            fake.version, fake.unheard = message.version, []
            if fake.pace == "fast":
                self.catch_up(fake)
            elif fake.pace == "never":
                self.say(fake, CatchUpFailed(message.version, "no donor has it"))

    def catch_up(self, fake: Fake) -> None:
        """It has loaded, and replays what it has heard of."""
        assert fake.assignment is not None
        plan = fake.assignment.plan_version
        if fake.version == fake.assignment.version:
            self.say(fake, Ready(plan, fake.version, {}))
        for commit in fake.unheard:
            assert commit.step == fake.version, "a commit was left out"
            fake.version += 1
            groups = [f"stage:{stage}" for stage in fake.assignment.span.stages]
            self.say(fake, Ready(plan, fake.version, {}, dict.fromkeys(groups, 99 + fake.digest_offset)))
        fake.unheard = []

    def train(self, name: str, count: int = 1) -> list[Lease]:
        """A lazy worker trains the oldest `count` of its leases."""
        fake = self.fakes[WorkerId(name)]
        done, fake.leases = fake.leases[:count], fake.leases[count:]
        for lease in done:
            self._work(fake, lease)
        self.settle()
        return done

    def digests(self, fake: Fake, version: int | None = None) -> dict[str, str]:
        assert fake.assignment is not None
        names = self.config.profile.block_names
        blocks = [b for s in fake.assignment.span.stages for b in fake.assignment.stages[s].blocks]
        own = f" of {fake.worker_id}" if fake.drifts else ""
        return {names[b]: f"{names[b]}@{fake.version if version is None else version}{own}" for b in blocks}

    def route(self, first: Fake) -> tuple[Hop, ...]:
        """From `first` through holders of what follows, the lowest id each time."""
        assert first.assignment is not None
        hops, stage, seen = [], 0, set()
        worker = first.worker_id
        spans = self.core.state.spans
        while stage < len(self.stages):
            if stage > 0:
                worker = min(w for w, s in spans.items() if stage in s and w not in seen)
            seen.add(worker)
            hops.append(Hop(worker, stage, spans[worker].last_stage))
            stage = spans[worker].last_stage + 1
        return tuple(hops)

    def _work(self, fake: Fake, lease: Lease) -> None:
        route = self.route(fake)
        if lease.key.kind is LeaseKind.TRAIN:
            for hop in route:
                for stage in range(hop.first_stage, hop.last_stage + 1):
                    self.fakes[hop.worker_id].accumulated.setdefault(stage, set()).add(lease.key.index)
                self.fakes[hop.worker_id].routes[lease.key.index] = route
            self.say(
                fake, MicrobatchDone(lease.key, route, 64.0 * len(lease.samples), 64 * len(lease.samples))
            )
        else:
            last = self.fakes[route[-1].worker_id]
            self.say(
                last,
                MicrobatchDone(lease.key, route, 2.0 * 64 * len(lease.samples), 64 * len(lease.samples), 65),
            )
        self.say(fake, LeaseRequest(4))

    def _exchange(self, fake: Fake, message: ExchangeOpened) -> None:
        if message.purpose is ExchangePurpose.STATE:
            fake.drifts = False
            self.say(fake, StateReport(fake.version, self.digests(fake), self.core.state.attempt))
            return
        groups = []
        for group in message.groups:
            mine: set[int] = set()
            if group.group.startswith("stage:"):
                mine = fake.accumulated.get(int(group.group.removeprefix("stage:")), set())
            groups.append(PreparedGroup(group.group, tuple(sorted(mine)), 99 + fake.digest_offset, 4.0))
        self.say(fake, Prepared(message.step, message.attempt, tuple(groups)))


def received(fake: Fake, kind: type) -> list[Any]:
    return [message for message in fake.inbox if isinstance(message, kind)]


def spoiled(message: Any, **changes: Any) -> Any:
    return replace(message, **changes)


def attempts_begun(world: World) -> list[tuple[int, int]]:
    """Every (step, attempt) that began, by the log: none may begin twice. A plan with other holders begins none if step
    and attempt go on.
    """
    state, begun = Durable(), []
    for record in world.records:
        before = (state.step, state.attempt)
        fold(state, record, world.config.job.train.batch, world.config.job.tokens_per_sample)
        after = (state.step, state.attempt)
        if isinstance(record, PlanAdopted):
            begins = record.loads or after != before
        else:
            begins = isinstance(record, StepRetried | StepRecorded)
        if begins:
            begun.append(after)
    return begun
