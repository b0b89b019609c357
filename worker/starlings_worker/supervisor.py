"""The supervisor: identity, the control stream and one engine per device; without torch.

    code = run_worker(WorkerOptions(invite="starlings://..."))

Per device there is one `DeviceWorker` (device_worker.py) with its own directory, worker id, stream and engine; this
module starts them, passes on signals and sums up how they ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from starlings_protos.errors import StarlingsError
from starlings_protos.invite import Invite, parse_invite
from starlings_protos.notify import Notifier
from starlings_worker.device_classes import device_class
from starlings_worker.device_list import ListedDevice, choose_devices
from starlings_worker.device_worker import INTERRUPTED, DeviceWorker
from starlings_worker.errors import ExitCode, WorkerError
from starlings_worker.options import WorkerEvent, WorkerOptions
from starlings_worker.platform import stop_signals

__all__ = ["run_worker", "worker_directory"]


_TICK_S = 1.0


def worker_directory(job: str) -> Path:
    """Where a worker of that job keeps its files unless told otherwise."""
    return Path(platformdirs.user_data_dir("starlings", appauthor=False)) / "workers" / job


def run_worker(options: WorkerOptions) -> int:
    """Trains with this machine until the job ends or a signal comes; returns the exit code.

    0: the job ended well, or the worker left in order. 130: a second signal ended it at once.

    Raises:
        StarlingsError: why the worker could not start or go on, in one sentence with the fix; it carries the exit
        code. OSError: the directory cannot be written.
    """
    invite = parse_invite(options.invite) if options.invite else None
    directory = _directory(options, invite)
    devices = choose_devices(options.devices)
    if options.emulate:
        device_class(options.emulate)
    notifier = Notifier.from_environment()
    try:
        return asyncio.run(
            _run(
                replace(options, on_event=_also(notifier, options.on_event)),
                invite,
                directory,
                devices,
                notifier,
            )
        )
    finally:
        notifier.close()


def _also(
    notifier: Notifier, listener: Callable[[WorkerEvent], None] | None
) -> Callable[[WorkerEvent], None]:
    """Passes events on to the listener, and to the service manager what is for it."""

    def heard(event: WorkerEvent) -> None:
        notifier.status(event.text)
        if event.kind == "connected":
            notifier.ready()
        if listener is not None:
            listener(event)

    return heard


def _directory(options: WorkerOptions, invite: Invite | None) -> Path:
    if options.directory is not None:
        return options.directory
    if invite is None:
        raise WorkerError(
            ExitCode.USAGE, "Give an invite, or the directory of a worker that has joined (--dir)."
        )
    return worker_directory(invite.job)


async def _run(
    options: WorkerOptions,
    invite: Invite | None,
    directory: Path,
    devices: tuple[ListedDevice, ...],
    notifier: Notifier,
) -> int:
    workers = [
        DeviceWorker(
            options,
            invite,
            # One device keeps the plain directory; several have one each below it.
            directory if len(devices) == 1 else directory / "devices" / device.name.replace(":", "-"),
            device,
            number,
            len(devices),
        )
        for number, device in enumerate(devices)
    ]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    ticking = asyncio.create_task(_tick(notifier, workers))
    signals = 0

    def on_signal(name: str) -> None:
        nonlocal signals
        signals += 1
        notifier.stopping()
        for worker in workers:
            if signals == 1:
                worker.leave(f"{name} received")
            else:
                worker.abandon()

    with _signals(on_signal):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    ticking.cancel()
    notifier.stopping()
    if any(worker.abandoned for worker in workers):
        return INTERRUPTED
    return _sum_up(outcomes)


async def _tick(notifier: Notifier, workers: Sequence[DeviceWorker]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        if all(worker.ending for worker in workers):
            notifier.stopping()
        notifier.tick()


def _sum_up(outcomes: list[BaseException | None]) -> int:
    """0 when every device ended well; else what stopped the first of them, a bug before anything that has a
    sentence.
    """
    failures = [outcome for outcome in outcomes if outcome is not None]
    for failure in failures:
        if not isinstance(failure, StarlingsError | OSError):
            raise failure
    if failures:
        raise failures[0]
    return int(ExitCode.DONE)


@contextlib.contextmanager
def _signals(on_signal: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_signal(name)` on the event loop for each stop signal meanwhile. Only a main thread may do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    for number in stop_signals():
        if sys.platform == "win32":
            before[number] = signal.signal(
                number,
                lambda received, _: loop.call_soon_threadsafe(on_signal, signal.Signals(received).name),
            )
        else:
            loop.add_signal_handler(number, on_signal, number.name)
    try:
        yield
    finally:
        for number in stop_signals():
            if sys.platform == "win32":
                signal.signal(number, before[number])
            else:
                loop.remove_signal_handler(number)
