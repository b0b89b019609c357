"""A coordinator in this event loop with real ports and children, and workers that follow a script over real mTLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import grpc.aio

from starlings_coordinator.children import Child
from starlings_coordinator.keeper.service import Admission, KeeperService
from starlings_coordinator.options import CoordinatorOptions
from starlings_coordinator.run import serve
from starlings_job.state import block_digest
from starlings_protos import control_pb2, control_pb2_grpc, data_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.channels import DATA, bind, control_channel, make_server, server_credentials
from starlings_protos.convert import body_from_proto, body_to_proto
from starlings_protos.identity import Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.messages import (
    Assignment,
    ExchangeOpened,
    Finish,
    Hello,
    Hop,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    Prepared,
    PreparedGroup,
    ProbeReport,
    Ready,
    StateReport,
    StateWanted,
    StepCommitted,
    StepRestarted,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerId,
)
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_protos.state_transfer import ServedBlock, StateTensor
from support.prepared_job import block_state

T = TypeVar("T")
WITHIN_S = 30.0


async def until(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """Waits for a condition with a deadline; nothing here sleeps and hopes."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        await asyncio.sleep(0.02)


@dataclass
class Running:
    """A coordinator that listens."""

    directory: Path
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    task: asyncio.Task[int] | None = None

    def observe(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.told.append((kind, dict(fields)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self.told if k == kind]

    @property
    def listening(self) -> dict[str, Any]:
        return self.of("listening")[0]

    @property
    def control(self) -> str:
        return str(self.listening["control"][0])

    @property
    def authority(self) -> CertificateAuthority:
        return CertificateAuthority.load_or_create(self.directory / "ca", "test", time.time())

    def owner(self) -> tuple[control_pb2_grpc.ControlStub, grpc.aio.Channel]:
        channel = control_channel(self.control, Identity.load(self.directory / "owner"))
        return control_pb2_grpc.ControlStub(channel), channel

    def worker_identity(self, role: Role = Role.WORKER) -> Identity:
        key = new_key()
        peer = PeerIdentity(key_id(key.public_key(), role), role)
        pem = self.authority.issue(key.public_key(), peer, time.time())
        return Identity(peer, key_to_pem(key), pem, self.authority.certificate_pem)


async def _no_child(child: Child[Any, Any]) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def childless(directory: Path, **options: Any) -> AsyncIterator[Running]:
    """A coordinator without planner and keeper: streams and commands work, nothing trains."""
    with patch.object(Child, "run", _no_child):
        async with coordinator(directory, **options) as running:
            yield running


@asynccontextmanager
async def coordinator(directory: Path, **options: Any) -> AsyncIterator[Running]:
    """Runs until the block ends (or the job does)."""
    running = Running(directory)
    chosen = CoordinatorOptions(directory, listen_host="127.0.0.1", **options)
    running.task = asyncio.create_task(serve(chosen, running.observe))
    try:
        task = running.task
        await until(lambda: running.of("listening") or task.done(), "the ports")
        if task.done():
            await task
        yield running
    finally:
        if running.of("ended"):
            # It leaves by itself. Interrupted in that, it would leave its servers behind, and their ports.
            await asyncio.wait({running.task}, timeout=WITHIN_S)
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)


class ScriptedWorker:
    """One control stream. `messages` collects what came; `play` answers as a lone worker that holds every stage."""

    def __init__(self, running: Running, identity: Identity | None = None, *, nonce: int = 1) -> None:
        self.running = running
        self.identity = identity or running.worker_identity()
        self.worker_id = WorkerId(self.identity.id)
        self.nonce = nonce
        self.channel = control_channel(running.control, self.identity)
        self.call: Any = control_pb2_grpc.ControlStub(self.channel).Session()
        self.messages: list[Any] = []
        self.samples: list[tuple[int, ...]] = []
        self.records: list[bytes] = []
        self.assignment: Assignment | None = None
        self.finish: Finish | None = None
        self.version = 0
        # From this step on it keeps its leases and says nothing, until `go_on`.
        self.hold_at_step = 1 << 30
        self.held: list[Any] = []
        self.indices: dict[int, list[int]] = {}
        self.donor: FakeDonor | None = None
        self.reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ScriptedWorker:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.gather(self.reading, return_exceptions=True)
        await self.channel.close()
        if self.donor is not None:
            await self.donor.close()

    def hello(self, worker_id: str | None = None) -> Hello:
        return Hello(
            WorkerId(worker_id or self.worker_id), 1, 1, "test", numeric_class="cpu", session_nonce=self.nonce
        )

    async def say(self, message: ToCoordinator) -> None:
        await self.call.write(body_to_proto(message, control_pb2.ToCoordinator()))

    async def read(self) -> Any:
        """The next message; None at the end of the stream. Raises what the stream raises."""
        message = await asyncio.wait_for(self.call.read(), WITHIN_S)
        if not isinstance(message, control_pb2.ToWorker):
            return None
        record = body_from_proto(message, ToWorker)
        self.messages.append(record)
        return record

    async def expect(self, cls: type[T]) -> T:
        while (message := await self.read()) is not None:
            if isinstance(message, cls):
                return message
        raise AssertionError(f"the stream ended before a {cls.__name__}; got {self.messages}")

    async def ending(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end of the stream: status and refusal's number."""
        try:
            while await self.read() is not None:
                pass
        except grpc.aio.AioRpcError:
            pass
        code = await self.call.code()
        trailing = dict(tuple(await self.call.trailing_metadata() or ()))
        return code, str(trailing.get("starlings-refusal", ""))

    def seen(self, cls: type[T]) -> list[T]:
        return [m for m in self.messages if isinstance(m, cls)]

    # ------------------------------------------------------------------ a whole job

    def begin(self) -> None:
        self.reading = asyncio.create_task(self.play())

    async def play(self) -> None:
        """Hello, then answers everything until Finish or the end of the stream."""
        await self.say(self.hello())
        while self.finish is None and (message := await self.read()) is not None:
            await self.answer(message)
        await self.call.done_writing()

    async def answer(self, message: Any) -> None:
        match message:
            case Welcome(probe_now=True):
                self.donor = self.donor or await FakeDonor.open(self.running, self.identity, message)
                seconds = {"embed": 0.01, "layer": 0.01, "head": 0.01}
                await self.say(ProbeReport(seconds, seconds, 1 << 33, (self.donor.address,)))
            case Assignment():
                self.assignment, self.version = message, message.version
                self.indices.clear()
                await self.say(Ready(message.plan_version, message.version, self.digests(message.version)))
                await self.say(LeaseRequest(4))
            case LeaseGrant():
                for lease in message.leases:
                    if lease.key.kind is LeaseKind.TRAIN and lease.key.step >= self.hold_at_step:
                        self.held.append(lease)
                        continue
                    self.samples.append(lease.samples)
                    self.records.append(lease.records)
                    await self._train(lease)
                await self.say(LeaseRequest(4))
            case StepRestarted():
                self.indices.clear()
            case ExchangeOpened():
                groups = tuple(
                    PreparedGroup(g.group, tuple(sorted(self.indices.get(message.step, ()))), 7, 1.0)
                    for g in message.groups
                )
                await self.say(Prepared(message.step, message.attempt, groups))
            case StepCommitted():
                self.version = message.step + 1
            case StateWanted():
                await self.say(StateReport(message.version, self.digests(message.version)))
            case Finish():
                self.finish = message

    async def go_on(self) -> None:
        self.hold_at_step = 1 << 30
        for lease in self.held:
            await self._train(lease)
        self.held.clear()

    async def _train(self, lease: Any) -> None:
        assert self.assignment is not None
        last = len(self.assignment.stages) - 1
        if lease.key.kind is LeaseKind.TRAIN:
            self.indices.setdefault(lease.key.step, []).append(lease.key.index)
        hops = (Hop(self.worker_id, 0, last),)
        await self.say(MicrobatchDone(lease.key, hops, 2.5 * 32, 32, next_token=ord("x")))

    def digests(self, version: int) -> dict[str, str]:
        assert self.assignment is not None
        names = self.block_names()
        return {name: block_digest(block_state(name, version)) for name in names}

    def block_names(self) -> tuple[str, ...]:
        from support.prepared_job import block_names

        return block_names()


class FakeLibrary:
    """State by its recipe, at any version; `spoil` may change what is served."""

    def __init__(self) -> None:
        self.spoil: Callable[[ServedBlock], ServedBlock] = lambda block: block
        self.served_blocks: list[tuple[int, str]] = []

    def served(self, version: int, block: str, *, optimizer: bool) -> ServedBlock:
        self.served_blocks.append((version, block))
        tensors = block_state(block, version, optimizer=optimizer)
        return self.spoil(
            ServedBlock(
                version,
                block,
                tuple(StateTensor(n, t.data_type, t.shape, t.data) for n, t in sorted(tensors.items())),
            )
        )


class FakeDonor:
    """A worker's data port that serves `FakeLibrary`."""

    def __init__(self, server: grpc.aio.Server, address: str, library: FakeLibrary) -> None:
        self.server = server
        self.address = address
        self.library = library

    @classmethod
    async def open(cls, running: Running, identity: Identity, welcome: Welcome) -> FakeDonor:
        return await open_donor(identity, running.listening["job"], welcome.assignment_key_der)

    async def close(self) -> None:
        await self.server.stop(0)


async def open_donor(identity: Identity, job: str, assignment_key_der: bytes) -> FakeDonor:
    library = FakeLibrary()
    server = make_server(DATA, [RoleGuard(DATA_POLICY)])
    service = KeeperService(library, Admission(job, assignment_key_der), now_wall_s=time.time)  # type: ignore[arg-type]
    data_pb2_grpc.add_DataServicer_to_server(service, server)
    port = bind(server, "127.0.0.1", 0, server_credentials(identity))
    await server.start()
    return FakeDonor(server, f"127.0.0.1:{port}", library)
