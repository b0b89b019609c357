"""The engine after its imports: opens the device and the data port, then lives as the supervisor's messages
say.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import grpc.aio
import torch

from starlings_compression.errors import SpecError
from starlings_job.errors import JobError
from starlings_job.profile import ProfileError
from starlings_protos import channels, control_pb2, convert, data_pb2_grpc, messages, process_pb2
from starlings_protos.assignments import CoordinatorClock
from starlings_protos.errors import StarlingsError
from starlings_protos.identity import Identity
from starlings_protos.messages import HeartbeatAck, Welcome, WorkerId
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_protos.reach_messages import Routes
from starlings_protos.stream_messages import JobPaused
from starlings_worker.addresses import reachable_addresses
from starlings_worker.core.effects import Stop
from starlings_worker.device import Device, open_device
from starlings_worker.emulation import Throttle
from starlings_worker.engine_life import Life
from starlings_worker.engine_pipe import EnginePipe
from starlings_worker.errors import ExitCode
from starlings_worker.inbound import DataService
from starlings_worker.links import Links
from starlings_worker.meters import Meters
from starlings_worker.uplink import LinkClass, Uplink

# How many ports after the wished one are tried when it is taken: engines of one host count upward.
_PORTS_TRIED = 64
# A device that is still at an earlier life's work after so long never ends it.
HUNG_AFTER_S = 60.0


class EngineProcess:
    """What outlives a life: device, data port, links, compute thread."""

    def __init__(self, start: process_pb2.StartEngine, pipe: EnginePipe) -> None:
        self._start = start
        self._pipe = pipe
        self._worker_id = WorkerId(start.worker_id)
        self._identity = Identity.from_pem(start.key_pem, start.certificate_pem, start.ca_pem)
        self._meters = Meters()
        link = LinkClass(start.emulate_upload_bytes_per_s, start.emulate_delay_s)
        self._uplink = Uplink(link, start.max_upload_bytes_per_s)
        self._service = DataService(self._meters, uplink=self._uplink)
        self._throttle = Throttle(0.0)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._ended: asyncio.Event = asyncio.Event()
        self._exit_code = 0
        self._life: Life | None = None
        self._probing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._device: Device | None = None
        self._links: Links | None = None
        self._addresses: tuple[str, ...] = ()

    async def run(self) -> int:
        """Until the supervisor, the core or a failure ends it; returns the exit code."""
        server: grpc.aio.Server | None = None
        # Messages that come before everything is open wait in this list.
        self._pipe.start(self._received, self._supervisor_gone)
        try:
            self._device = await self._on_compute_thread_open()
            clock = time.thread_time if self._device.torch.type == "cpu" else time.monotonic
            self._throttle = Throttle(self._start.emulate_speed, clock, pass_s=self._start.emulate_pass_s)
            server = await self._listen()
            self._links = Links(self._identity, self._meters, uplink=self._uplink)
            self._announce()
            await self._ended.wait()
        except StarlingsError as error:
            self._fail(error.exit_code, str(error))
        except Exception:
            self._fail(ExitCode.BUG, traceback.format_exc())
        await self._close(server)
        return self._exit_code

    async def _on_compute_thread_open(self) -> Device:
        """On the thread that will compute, so that a GPU's context is made by its user."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compute, open_device, self._start.device or "cpu", self._start.precision or "auto"
        )

    async def _listen(self) -> grpc.aio.Server:
        server = channels.make_server(channels.DATA, [RoleGuard(DATA_POLICY)])
        data_pb2_grpc.add_DataServicer_to_server(self._service, server)
        host, wished = self._start.listen_host or "0.0.0.0", self._start.listen_port
        credentials = channels.server_credentials(lambda: self._identity)
        for port in range(wished, wished + _PORTS_TRIED) if wished else (0,):
            try:
                bound = channels.bind(server, host, port, credentials)
                break
            except StarlingsError as error:
                if error.exit_code != ExitCode.PORT_BUSY or port == wished + _PORTS_TRIED - 1:
                    raise
        await server.start()
        self._addresses = reachable_addresses(host, bound, tuple(self._start.advertise))
        return server

    def _announce(self) -> None:
        assert self._device is not None
        self._pipe.send(
            process_pb2.FromEngine(
                started=process_pb2.EngineStarted(
                    addresses=self._addresses,
                    numeric_class=self._device.numeric_class,
                    device=self._device.product_name,
                )
            )
        )

    async def _close(self, server: grpc.aio.Server | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._life is not None:
            self._life.close()
        if self._links is not None:
            await self._links.close()
        if server is not None:
            # A moment for the answers that are on their way.
            await server.stop(grace=0.5)
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._pipe.close()

    # ---------------------------------------------------------------- the supervisor's messages

    def _received(self, message: process_pb2.ToEngine) -> None:
        try:
            self._dispatch(message)
        except SpecError as error:
            self._fail(ExitCode.MISMATCH, f"this worker cannot encode as the job says: {error}")
        except (StarlingsError, JobError, ProfileError, ValueError) as error:
            self._fail(ExitCode.MISMATCH, f"the coordinator's message makes no sense here: {error}")

    def _dispatch(self, message: process_pb2.ToEngine) -> None:
        match message.WhichOneof("body"):
            case "control":
                record = convert.body_from_proto(message.control, messages.ToWorker)
                if isinstance(record, Welcome):
                    self._welcomed(record)
                elif isinstance(record, HeartbeatAck):
                    self._service.set_clock(self._clock_from(record.wall_time_s))
                elif isinstance(record, Routes):
                    if self._links is not None:
                        self._links.reroute(record.routes)
                elif self._life is not None:
                    self._life.control(record)
            case "link":
                if self._life is not None:
                    self._life.link(message.link.up)
            case "drain":
                if self._life is not None:
                    self._life.drain(message.drain.reason, message.drain.within_s)
                else:
                    self._finish(f"{message.drain.reason}; nothing was begun")
            case "certificate":
                pem = message.certificate.certificate_pem
                self._identity = Identity.from_pem(self._identity.key_pem, pem, self._identity.ca_pem)
                if self._links is not None:
                    self._links.set_identity(self._identity)
            case "shutdown":
                self._finish(message.shutdown.reason)
            case other:
                self._pipe.log("warning", f"a message of kind {other} from the supervisor is not understood")

    def _welcomed(self, welcome: Welcome) -> None:
        """The first Welcome, or a newer one: a new incarnation is a new life."""
        clock = self._clock_from(welcome.wall_time_s)
        self._service.set_clock(clock)
        if self._life is None or self._life.welcome.incarnation != welcome.incarnation:
            assert self._device is not None
            assert self._links is not None
            if self._life is not None:
                self._pipe.log("info", f"a new life begins: incarnation {welcome.incarnation}")
                self._life.close()
                if self._watching is not None:
                    self._watching.cancel()
                self._watching = asyncio.get_running_loop().create_task(self._device_answers())
            if self._probing is not None:
                self._probing.cancel()
                self._probing = None
            self._life = Life(
                welcome,
                self._worker_id,
                self._device,
                self._throttle,
                self._meters,
                self._links,
                self._compute,
                self._pipe.send_control,
                self._pipe.log,
                self._stopped,
                lambda text: self._fail(ExitCode.BUG, text),
                Path(self._start.cache_directory) if self._start.cache_directory else None,
            )
            self._service.serve(self._life, clock)
        # It may have begun or ended while nobody could be told.
        self._life.control(JobPaused(welcome.paused, welcome.pause_reason))
        if welcome.probe_now and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe(self._life))

    async def _device_answers(self) -> None:
        """What was begun for an earlier life comes to an end, or this process does: the coordinator gave that life up
        perhaps because the device hangs, and then only another process can do better.
        """
        free = asyncio.get_running_loop().run_in_executor(self._compute, lambda: None)
        try:
            await asyncio.wait_for(free, HUNG_AFTER_S)
        except TimeoutError:
            self._fail(
                ExitCode.BUG,
                f"the device hangs: what it began in an earlier life has not ended after {HUNG_AFTER_S:.0f} s",
            )

    async def _probe(self, life: Life) -> None:
        try:
            report = await life.measure(self._addresses, self._start.memory_bytes)
            if life is self._life:
                self._pipe.send_control(report)
        except torch.OutOfMemoryError as error:
            self._fail(
                ExitCode.NO_DEVICE,
                f"not even one block of the model fits into this device's memory: {str(error).splitlines()[0]}",
            )
        except Exception:
            self._fail(ExitCode.BUG, f"measuring the device failed:\n{traceback.format_exc()}")
        finally:
            self._probing = None

    @staticmethod
    def _clock_from(wall_time_s: float) -> CoordinatorClock:
        return CoordinatorClock.learnt(wall_time_s, asyncio.get_running_loop().time())

    # ---------------------------------------------------------------- ends

    def _stopped(self, stop: Stop) -> None:
        if stop.done or stop.drained:
            self._finish(stop.reason, self._handed_over(stop))
        else:
            self._fail(ExitCode.BUG, stop.reason)

    def _handed_over(self, stop: Stop) -> process_pb2.HandedOver | None:
        left = self._life.computer.left_behind if self._life is not None else None
        if stop.handed_over is None or left is None:
            return None
        return process_pb2.HandedOver(
            report=convert.to_proto(stop.handed_over, control_pb2.StateReport()),  # type: ignore[arg-type]
            directory=str(left.directory or ""),
            byte_count=left.byte_count,
            seconds=left.seconds,
        )

    def _finish(self, reason: str, handed_over: process_pb2.HandedOver | None = None) -> None:
        if not self._ended.is_set():
            finished = process_pb2.EngineFinished(reason=reason, handed_over=handed_over)
            self._pipe.send(process_pb2.FromEngine(finished=finished))
            self._ended.set()

    def _fail(self, exit_code: int, message: str) -> None:
        if self._ended.is_set():
            return
        print(message, file=sys.stderr, flush=True)
        self._exit_code = int(exit_code)
        failed = process_pb2.EngineFailed(exit_code=self._exit_code, message=message)
        self._pipe.send(process_pb2.FromEngine(failed=failed))
        self._ended.set()

    def _supervisor_gone(self, reason: str) -> None:
        print(reason, file=sys.stderr, flush=True)
        self._exit_code = self._exit_code or int(ExitCode.BUG)
        self._ended.set()


def run_engine(start: process_pb2.StartEngine, incoming: BinaryIO, outgoing: BinaryIO) -> int:
    """The engine's whole life; returns the exit code.

    Args:
        incoming, outgoing: the pipe, after the first message was read.
    """
    if start.threads:
        torch.set_num_threads(start.threads)
    torch.manual_seed(secrets.randbits(63))

    async def main() -> int:
        return await EngineProcess(start, EnginePipe(incoming, outgoing)).run()

    return asyncio.run(main())
