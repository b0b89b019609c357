"""Real engine processes under a coordinator that follows a script: no supervisor, no control stream, no core.

It plays all that an engine sees: Welcome, assignments, leases, exchange, commit; and the keeper's data plane.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlings_job.checkpoint import read_block
from starlings_job.prepared import load_prepared, load_profile, weights_url
from starlings_job.records import RecordStore, pack_tokens
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_protos import channels, convert, data_pb2, data_pb2_grpc, messages, pipes, process_pb2
from starlings_protos.assignments import assignment_key_der, sign_assignment
from starlings_protos.authority import CertificateAuthority
from starlings_protos.identity import KEEPER, Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.messages import (
    Assignment,
    AssignmentClaim,
    ExchangeGroup,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    Heartbeat,
    Lease,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchKey,
    Peer,
    Prepared,
    ProbeReport,
    Ready,
    SignedAssignment,
    Span,
    Stage,
    StateReport,
    StateWanted,
    StepCommitted,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerId,
)
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_protos.state_transfer import ServedBlock, StateTensor, state_frames
from starlings_protos.telemetry import Telemetry

T = TypeVar("T")


class _KeeperService(data_pb2_grpc.DataServicer):
    def __init__(self) -> None:
        self.url = ""
        self.requests = 0

    async def FetchState(
        self, request: data_pb2.StateRequest, context: object
    ) -> AsyncIterator[data_pb2.Frame]:
        self.requests += 1
        for block in request.blocks:
            raw = read_block(self.url, 0, block)
            tensors = [StateTensor(n, t.data_type, t.shape, t.data) for n, t in sorted(raw.items())]
            for frame in state_frames([ServedBlock(0, block, tensors)], request.offset):
                yield frame


@dataclass
class Engine:
    """One engine process."""

    identity: Identity
    process: asyncio.subprocess.Process
    addresses: tuple[str, ...] = ()
    numeric_class: str = ""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    probe: ProbeReport | None = None
    span: Span | None = None
    observes: bool = False
    inbox: asyncio.Queue[ToCoordinator] = field(default_factory=asyncio.Queue)
    failure: str = ""
    log: list[str] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.Task[None] | None = None

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.identity.id)

    def send(self, message: process_pb2.ToEngine) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(pipes.pack(message))

    def say(self, record: ToWorker) -> None:
        envelope = process_pb2.ToEngine()
        convert.body_to_proto(record, envelope.control)
        self.send(envelope)

    async def read(self) -> None:
        assert self.process.stdout is not None
        while (message := await pipes.read(self.process.stdout, process_pb2.FromEngine)) is not None:
            match message.WhichOneof("body"):
                case "started":
                    self.addresses = tuple(message.started.addresses)
                    self.numeric_class = message.started.numeric_class
                    self.started.set()
                case "control":
                    record = convert.body_from_proto(message.control, messages.ToCoordinator)
                    if isinstance(record, Heartbeat):
                        self.heartbeat = record
                    elif not isinstance(record, Telemetry):
                        self.inbox.put_nowait(record)
                case "log":
                    self.log.append(message.log.text)
                case "failed":
                    self.failure = message.failed.message
                case "finished":
                    self.finished.set()
        self.started.set()
        self.finished.set()

    async def next(self, kind: type[T], within_s: float = 60.0) -> T:
        """The next message of that kind; LeaseRequests in between are skipped."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                message = await asyncio.wait_for(self.inbox.get(), deadline - time.monotonic())
            except TimeoutError:
                raise AssertionError(
                    f"{self.id} sent no {kind.__name__}; {self.failure}; {self.log}"
                ) from None
            if isinstance(message, kind):
                return message
            assert isinstance(message, LeaseRequest), f"{self.id}: {message} instead of {kind.__name__}"


class ScriptedSwarm:
    """`async with ScriptedSwarm(job_directory) as swarm: await swarm.start({}, {})`: two engines.

    Engines are dear (an import of torch each): `use` gives all a new life, with the same job or another.
    """

    def __init__(self, job_directory: Path, engine_module: str = "starlings_worker.engine") -> None:
        self.key = new_key()
        self.engine_module = engine_module
        self.engines: list[Engine] = []
        self.plan_version = 0
        self.incarnation = 1
        self.strangers: list[Identity] = []  # In the plan as well, and no engines.
        self.keeper_service = _KeeperService()
        self._adopt(job_directory)
        self.authority = CertificateAuthority.create(self.job.job.name, time.time())

    def _adopt(self, job_directory: Path) -> None:
        self.directory = job_directory
        self.job = load_prepared(job_directory)
        self.profile = load_profile(job_directory)
        self.store = RecordStore(job_directory)
        self.stages: tuple[Stage, ...] = ()
        self.keeper_service.url = weights_url(job_directory)

    async def use(self, job_directory: Path) -> None:
        """A new incarnation of every engine, in this job."""
        self.store.close()
        self._adopt(job_directory)
        self.incarnation += 1
        for engine in self.engines:
            engine.span, engine.observes = None, False
            self.welcome(engine, probe_now=False)
            while not engine.inbox.empty():
                engine.inbox.get_nowait()

    async def __aenter__(self) -> ScriptedSwarm:
        keeper = self.authority.issue_identity(KEEPER, time.time())
        self._server = channels.make_server(channels.DATA, [RoleGuard(DATA_POLICY)])
        data_pb2_grpc.add_DataServicer_to_server(self.keeper_service, self._server)
        port = channels.bind(self._server, "127.0.0.1", 0, channels.server_credentials(keeper))
        await self._server.start()
        self._keeper = Peer(WorkerId("keeper"), (f"127.0.0.1:{port}",))
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self.engines:
            if engine.process.returncode is None:
                engine.process.kill()
            await engine.process.wait()
            if engine.reader is not None:
                await engine.reader
        await self._server.stop(None)
        self.store.close()

    # ---------------------------------------------------------------- engines

    def new_identity(self) -> Identity:
        key = new_key()
        peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
        pem = self.authority.issue(key.public_key(), peer, time.time())
        return Identity(peer, key_to_pem(key), pem, self.authority.certificate_pem)

    async def start(self, *environments: Mapping[str, str], **settings: Any) -> list[Engine]:
        """One engine per environment, welcomed and measured one after the other."""
        engines = []
        command = (sys.executable, "-m", self.engine_module, str(os.getpid()))
        for environment in environments:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **environment},
            )
            engine = Engine(self.new_identity(), process)
            engine.reader = asyncio.create_task(engine.read())
            start = process_pb2.StartEngine(
                worker_id=engine.id,
                key_pem=engine.identity.key_pem,
                certificate_pem=engine.identity.certificate_pem,
                ca_pem=engine.identity.ca_pem,
                device="cpu",
                listen_host="127.0.0.1",
                threads=1,
                **settings,
            )
            engine.send(process_pb2.ToEngine(start=start))
            engines.append(engine)
        self.engines += engines
        for engine in engines:
            async with asyncio.timeout(60):
                await engine.started.wait()
            assert engine.addresses, engine.failure
            self.welcome(engine)
            engine.probe = await engine.next(ProbeReport)
        self.engines.sort(key=lambda e: e.id)
        return engines

    def welcome(self, engine: Engine, *, probe_now: bool = True) -> None:
        engine.say(
            Welcome(
                1,
                self.incarnation,
                self.job.to_json(),
                self.job.digest(),
                0.2,
                assignment_key_der(self.key),
                time.time(),
                self.profile.to_json(),
                probe_now,
            )
        )

    # ---------------------------------------------------------------- the plan

    async def assign(
        self,
        stages: Sequence[Stage],
        spans: Mapping[WorkerId, Span],
        *,
        slots: int = 4,
        recompute: bool = False,
        version: int = 0,
        donors: Sequence[Engine] = (),
    ) -> dict[WorkerId, Ready]:
        """A plan; returns what the holders report. Without `donors` the keeper gives version 0."""
        self.stages, self.plan_version = tuple(stages), self.plan_version + 1
        holders = [e for e in self.engines if e.id in spans]
        for engine in holders:
            engine.span = spans[engine.id]
        for engine in holders:
            engine.say(self.assignment(engine, version, donors, slots=slots, recompute=recompute))
        return {e.id: await e.next(Ready) for e in holders}

    def assignment(
        self,
        engine: Engine,
        version: int,
        donors: Sequence[Engine] = (),
        *,
        slots: int = 4,
        recompute: bool = False,
        observer: bool = False,
    ) -> Assignment:
        """Of `engine.span`, among those that hold one."""
        assert engine.span is not None
        peers = [Peer(WorkerId(s.id), (), Span(0, 0), self.incarnation) for s in self.strangers]
        peers += (
            Peer(e.id, e.addresses, e.span, self.incarnation, slots=slots)
            for e in self.engines
            if e is not engine and e.span is not None and not e.observes
        )
        return Assignment(
            self.plan_version,
            self.stages,
            engine.span,
            version,
            tuple(Peer(d.id, d.addresses, d.span) for d in donors) or (self._keeper,),
            tuple(peers),
            slots,
            recompute,
            "all",
            (),
            1,
            version,
            0,
            self.profile.tensor_limit_bytes(self.job.train.microbatch),
            self.signed(engine.id, engine.span),
            observer,
        )

    def observe(self, engine: Engine, span: Span, version: int, donors: Sequence[Engine]) -> None:
        """`engine` catches up from `version`, which its donors were told to keep."""
        engine.span, engine.observes = span, True
        engine.say(self.assignment(engine, version, donors, observer=True))

    def admit(self, engine: Engine, version: int) -> None:
        """It takes part from step `version` on."""
        engine.observes = False
        self.plan_version += 1
        for holder in self.holding:
            holder.say(self.assignment(holder, version))

    @property
    def holding(self) -> list[Engine]:
        return [e for e in self.engines if e.span is not None and not e.observes]

    def signed(self, worker_id: str, span: Span | None, **changes: Any) -> SignedAssignment:
        """The coordinator's word for a worker; `changes` go into the claim."""
        values = {
            "job": self.job.job.name,
            "worker_id": worker_id,
            "incarnation": self.incarnation,
            "plan_version": self.plan_version,
            "span": span,
            "not_before_s": time.time() - 60,
            "expires_s": time.time() + 900,
            "role": "worker",
        }
        return sign_assignment(self.key, AssignmentClaim(**{**values, **changes}))

    def holders(self, stage: int) -> list[Engine]:
        return [e for e in self.holding if e.span is not None and stage in e.span]

    # ---------------------------------------------------------------- steps

    async def step(
        self, step: int, attempt: int = 0, *, snapshot: bool = False
    ) -> tuple[float, list[Prepared]]:
        """One whole step; returns the mean loss and what the holders prepared."""
        dones, denominator = await self.microbatches(step, attempt)
        prepared = await self.exchange(step, attempt, dones)
        norm = math.sqrt(sum(self.group_norms(prepared).values()))
        clip = self.job.train.clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        rate = learning_rate(self.job.train, step, self.job.steps_total)
        for engine in self.engines:
            engine.say(StepCommitted(step, attempt, rate, factor, norm, snapshot))
        return sum(d.loss_sum for d in dones) / denominator, prepared

    async def microbatches(self, step: int, attempt: int) -> tuple[list[MicrobatchDone], float]:
        train = self.job.train
        samples = samples_of_step(self.job.job.seed, self.store.population, step, train.batch)
        denominator = float(self.store.target_count(samples))
        entrances = self.holders(0)
        count = self.job.microbatches_per_step
        for index in range(count):
            ids = tuple(samples[index * train.microbatch : (index + 1) * train.microbatch])
            key = MicrobatchKey(LeaseKind.TRAIN, step, attempt, index)
            lease = Lease(key, ids, denominator, 60.0, self.store.read(ids))
            entrances[index % len(entrances)].say(LeaseGrant((lease,)))
        return await self.collect(entrances, count), denominator

    async def collect(self, engines: Sequence[Engine], count: int) -> list[MicrobatchDone]:
        """`count` MicrobatchDone of any of `engines`."""
        dones: list[MicrobatchDone] = []

        async def listen(engine: Engine) -> None:
            while True:
                dones.append(await engine.next(MicrobatchDone, 60))
                if len(dones) == count:
                    raise _Enough

        tasks = [asyncio.create_task(listen(e)) for e in engines]
        try:
            await asyncio.gather(*tasks)
        except _Enough:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return dones

    def groups(self, weights: Mapping[str, Mapping[WorkerId, float]]) -> dict[str, ExchangeGroup]:
        names = {f"stage:{s}": self.holders(s) for s in range(len(self.stages))}
        if self.profile.tied_count and len(self.stages) > 1:
            ends = {e.id: e for e in (*self.holders(0), *self.holders(len(self.stages) - 1))}
            names["tied"] = [ends[i] for i in sorted(ends)]
        return {
            name: ExchangeGroup(
                name,
                tuple(
                    ExchangeMember(e.id, weights.get(name, {}).get(e.id, 0.0), 1 / len(members))
                    for e in members
                ),
            )
            for name, members in names.items()
        }

    async def exchange(
        self,
        step: int,
        attempt: int,
        dones: Sequence[MicrobatchDone],
        purpose: ExchangePurpose = ExchangePurpose.GRADIENT,
    ) -> list[Prepared]:
        weights: dict[str, dict[WorkerId, float]] = {}
        for done in dones:
            for hop in done.route:
                for stage in range(hop.first_stage, hop.last_stage + 1):
                    weights.setdefault(f"stage:{stage}", {})[hop.worker_id] = 1.0
        last = f"stage:{len(self.stages) - 1}"
        weights["tied"] = {**weights.get("stage:0", {}), **weights.get(last, {})}
        groups = self.groups(weights)
        for engine in self.holding:
            mine = tuple(
                g for _, g in sorted(groups.items()) if any(m.worker_id == engine.id for m in g.members)
            )
            engine.say(ExchangeOpened(step, attempt, mine, 30.0, purpose))
        prepared = [await e.next(Prepared) for e in self.holding]
        self.check(prepared)
        return prepared

    def check(self, prepared: Sequence[Prepared]) -> None:
        """Every stage has each microbatch once; all members of a group assembled the same bits."""
        indices: dict[str, list[int]] = {}
        digests: dict[str, set[int]] = {}
        for report in prepared:
            for group in report.groups:
                indices.setdefault(group.group, []).extend(group.microbatches)
                digests.setdefault(group.group, set()).add(group.aggregate_digest)
        for name, found in indices.items():
            if name != "tied":
                assert sorted(found) == list(range(self.job.microbatches_per_step)), (name, found)
        assert all(len(d) == 1 for d in digests.values()), digests

    @staticmethod
    def group_norms(prepared: Sequence[Prepared]) -> dict[str, float]:
        """Squared norm of each group, from its member with the lowest id (engines are sorted)."""
        norms: dict[str, float] = {}
        for report in prepared:
            for group in report.groups:
                norms.setdefault(group.group, group.squared_norm)
        return norms

    async def state(self, version: int, *, snapshot: bool = False) -> list[StateReport]:
        for engine in self.holding:
            engine.say(StateWanted(version, snapshot))
        return [await e.next(StateReport) for e in self.holding]

    # ---------------------------------------------------------------- after training

    async def evaluate(self) -> float:
        """Mean loss over all held-out samples, through the pipeline."""
        count = self.store.held_out_count // 2
        for index in range(count):
            ids = (2 * index, 2 * index + 1)
            key = MicrobatchKey(LeaseKind.EVALUATE, 0, 0, index)
            lease = Lease(key, ids, 1.0, 60.0, self.store.read_held_out(ids))
            self.holders(0)[0].say(LeaseGrant((lease,)))
        dones = await self.collect(self.holders(len(self.stages) - 1), count)
        return sum(d.loss_sum for d in dones) / sum(d.target_count for d in dones)

    async def generate(self, tokens: Sequence[int], passes: int) -> list[int]:
        out = list(tokens)
        for number in range(passes):
            key = MicrobatchKey(LeaseKind.GENERATE, number, 0, 0)
            self.holders(0)[0].say(LeaseGrant((Lease(key, (), 1.0, 60.0, pack_tokens(out, 1)),)))
            (done,) = await self.collect(self.holders(len(self.stages) - 1), 1)
            out.append(done.next_token)
        return out


class _Enough(Exception):
    pass
