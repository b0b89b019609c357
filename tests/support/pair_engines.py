"""Engines without processes that exchange in pairs: life, device thread, data port and links are the real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import torch

from starlings_compression.codec import Buffer
from starlings_job.exchange_rules import ExchangeRules
from starlings_protos import channels, data_pb2_grpc
from starlings_protos.assignments import CoordinatorClock, assignment_key_der
from starlings_protos.identity import Identity
from starlings_protos.messages import Assignment, Peer, Ready, Span, Stage, ToCoordinator, Welcome, WorkerId
from starlings_protos.pair_messages import PairMatched, SlotClock
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_worker.core.pairing.swap import PairTimings
from starlings_worker.core.pairing.work import PairDeviceEffect, PairDeviceOutcome, PairEncoded, PairKey
from starlings_worker.device import open_device
from starlings_worker.emulation import Throttle
from starlings_worker.engine_life import Life
from starlings_worker.inbound import DataService
from starlings_worker.links import Links
from starlings_worker.meters import Meters
from starlings_worker.pair_device import PairDevice
from starlings_worker.stage import stage_group
from support.scripted_swarm import ScriptedSwarm

T = TypeVar("T")
PATIENCE_S = 30.0
INCARNATION = 1
# A partner that is silent for so long is given up: five seconds would be long for tests.
SILENT_S = 1.0


class Watched(PairDevice):
    """Remembers what it sent and got, longer than it must."""

    def __init__(self, rules: ExchangeRules, vectors: Mapping[int, object]) -> None:
        super().__init__(rules, vectors)  # type: ignore[arg-type]
        self.sent: dict[PairKey, dict[str, bytes]] = {}
        self.arrived: dict[PairKey, dict[str, bytes]] = {}

    def execute(self, effect: PairDeviceEffect) -> PairDeviceOutcome:
        outcome = super().execute(effect)
        if isinstance(outcome, PairEncoded):
            self.sent[outcome.key] = {part.name: bytes(part.data) for part in self.outgoing(outcome.key)}
        return outcome

    def keep(self, key: PairKey, tensors: Mapping[str, Buffer]) -> bool:
        self.arrived[key] = {name: bytes(data) for name, data in tensors.items()}
        return super().keep(key, tensors)


class PairEngine:
    """One worker, in this process."""

    def __init__(self, swarm: ScriptedSwarm, identity: Identity, span: Span) -> None:
        self.swarm, self.identity, self.span = swarm, identity, span
        self.id = WorkerId(identity.id)
        self.said: list[ToCoordinator] = []
        self.bugs: list[str] = []
        self.address = ""
        self.changed = asyncio.Event()
        self._compute = ThreadPoolExecutor(1)
        self._meters = Meters()
        self.links = Links(identity, self._meters)
        self.service = DataService(self._meters)
        self.life: Life

    async def open(self) -> None:
        self._server = channels.make_server(channels.DATA, [RoleGuard(DATA_POLICY)])
        data_pb2_grpc.add_DataServicer_to_server(self.service, self._server)
        port = channels.bind(self._server, "127.0.0.1", 0, channels.server_credentials(self.identity))
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        swarm = self.swarm
        welcome = Welcome(
            1,
            INCARNATION,
            swarm.job.to_json(),
            swarm.job.digest(),
            60.0,
            assignment_key_der(swarm.key),
            time.time(),
            swarm.profile.to_json(),
            False,
        )
        self.life = Life(
            welcome,
            self.id,
            await asyncio.to_thread(open_device, "cpu", "auto"),
            Throttle(0.0),
            self._meters,
            self.links,
            self._compute,
            self._say,
            lambda level, text: None,
            lambda stop: self.bugs.append(stop.reason),
            self.bugs.append,
        )
        self.service.serve(self.life, CoordinatorClock.learnt(time.time(), self.life.now_s))

    async def close(self) -> None:
        self.life.close()
        await self.links.close()
        await self._server.stop(0)
        self._compute.shutdown(wait=True)
        assert not self.bugs

    def _say(self, message: ToCoordinator) -> int:
        self.said.append(message)
        self.changed.set()
        return 0

    async def until(self, found: Callable[[], T | None]) -> T:
        """What `found` gives as soon as it gives something; it is asked whenever this engine has said something."""
        async with asyncio.timeout(PATIENCE_S):
            while (result := found()) is None:
                assert not self.bugs, self.bugs
                self.changed.clear()
                await self.changed.wait()
        return result

    async def next(self, kind: type[T], fits: Callable[[T], bool] = lambda _: True) -> T:
        return await self.until(lambda: next((m for m in self.said if isinstance(m, kind) and fits(m)), None))

    def assign(self, peers: Mapping[str, tuple[str, ...]], stages: tuple[Stage, ...]) -> None:
        self.life.control(
            Assignment(
                1,
                stages,
                self.span,
                0,
                (self.swarm._keeper,),
                tuple(Peer(WorkerId(p), a, self.span, INCARNATION, slots=4) for p, a in peers.items()),
                4,
                False,
                "all",
                (),
                1,
                0,
                0,
                self.swarm.profile.tensor_limit_bytes(self.swarm.job.train.microbatch),
                self.swarm.signed(self.id, self.span),
            )
        )

    # ---------------------------------------------------------------- weights

    def weights(self, stage: int = 0) -> torch.Tensor:
        held = self.life.computer.held
        assert held is not None
        return held.vectors[stage_group(stage)].parameters

    def begin(self, weights: torch.Tensor, rules: ExchangeRules) -> Watched:
        """All weights, and a device that starts at them."""
        held = self.life.computer.held
        assert held is not None
        self.weights().copy_(weights)
        device = Watched(rules, {stage: held.vectors[stage_group(stage)] for stage in self.span.stages})
        self.life.computer.pairs = device
        rounds = self.life.core.meeting.rounds
        assert rounds is not None
        rounds._timings = PairTimings(progress_s=SILENT_S)
        rounds.hold(self.span)
        self.said.clear()
        return device

    def clock(self, slot: int, in_s: float, *, fragments: int = 1, warmup: bool = False) -> None:
        self.life.control(SlotClock(0, slot, in_s, 600.0, fragments, warmup))

    def match(self, key: PairKey, partner: WorkerId, weight: float, deadline_s: float = 20.0) -> None:
        self.life.control(
            PairMatched(
                key.stage, key.slot, key.fragment, key.swap, partner, INCARNATION, weight, deadline_s, key.round_id
            )
        )  # fmt: skip


@asynccontextmanager
async def pair_engines(
    swarm: ScriptedSwarm, span: Span, stages: tuple[Stage, ...]
) -> AsyncIterator[list[PairEngine]]:
    """Two that hold `span`, loaded, and know each other; the swarm's first stranger is in the plan, too."""
    engines = [PairEngine(swarm, swarm.new_identity(), span) for _ in range(2)]
    swarm.strangers = [swarm.new_identity()]
    for engine in engines:
        await engine.open()
    # Nobody listens there.
    addresses = {swarm.strangers[0].id: ("127.0.0.1:9",)} | {e.id: (e.address,) for e in engines}
    for engine in engines:
        engine.assign({i: a for i, a in addresses.items() if i != engine.id}, stages)
    try:
        for engine in engines:
            await engine.next(Ready)
        yield engines
    finally:
        for engine in engines:
            await engine.close()
