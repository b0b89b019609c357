"""A `PairWorld` whose coordinator is the core of an `async` job, with plans, leases, joins, losses and its log.

Replicas train what they lease, so weights are those of the real ledger; who is lost comes back as a newcomer that
copies a donor, as it does in a swarm. Only the workers' halves of pair rounds are real here: the rest of a worker is a
fake that does at once what it is asked to.
"""

from __future__ import annotations

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.events import WorkerDisconnected
from starlings_coordinator.core.pairing.rounds import StageRounds, Told
from starlings_coordinator.core.streaming.streaming import Streaming
from starlings_protos.messages import LeaseRequest, ToCoordinator, WorkerId
from starlings_protos.pair_messages import PairMatched, RoundOutcome, RoundReady, SlotClock
from support.core_world import Fake, World, config
from support.pair_worker import INNER_STEPS, Worker
from support.pair_world import PairWorld


def job(seed: int, swaps: int, fragments: int) -> CoreConfig:
    """A job that does not end here, of one stage."""
    return config(
        job={"name": "test", "tokens": 10**9, "seed": seed},
        train={"schedule": "async"},
        exchange={
            "every": INNER_STEPS,
            "outer_rate": 1.0,
            "outer_momentum": 0.0,
            "warmup_fraction": 0.0,
            "swaps": swaps,
            "fragments": fragments,
        },
        swarm={"settle_s": 0.5},
    )


class Modest(World):
    """Workers that lease a few microbatches at once."""

    def say(self, fake: Fake, message: ToCoordinator) -> None:
        if not isinstance(message, LeaseRequest) or len(fake.leases) < 2:
            super().say(fake, message)


class CoreSide:
    """What `PairWorld` asks of a coordinator, answered by a `Core`."""

    def __init__(self, core_config: CoreConfig, workers: int, before: CoreSide | None) -> None:
        self.world = (
            before.world
            if before is not None
            else Modest(core_config, {f"w{number}": (0, 0) for number in range(workers)}, stages=1)
        )
        self._told: list[Told] = []
        # By worker: which life is connected, and how many of its messages were passed on.
        self._lives: dict[WorkerId, int] = {}
        self._passed: dict[WorkerId, int] = {}
        if before is None:
            self.world.boot()
        else:
            # Streams are down, and what was in them is lost.
            self._passed = {w: len(fake.inbox) for w, fake in self.world.fakes.items()}
            self.world.restart(after_s=0.0)

    @property
    def streaming(self) -> Streaming:
        schedule = self.world.core.schedule
        assert isinstance(schedule, Streaming)
        return schedule

    @property
    def rounds(self) -> StageRounds:
        return self.streaming.exchanges.stages[0]

    # ---------------------------------------------------------------- as a StageRounds

    def joined(self, worker_id: WorkerId, incarnation: int, region: str, now_s: float) -> list[Told]:
        world = self.world
        world.now_s = now_s
        fake = world.fakes.get(worker_id)
        if fake is not None and fake.incarnation == incarnation:
            world.reconnect(worker_id)
        else:
            world.join(worker_id, lazy=True)
            self._passed[worker_id] = 0
        self._lives[worker_id] = incarnation
        return self._take()

    def left(self, worker_id: WorkerId) -> None:
        """Its stream is over; the core gives it up a moment later."""
        fake = self.world.fakes.get(worker_id)
        if fake is not None and self._lives.get(worker_id) == fake.incarnation:
            self.world.feed(WorkerDisconnected(fake.session, worker_id))
            self.world.settle()

    def ready(
        self, worker_id: WorkerId, incarnation: int, message: RoundReady, tokens_done: int, now_s: float
    ) -> list[Told]:
        self.world.now_s = now_s
        self._say(worker_id, incarnation, message)
        return self._take()

    def outcome(self, worker_id: WorkerId, incarnation: int, message: RoundOutcome) -> None:
        self._say(worker_id, incarnation, message)

    def _say(self, worker_id: WorkerId, incarnation: int, message: RoundReady | RoundOutcome) -> None:
        fake = self.world.fakes.get(worker_id)
        # A stream is one life's.
        if fake is not None and fake.incarnation == incarnation:
            self.world.say(fake, message)
            self.world.settle()

    def look_at_time(self, tokens_done: int, now_s: float) -> list[Told]:
        """Who is silent for too long is found out by `PairWorld`."""
        self.world.now_s = now_s
        self.world.tick(0.0)
        return self._take()

    def holds(self, worker_id: WorkerId, incarnation: int) -> bool:
        fake = self.world.fakes.get(worker_id)
        return (
            fake is not None and fake.incarnation == incarnation and worker_id in self.world.core.state.spans
        )

    def train(self, worker_id: WorkerId, now_s: float) -> int:
        """One inner step's worth of what it has leased. Returns how many samples were reported."""
        world = self.world
        world.now_s = now_s
        done = world.train(worker_id, 1)
        world.say(world.fakes[worker_id], LeaseRequest(2))
        world.settle()
        return sum(len(lease.samples) for lease in done)

    def _take(self) -> list[Told]:
        """What holders were sent of slots and matches since the last look."""
        told: list[Told] = []
        for worker_id, fake in sorted(self.world.fakes.items()):
            fresh = fake.inbox[self._passed.get(worker_id, 0) :]
            self._passed[worker_id] = len(fake.inbox)
            told += [
                (worker_id, message) for message in fresh if isinstance(message, SlotClock | PairMatched)
            ]
        return told


class StreamingWorld(PairWorld):
    def __init__(
        self, seed: int, workers: int, *, swaps: int = 2, fragments: int = 1, **more: object
    ) -> None:
        self._core_config = job(seed, swaps, fragments)
        self._count = workers
        # Samples that were reported, and when, by life.
        self.trained: dict[tuple[WorkerId, int], list[tuple[float, int]]] = {}
        self._rounds_told: set[tuple[int, WorkerId]] = set()
        super().__init__(seed, workers, swaps=swaps, fragments=fragments, **more)  # type: ignore[arg-type]

    def _new_coordinator(self) -> CoreSide:  # type: ignore[override]
        self.side = CoreSide(self._core_config, self._count, getattr(self, "side", None))
        return self.side

    def trains(self, worker: Worker) -> bool:
        """While the coordinator is away it goes on, and nobody hears of it."""
        if not self.side.holds(worker.worker_id, worker.incarnation):
            return False
        if self.coordinator_here and self.side.world.core.phase.value == "training":
            samples = self.side.train(worker.worker_id, self.now_s)
            self.trained.setdefault((worker.worker_id, worker.incarnation), []).append((self.now_s, samples))
        return True

    def _tell(self, told: list[Told]) -> None:
        for worker_id, message in told:
            if isinstance(message, PairMatched):
                once = (message.round_id, worker_id)
                assert once not in self._rounds_told, "a round id came a second time"
                self._rounds_told.add(once)
        super()._tell(told)
