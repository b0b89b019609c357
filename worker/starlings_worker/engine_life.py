"""One life of an engine: from a Welcome to the next one of a higher incarnation, or to the end.

The loop of the process: events in, `WorkerCore.handle`, effects carried out, whose outcomes are the next
events. Device effects run on the compute thread, one at a time by the core's own rule; transfers are tasks
beside it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, assert_never

from starlings_job.profile import Profile
from starlings_job.spec import JobSpec
from starlings_protos import data_pb2, frames
from starlings_protos.messages import (
    Assignment,
    AssignmentRenewed,
    Heartbeat,
    LeaseGrant,
    ProbeReport,
    Refusal,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerId,
)
from starlings_protos.telemetry import Telemetry
from starlings_worker.computer import Computer
from starlings_worker.core.core import WorkerCore
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    ComputeBackward,
    ComputeForward,
    DeviceEffect,
    DigestState,
    Effect,
    ForgetMicrobatch,
    ForgetPart,
    KeepHistory,
    Load,
    OpenExchange,
    ReducePart,
    ReplayStep,
    SendControl,
    SendMicrobatch,
    SendPart,
    Settle,
    StepStages,
    Stop,
    TakeCopy,
    UpdatePeers,
)
from starlings_worker.core.events import (
    ControlLost,
    ControlReceived,
    ControlRestored,
    Direction,
    DrainRequested,
    Event,
    Leg,
    MicrobatchNotSent,
    MicrobatchSent,
    PartNotSent,
    PartSent,
    Ticked,
)
from starlings_worker.core.groups.work import ForgetGroup, GroupWork, SendGroup
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    SendPair,
    SendWord,
    TakeOuterStep,
)
from starlings_worker.core.streaming.rules import StreamRules
from starlings_worker.core.vitals import heartbeat
from starlings_worker.device import Device
from starlings_worker.emulation import Throttle
from starlings_worker.group_transfers import GroupTransfers
from starlings_worker.links import Links, PushError
from starlings_worker.loader import Donors, Loader
from starlings_worker.meters import Meters
from starlings_worker.pair_transfers import PairTransfers
from starlings_worker.probe import Measured, memory_for_job, probe
from starlings_worker.replayer import Replayer

T = TypeVar("T")
_TICK_S = 0.25
# Heartbeats and counters go to this host's supervisor, which passes the last ones on at the pace of the swarm.
_BEAT_MOST_S = 5.0


class Life:
    """Owns the core and what it decides about. All methods are called on the event loop."""

    def __init__(
        self,
        welcome: Welcome,
        worker_id: WorkerId,
        device: Device,
        throttle: Throttle,
        meters: Meters,
        links: Links,
        compute: Executor,
        say: Callable[[ToCoordinator], int],
        log: Callable[[str, str], None],
        on_stop: Callable[[Stop], None],
        on_bug: Callable[[str], None],
        cache: Path | None = None,
    ) -> None:
        """`say` puts a message on the control stream and returns its bytes; `on_bug` ends the process.

        Raises:
            JobFileError, ProfileError: the Welcome's job or profile makes no sense.
            SpecError: one of the job's codecs needs a library that is missing here.
        """
        self.welcome = welcome
        self.job = JobSpec.from_json(welcome.job_json)
        self.profile = Profile.from_json(welcome.profile_json)
        self.links = links
        self.meters = meters
        self._device = device
        self._throttle = throttle
        self._compute = compute
        self._say = say
        self._log = log
        self._on_stop = on_stop
        self._on_bug = on_bug
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(secrets.randbits(64))
        rules = StreamRules.of(self.job) if self.job.train.streams else None
        self.core = WorkerCore(worker_id, rules=rules)
        self.computer = Computer(worker_id, self.job, device, throttle, meters, cache)
        self._donors = Donors(links)
        self._loader = Loader(self.computer, self._donors, self.profile, self.on_device, log)
        self._replayer = Replayer(self.computer, self._donors, self.on_device, log)
        self._pair_transfers = PairTransfers(links, lambda: self.computer.pairs, self._spawn, self.deliver)
        self._group_transfers = GroupTransfers(links, lambda: self.computer.groups, self._spawn, self.deliver)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at_s = float("inf")
        self.closed = False
        self._spawn(self._tick())
        self._spawn(self._beat())

    @property
    def now_s(self) -> float:
        return self._loop.time()

    async def on_device(self, work: Callable[[], T]) -> T:
        """Runs `work` on the compute thread, after what is queued there."""
        return await self._loop.run_in_executor(self._compute, work)

    def close(self) -> None:
        """The life is over: nothing that is still under way counts, and everything it held is freed."""
        if self.closed:
            return
        self.closed = True
        if self._wake is not None:
            self._wake.cancel()
        for task in self._tasks:
            task.cancel()
        self._compute.submit(self.computer.drop)

    # ---------------------------------------------------------------- what comes in

    def control(self, message: ToWorker) -> None:
        """A message of the control stream, but Welcome."""
        match message:
            case LeaseGrant():
                for lease in message.leases:
                    kept = self.computer.microbatches.entry(lease.key)
                    if kept.records is None:
                        kept.records = lease.records
            case Assignment():
                self.links.set_assignment(message.signed)
            case AssignmentRenewed():
                self.links.set_assignment(message.signed)
            case _:
                pass
        self.deliver(ControlReceived(message))

    def link(self, up: bool) -> None:
        """The control stream is up or down."""
        self.deliver(ControlRestored() if up else ControlLost())

    def drain(self, reason: str, within_s: float) -> None:
        self.deliver(DrainRequested(reason, within_s))

    def deliver(self, event: Event) -> None:
        """Tells the core, and does what it says."""
        if self.closed:
            return
        try:
            for effect in self.core.handle(event, self.now_s, self._rng):
                self._carry_out(effect)
        except Exception:
            self._on_bug(f"handling {type(event).__name__} failed:\n{traceback.format_exc()}")
            return
        self._arm()

    # ---------------------------------------------------------------- effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendControl():
                self.meters.sent("control", self._say(effect.message))
            case SendMicrobatch():
                self._spawn(self._send_microbatch(effect))
            case SendPart():
                self._spawn(self._send_part(effect))
            case SendPair() | SendWord() | ForgetPair():
                self._pair_transfers.carry_out(effect)
            case SendGroup() | ForgetGroup():
                self._group_transfers.carry_out(effect)
            case ForgetMicrobatch():
                self.computer.microbatches.forget(effect.key)
            case ForgetPart():
                if self.computer.exchange is not None:
                    self.computer.exchange.forget(effect.leg, effect.header, effect.sender)
            case UpdatePeers():
                self._meet(effect.assignment)
            case Load():
                self._meet(effect.assignment)
                self._spawn(self._load(effect))
            case ReplayStep():
                self._spawn(self._replay(effect))
            case KeepHistory():
                # In order with the steps that are applied there.
                self._compute.submit(self.computer.keep_history, effect)
            case Stop():
                self._on_stop(effect)
            case (
                ComputeForward()
                | ComputeBackward()
                | ClearGradients()
                | OpenExchange()
                | ReducePart()
                | Assemble()
                | ApplyStep()
                | StepStages()
                | TakeCopy()
                | Settle()
                | AdoptState()
                | DigestState()
                | TakeOuterStep()
                | EncodePair()
                | JudgePair()
                | CommitPair()
                | GroupWork()
            ):
                self._on_compute_thread(effect)
            case _:
                assert_never(effect)

    def _on_compute_thread(self, effect: DeviceEffect) -> None:
        future = self._loop.run_in_executor(self._compute, self.computer.execute, effect)

        def done(finished: asyncio.Future[Event]) -> None:
            if self.closed or finished.cancelled():
                return
            error = finished.exception()
            if error is None:
                self.deliver(finished.result())
                return
            # The weights may be half-changed: only a new life is sure of its state.
            trace = "".join(traceback.format_exception(error))
            self._on_bug(f"{type(effect).__name__} failed:\n{trace}")

        future.add_done_callback(done)

    async def _load(self, effect: Load) -> None:
        self.meters.training_began()
        self.deliver(await self._loader.load(effect))

    async def _replay(self, effect: ReplayStep) -> None:
        self.deliver(await self._replayer.replay(effect))

    def _meet(self, assignment: Assignment) -> None:
        """Who the peers and donors of a new plan are, and where."""
        if assignment.donors or assignment.observer:
            # A newcomer that has just become a holder may still have a step to fetch from those that it observed.
            self._donors.peers = assignment.donors
        self.links.update((*self._donors.peers, *assignment.peers))

    # ---------------------------------------------------------------- transfers out

    async def _send_microbatch(self, effect: SendMicrobatch) -> None:
        key, to, direction = effect.header.key, effect.to, effect.direction
        kept = self.computer.microbatches.get(key)
        forward = direction is Direction.FORWARD
        encoded = None if kept is None else kept.hidden if forward else kept.entry_gradient
        if kept is None or encoded is None or (forward and kept.records is None):
            self.deliver(
                MicrobatchNotSent(direction, key, to, True, Refusal.STALE, "it was forgotten meanwhile")
            )
            return
        tensors, buffers = [], []
        if forward:
            assert kept.records is not None
            count = len(kept.records)
            tensors.append(frames.tensor_header("records", data_pb2.DATA_TYPE_UINT8, (count,), count))
            buffers.append(kept.records)
        tensors.append(
            frames.tensor_header(
                "hidden" if forward else "gradient",
                data_pb2.DATA_TYPE_FLOAT32,
                encoded.shape,
                len(encoded.data),
                codec=encoded.codec,
            )
        )
        buffers.append(encoded.data)
        header = frames.make_header(effect.header, tensors)
        method = "Forward" if forward else "Backward"
        try:
            receipt = await self.links.push(to, method, header, buffers, kind=direction.value)
        except PushError as error:
            outcome: Event = MicrobatchNotSent(direction, key, to, error.certain, error.refusal, str(error))
        else:
            outcome = MicrobatchSent(direction, key, to, receipt)
        self.deliver(outcome)

    async def _send_part(self, effect: SendPart) -> None:
        leg, part, to = effect.leg, effect.header, effect.to
        outgoing = self.computer.exchange.outgoing(leg, part) if self.computer.exchange else None
        if outgoing is None:
            self.deliver(PartNotSent(leg, part, to, Refusal.STALE, "it was dropped meanwhile"))
            return
        codec, count, data = outgoing
        tensor = frames.tensor_header("part", data_pb2.DATA_TYPE_FLOAT32, (count,), len(data), codec=codec)
        method = "Contribute" if leg is Leg.CONTRIBUTION else "Aggregate"
        header = frames.make_header(part, [tensor])
        try:
            await self.links.push(to, method, header, [data], kind="exchange")
        except PushError as error:
            self.deliver(PartNotSent(leg, part, to, error.refusal, str(error)))
        else:
            self.deliver(PartSent(leg, part, to))

    # ---------------------------------------------------------------- probing, time, heartbeats

    async def measure(self, addresses: tuple[str, ...], memory_cap_bytes: int) -> ProbeReport:
        """What the device does with this job's blocks.

        Raises:
            RuntimeError: not even one block fits (torch.OutOfMemoryError), or the device failed.
        """
        measured: Measured = await self.on_device(lambda: probe(self.job, self._device, self._throttle))
        return ProbeReport(
            measured.forward_seconds,
            measured.backward_seconds,
            memory_for_job(self._device, memory_cap_bytes),
            addresses,
        )

    def heartbeat(self) -> Heartbeat:
        return replace(heartbeat(self.core, self.now_s), slowed_by=self._device.slowed_by())

    def telemetry(self) -> Telemetry:
        sample = self.meters.sample(time.time(), self.core.progress, self.core.version)
        if self.core.stream is not None:
            sample = replace(sample, **self.core.stream.figures())
        return Telemetry(self.core.worker_id, self.welcome.incarnation, (sample,))

    async def _beat(self) -> None:
        while True:
            self._say(self.heartbeat())
            self._say(self.telemetry())
            await asyncio.sleep(min(self.welcome.heartbeat_interval_s, _BEAT_MOST_S))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.deliver(Ticked())

    def _arm(self) -> None:
        """Wakes the core when it said so, if that is before the next regular tick."""
        wake_at_s = self.core.wake_at_s
        if wake_at_s is None or wake_at_s >= self._wake_at_s or wake_at_s - self.now_s > _TICK_S:
            return
        if self._wake is not None:
            self._wake.cancel()
        self._wake_at_s = wake_at_s
        # A hair later, so that the core finds the time to have come.
        self._wake = self._loop.call_at(wake_at_s + 0.001, self._wake_up)

    def _wake_up(self) -> None:
        self._wake, self._wake_at_s = None, float("inf")
        self.deliver(Ticked())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.closed:
            self._on_bug("".join(traceback.format_exception(error)))
