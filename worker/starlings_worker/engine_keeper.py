"""Keeps one engine running: started, started again after a crash at most three times, later and later, then given
up.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from starlings_protos import process_pb2
from starlings_protos.identity import Identity
from starlings_worker import black_box
from starlings_worker.device_classes import DeviceClass
from starlings_worker.engine_child import EngineChild, EngineEnd
from starlings_worker.options import WorkerOptions

# Pauses before the first, second and third restart of an engine.
RESTART_PAUSES_S = (1.0, 5.0, 25.0)
# An engine that ran this long was healthy: earlier failures are forgotten.
HEALTHY_AFTER_S = 1800.0
# Imports and the device's first use; a cold disk and a loaded machine are slow.
START_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Which of the host's devices an engine computes on."""

    device: str
    # Position among the host's devices, which decides the port to try first.
    number: int
    device_count: int
    # Addresses of this machine to tell peers, when the user named none.
    own_hosts: tuple[str, ...] = ()


def start_settings(
    options: WorkerOptions,
    emulated: DeviceClass | None,
    place: EnginePlace,
    identity: Identity,
    directory: Path,
) -> process_pb2.StartEngine:
    """What an engine is told first."""
    threads = options.threads
    if threads == 0:
        # Processor time is what an emulated device is slowed down by, and it is counted on one thread.
        threads = (
            1
            if emulated is not None or options.emulate_pass_s
            else max(1, _usable_cores() // place.device_count)
        )
    return process_pb2.StartEngine(
        worker_id=identity.id,
        key_pem=identity.key_pem,
        certificate_pem=identity.certificate_pem,
        ca_pem=identity.ca_pem,
        device=place.device,
        listen_host=options.listen_host,
        listen_port=options.listen_port + place.number if options.listen_port else 0,
        advertise=options.advertise or place.own_hosts,
        emulate_speed=emulated.relative_speed if emulated is not None else 0.0,
        memory_bytes=options.memory_bytes or (emulated.memory_bytes if emulated is not None else 0),
        threads=threads,
        precision=options.precision,
        cache_directory=str(directory / "cache"),
        emulate_upload_bytes_per_s=options.emulate_link.bytes_per_s,
        emulate_delay_s=options.emulate_link.delay_s,
        emulate_pass_s=options.emulate_pass_s,
        max_upload_bytes_per_s=options.max_upload_bytes_per_s / place.device_count,
    )


class EngineKeeper:
    """Owns the engine process of one worker."""

    def __init__(
        self,
        log_path: Path,
        settings: Callable[[], process_pb2.StartEngine],
        on_message: Callable[[process_pb2.FromEngine], None],
    ) -> None:
        """
        Args:
            settings: asked at each start, because the certificate may have been renewed.
            on_message: every message of the engine but its last words; `started` is set before it hears of that.
        """
        self._log_path = log_path
        self._settings = settings
        self._on_message = on_message
        self._ready = asyncio.Event()
        self.engine: EngineChild | None = None
        # What the running engine said of itself; None until it is ready.
        self.started: process_pb2.EngineStarted | None = None
        # The same, also while the next engine is on its way.
        self.known: process_pb2.EngineStarted | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the data port, also while the next engine is on its way."""
        return tuple(self.known.addresses) if self.known is not None else ()

    async def run(self, on_crash: Callable[[EngineEnd, bool], None], wanted: Callable[[], bool]) -> EngineEnd:
        """Returns the end that is not followed by a restart.

        Args:
            on_crash: told of each end that was not in order, and whether another engine follows.
            wanted: whether, after an end, another engine would be of use.
        """
        failures = 0
        while True:
            began = time.monotonic()
            end = await self._one_engine()
            end = replace(end, at=black_box.take(self._log_path.with_name(black_box.FILE)))
            if end.finished or not wanted():
                return end
            if time.monotonic() - began > HEALTHY_AFTER_S:
                failures = 0
            restarting = end.restart_may_cure and failures < len(RESTART_PAUSES_S)
            on_crash(end, restarting)
            if not restarting:
                return (
                    end if failures == 0 else replace(end, reason=f"{end.reason} (after {failures} restarts)")
                )
            await asyncio.sleep(RESTART_PAUSES_S[failures])
            failures += 1

    async def ready(self) -> process_pb2.EngineStarted:
        """What the engine said of itself, once it is ready for the first time."""
        while self.known is None:
            self._ready.clear()
            await self._ready.wait()
        return self.known

    async def _one_engine(self) -> EngineEnd:
        engine = EngineChild(self._said, self._log_path)
        self.engine, self.started = engine, None
        timer = asyncio.get_running_loop().call_later(START_WITHIN_S, self._too_late, engine)
        try:
            await engine.start(self._settings())
            return await engine.wait()
        finally:
            timer.cancel()
            self.engine = self.started = None
            await engine.put_away()

    def _said(self, message: process_pb2.FromEngine) -> None:
        if message.WhichOneof("body") == "started":
            self.started = self.known = message.started
            self._ready.set()
        self._on_message(message)

    def _too_late(self, engine: EngineChild) -> None:
        if self.engine is engine and self.started is None:
            engine.kill(f"the engine was not ready within {START_WITHIN_S:.0f} s")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
