"""One device's worker, as its supervisor sees it: a membership, a control stream, an engine that may be restarted.

Order of a life: membership (joined, renewed or found) -> the engine starts and says what it is -> the stream opens
with that in its Hello -> Welcome goes to the engine -> everything else is passed on, unchanged, until Finish.
"""

from __future__ import annotations

import asyncio
import platform
import random
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from starlings_protos import control_pb2, process_pb2
from starlings_protos.assignments import CoordinatorClock
from starlings_protos.identity import Identity
from starlings_protos.invite import Invite
from starlings_protos.messages import EngineDown, Hello, Leaving, WorkerId
from starlings_protos.version import PROTOCOL_MAX, PROTOCOL_MIN, package_version
from starlings_worker.addresses import WILDCARDS, host_id, host_on_the_way_to, own_hosts
from starlings_worker.bus import WorkerBus
from starlings_worker.control_stream import ControlStream
from starlings_worker.desk import Desk
from starlings_worker.device_classes import DeviceClass, device_class
from starlings_worker.device_list import ListedDevice
from starlings_worker.engine_child import EngineChild, EngineEnd
from starlings_worker.engine_keeper import EngineKeeper, EnginePlace, start_settings
from starlings_worker.enrol import Enrolled, ensure_membership, keep_renewed
from starlings_worker.errors import ExitCode, WorkerError
from starlings_worker.handing_over import HandingOver
from starlings_worker.lock import lock_directory
from starlings_worker.membership import Membership
from starlings_worker.narrator import Narrator, last_line
from starlings_worker.options import WorkerEvent, WorkerOptions
from starlings_worker.own_relay import relay_wish
from starlings_worker.reach import WorkerReach
from starlings_worker.reports import Reports

# Exit code of a worker that was told to end at once: what shells report for a program that Ctrl-C ended.
INTERRUPTED = 130
# After Finish the engine ends by itself within this time, or is ended.
FINISH_WITHIN_S = 20.0
# What is still to be said when the worker ends gets this long.
LAST_WORDS_WITHIN_S = 2.0
# A worker that holds nothing waits this long for the coordinator's goodbye.
GOODBYE_WITHIN_S = 5.0


class DeviceWorker:
    """Runs until the job is over for this device. All methods are called on the event loop."""

    def __init__(
        self,
        options: WorkerOptions,
        invite: Invite | None,
        directory: Path,
        device: ListedDevice,
        number: int,
        device_count: int,
    ) -> None:
        """`number`: position among the host's devices, which decides the port to try first."""
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._invite = invite
        self._directory = directory
        self._device = device
        self._number = number
        self._device_count = device_count
        self._class: DeviceClass | None = device_class(options.emulate) if options.emulate else None
        self._narrator = Narrator(self._tell)
        # While the directory is locked: what commands of this machine see and ask.
        self._desk: Desk | None = None
        self._rng = random.Random(secrets.randbits(64))
        self._nonce = secrets.randbits(63) + 1
        self._membership: Membership | None = None
        self._keeper: EngineKeeper | None = None
        self._stream: ControlStream | None = None
        # Of the present life: kept until the engine can take it.
        self._welcome: control_pb2.Welcome | None = None
        # The stream was up before, and is not now.
        self._cut_off = False
        self._bus = WorkerBus(
            self._identity,
            lambda: self._membership.job if self._membership else "",
            self._bus_changed,
            self._hinted,
        )
        self._reports = Reports(self._say_now, self._look_after_engine, self._bus, self._rng)
        self._reach = WorkerReach(
            self._identity,
            options.listen_host,
            lambda: self._keeper.addresses if self._keeper is not None else (),
            lambda report: self._stream is not None and self._stream.say(report),
            self._narrator,
            self._rng,
            relay_wish(options, directory, number),
        )
        self._job_digest = ""
        # What to tell the coordinator when the stream is up: the engine's end.
        self._untold_end: EngineDown | None = None
        self._leaving: str | None = None
        # Somebody wanted it to end at once.
        self.abandoned = False
        self._finish: control_pb2.Finish | None = None
        # The coordinator's clock, as of its last Welcome.
        self._clock = CoordinatorClock(0.0)
        # The engine is gone, and what it left behind is served.
        self._handing_over: HandingOver | None = None
        self._side_tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()

    # ---------------------------------------------------------------- the whole life

    async def run(self) -> None:
        """Returns when the job ended well or the worker left in order.

        Raises:
            StarlingsError: anything else, as one sentence with the fix. OSError: the directory cannot be written.
        """
        lock = lock_directory(self._directory)
        self._desk = Desk(self._directory, self._options.drain_s)
        tasks = [self._task(self._desk.serve(self._asked_to_leave))]
        exit_code = int(ExitCode.DONE)
        try:
            enrolled = await self._joined()
            if enrolled is None:
                return
            self._membership = enrolled.membership
            self._narrator.worker_id = enrolled.membership.worker_id
            if enrolled.notice:
                self._narrator.tell("notice", enrolled.notice)
            text = f"This machine takes part in {enrolled.membership.job} as {self.worker_id}."
            self._narrator.tell("joined", text)
            await self._prepare_engine(enrolled.membership)
            tasks += [
                self._task(self._keep_engine()),
                self._task(self._keep_stream()),
                self._task(self._reports.run()),
                self._task(self._renew()),
            ]
            await self._over
        except Exception as error:
            exit_code = int(getattr(error, "exit_code", ExitCode.BUG))
            self._narrator.tell("failed", str(error), {"exit_code": exit_code})
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._reach.close()
            if self._handing_over is not None:
                await self._handing_over.end()
            await asyncio.to_thread(self._bus.close)
            self._desk.end(INTERRUPTED if self.abandoned else exit_code)
            lock.release()

    def _tell(self, event: WorkerEvent) -> None:
        if self._desk is not None:
            self._desk.heard(event)
        if self._options.on_event is not None:
            self._options.on_event(event)

    def _asked_to_leave(self, now: bool) -> None:
        """By a command on this machine."""
        if now:
            self.abandon()
        else:
            self.leave("asked to by `starlings leave`")

    async def _joined(self) -> Enrolled | None:
        """The membership; None when a signal came first."""
        joining = asyncio.create_task(ensure_membership(self._directory, self._invite))
        waiting: set[asyncio.Future[Any]] = {joining, self._over}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            return None
        return joining.result()

    async def _prepare_engine(self, membership: Membership) -> None:
        options = self._options
        hosts: tuple[str, ...] = ()
        if not options.advertise and options.listen_host in WILDCARDS:
            coordinator = membership.control_addresses[0]
            hosts = own_hosts(await asyncio.to_thread(host_on_the_way_to, coordinator.host, coordinator.port))
        place = EnginePlace(self._device.name, self._number, self._device_count, hosts)
        self._keeper = EngineKeeper(
            self._directory / "engine.log",
            lambda: start_settings(options, self._class, place, self._identity(), self._directory),
            self._engine_said,
        )

    @property
    def _engine(self) -> EngineChild | None:
        return self._keeper.engine if self._keeper is not None else None

    def leave(self, reason: str) -> None:
        """Leave in order: no new work, what is in flight is finished, then the run ends; within the options' time."""
        if self._leaving is not None or self._over.done():
            return
        self._leaving = reason
        self._bus.leaving(reason)
        within_s = self._options.drain_s
        self._narrator.tell("leaving", f"Leaving in order: {reason}. A second signal ends it at once.")
        if self._engine is not None and self._engine.welcomed:
            drain = process_pb2.Drain(reason=reason, within_s=within_s)
            self._background(self._engine.send(process_pb2.ToEngine(drain=drain)))
            self._loop.call_later(within_s, self._end_well, f"{reason}; the time for leaving in order is up")
        elif self._stream is not None and self._stream.say(Leaving(reason, within_s)):
            # Nothing of the job is held here: the coordinator says goodbye at once.
            self._loop.call_later(min(within_s, GOODBYE_WITHIN_S), self._end_well, reason)
        else:
            self._end_well(reason)

    def abandon(self) -> None:
        """End now, whatever is lost."""
        self.abandoned = True
        if self._engine is not None:
            self._engine.kill()
        self._end_well("told to end at once")

    @property
    def ending(self) -> bool:
        return self._leaving is not None or self._over.done()

    @property
    def worker_id(self) -> str:
        return self._membership.worker_id if self._membership is not None else ""

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A part of this worker: its failure is the worker's."""
        task = asyncio.get_running_loop().create_task(work)

        def done(finished: asyncio.Task[None]) -> None:
            if finished.cancelled() or (error := finished.exception()) is None:
                return
            self._end_badly(error)

        task.add_done_callback(done)
        return task

    def _end_well(self, reason: str) -> None:
        if not self._over.done():
            if self._handing_over is not None:
                account = self._handing_over.account(released=self._finish is not None)
                reason = f"{reason}; {account}" if account else reason
            self._narrator.tell(
                "left" if self._finish is None or not self._finish.done else "finished", reason
            )
            self._over.set_result(None)

    def _end_badly(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # ---------------------------------------------------------------- the engine

    async def _keep_engine(self) -> None:
        assert self._keeper is not None
        end = await self._keeper.run(
            self._engine_crashed, lambda: self._leaving is None and self._finish is None
        )
        if end.handed_over is not None and self._leaving is not None:
            await self._hand_over(end.handed_over)
        elif end.finished:
            self._end_well(end.reason)
        elif self._leaving is not None:
            self._end_well(f"{self._leaving}; {last_line(end.reason)}")
        elif self._finish is not None:
            self._finished_without_engine()
        else:
            if self._stream is not None:
                await self._stream.flush(LAST_WORDS_WITHIN_S)
            self._end_badly(WorkerError(end.exit_code, last_line(end.reason)))

    async def _hand_over(self, left: process_pb2.HandedOver) -> None:
        """The device is free. What the engine left is served until Finish comes or the time is up."""
        assert self._keeper is not None
        assert self._keeper.known is not None
        identity, welcome = self._identity(), self._welcome
        self._handing_over = HandingOver(left, self._directory / "engine.log")
        self._narrator.tell(
            "handing_over",
            f"The device is free; {left.byte_count / 1e9:.2f} GB of state went to the disk in {left.seconds:.1f} s "
            "and are handed over from there.",
            {"version": left.report.version, "bytes": left.byte_count, "seconds": left.seconds},
        )
        failure = await self._handing_over.start(
            process_pb2.StartHandover(
                key_pem=identity.key_pem,
                certificate_pem=identity.certificate_pem,
                ca_pem=identity.ca_pem,
                listen_host=self._options.listen_host,
                listen_port=int(self._keeper.known.addresses[0].rpartition(":")[2]),
                assignment_key_der=welcome.assignment_key_der if welcome is not None else b"",
                job=self._membership.job if self._membership is not None else "",
                wall_time_s=self._clock.wall_s(time.monotonic()),
            )
        )
        if failure:
            self._narrator.tell("log", f"The state cannot be handed over: {failure}", {"level": "warning"})
        self._report_left_state()

    def _report_left_state(self) -> None:
        """The engine's last report: only now can be fetched what it names."""
        if self._handing_over is not None and self._stream is not None:
            self._stream.send(control_pb2.ToCoordinator(state_report=self._handing_over.left.report))

    def _heard_after_the_engine(self, kind: str | None) -> None:
        """A message for the engine that has left."""
        if kind == "state_wanted":
            self._report_left_state()
        elif kind in ("assignment", "exchange_opened", "step_committed") and self._stream is not None:
            # The plan still counts on this worker: it must not wait for it.
            self._stream.say(EngineDown("its device is free already, because it leaves", False))

    def _engine_crashed(self, end: EngineEnd, restarting: bool) -> None:
        text = last_line(end.reason)
        self._narrator.tell("engine_down", text, {"restarting": restarting})
        down = EngineDown(text, restarting, end.at)
        self._bus.reported(control_pb2.ToCoordinator(engine_down=control_pb2.EngineDown(reason=text)))
        # The Welcome was the ended engine's; the answer to EngineDown brings the next.
        self._welcome = None
        if self._stream is None or not self._stream.say(down):
            self._untold_end = down

    def _engine_said(self, message: process_pb2.FromEngine) -> None:
        match message.WhichOneof("body"):
            case "started":
                self._narrator.engine_started(message.started)
                self._reach.report()
                if self._welcome is not None:
                    self._background(self._pass_welcome())
            case "control":
                if not self._reports.heard(message.control) and self._stream is not None:
                    self._narrator.reported(message.control)
                    self._bus.reported(message.control)
                    self._stream.send(message.control)
            case "log":
                self._narrator.tell("log", message.log.text, {"level": message.log.level})

    # ---------------------------------------------------------------- the stream

    async def _keep_stream(self) -> None:
        """Opens the stream once the engine has said what it is, and keeps it up."""
        assert self._membership is not None
        assert self._keeper is not None
        await self._keeper.ready()
        self._stream = ControlStream(
            self._membership.control_addresses,
            self._identity,
            self._hello,
            self._coordinator_said,
            self._stream_down,
            self._rng,
        )
        await self._stream.run(lambda text: self._narrator.tell("reconnecting", text))

    def _identity(self) -> Identity:
        assert self._membership is not None
        return self._membership.identity

    def _hello(self) -> Hello:
        options = self._options
        started = self._keeper.known if self._keeper is not None else None
        name = self._device.product if started is None else started.device
        emulating = f" (emulating {self._class.name})" if self._class is not None else ""
        hello = Hello(
            WorkerId(self.worker_id),
            PROTOCOL_MIN,
            PROTOCOL_MAX,
            package_version(),
            self._job_digest,
            started.numeric_class if started is not None else "",
            host_id(),
            options.site or host_id(),
            options.region,
            f"{name}{emulating}",
            self._class.name if self._class is not None else self._device.class_name,
            time.time(),
            self._nonce,
            self._welcome.incarnation if self._welcome is not None else 0,
            platform.node()[:64],
        )
        self._bus.describe(hello)
        return hello

    async def _coordinator_said(self, message: control_pb2.ToWorker) -> None:
        kind = message.WhichOneof("body")
        self._bus.ordered(message)
        if kind == "welcome":
            await self._welcomed(message.welcome)
            return
        if self._reach.heard(message):
            return
        if kind == "finish":
            self._finish = message.finish
            asyncio.get_running_loop().call_later(FINISH_WITHIN_S, self._finished_without_engine)
        if kind == "drain_order":
            self.leave(f"the job's owner asked it to: {message.drain_order.reason}")
            return
        if kind == "job_paused" and self._welcome is not None:  # for an engine that has yet to start
            pause = message.job_paused
            self._welcome.paused, self._welcome.pause_reason = pause.paused, pause.reason
        if kind == "heartbeat_ack":
            self._reports.keep_pace(message.heartbeat_ack.heartbeat_interval_s)
        self._narrator.ordered(message)
        if self._engine is not None and self._engine.welcomed:
            await self._engine.pass_on(message)
        elif kind == "finish":
            self._finished_without_engine()
        elif self._handing_over is not None:
            self._heard_after_the_engine(kind)

    async def _welcomed(self, welcome: control_pb2.Welcome) -> None:
        self._job_digest = welcome.job_digest
        self._clock = CoordinatorClock.learnt(welcome.wall_time_s, time.monotonic())
        self._reports.welcomed(welcome)
        self._bus.open(welcome.job_json)
        self._reach.report()
        self._narrator.welcomed(welcome, first=self._welcome is None, again=self._cut_off)
        self._cut_off = False
        if self._untold_end is not None and self._stream is not None:
            # The engine of the life that this Welcome goes on with ended while the stream was down.
            self._stream.say(self._untold_end)
            self._untold_end = None
            return
        self._welcome = welcome
        if self._handing_over is not None and self._leaving is not None and self._stream is not None:
            self._stream.say(Leaving(self._leaving, self._options.drain_s))
            self._report_left_state()
            return
        await self._pass_welcome()

    async def _pass_welcome(self) -> None:
        """The Welcome to the engine, as soon as both are there."""
        engine, welcome = self._engine, self._welcome
        if engine is None or welcome is None or self._keeper is None or self._keeper.started is None:
            return
        engine.welcome()
        for message in (control_pb2.ToWorker(welcome=welcome), *self._reach.kept):
            await engine.pass_on(message)
        await engine.send(process_pb2.ToEngine(link=process_pb2.ControlLink(up=True)))
        if self._leaving is not None:
            drain = process_pb2.Drain(reason=self._leaving, within_s=self._options.drain_s)
            await engine.send(process_pb2.ToEngine(drain=drain))

    async def _stream_down(self, reason: str) -> None:
        self._cut_off = True
        if self._engine is not None:
            await self._engine.send(process_pb2.ToEngine(link=process_pb2.ControlLink(up=False)))

    def _finished_without_engine(self) -> None:
        """Finish has come, and the engine does not, or cannot, act on it."""
        if self._finish is None:
            return
        if self._finish.done or self._leaving is not None:
            self._end_well(self._finish.reason)
        else:
            self._end_badly(WorkerError(ExitCode.BUG, f"The job has ended: {self._finish.reason}."))

    def _say_now(self, message: control_pb2.ToCoordinator) -> bool:
        return self._stream is not None and self._stream.send(message)

    def _bus_changed(self, line: str) -> None:
        """On the bus's thread."""
        self._loop.call_soon_threadsafe(self._narrator.tell, "bus", line)

    def _hinted(self) -> None:
        """On the bus's thread."""
        self._loop.call_soon_threadsafe(lambda: self._stream.hurry() if self._stream is not None else None)

    def _look_after_engine(self) -> None:
        if self._engine is not None:
            self._engine.look_after()

    async def _renew(self) -> None:
        assert self._membership is not None

        def deliver(membership: Membership) -> None:
            self._membership = membership
            self._narrator.tell("renewed", "The certificate was renewed.")
            self._background(self._reach.renewed())
            if self._engine is not None:
                renewed = process_pb2.RenewedCertificate(certificate_pem=membership.identity.certificate_pem)
                self._background(self._engine.send(process_pb2.ToEngine(certificate=renewed)))

        await keep_renewed(
            self._membership, self._directory, deliver, report=lambda text: self._narrator.tell("log", text)
        )
