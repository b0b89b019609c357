"""The supervisor's handle on one engine process: start it, talk to it, learn how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from starlings_protos import control_pb2, pipes, process_pb2
from starlings_protos.messages import MicrobatchKey
from starlings_worker.child_process import start_child
from starlings_worker.errors import ExitCode
from starlings_worker.platform import memory_kills

# What the child process runs; it speaks starlings_protos.pipes.
ENGINE_MODULE = "starlings_worker.engine"
# The log of the engines before the present one is kept up to this size.
_LOG_LIMIT_BYTES = 8 << 20
# After a request to end, this long until the process is killed.
_END_WITHIN_S = 10.0
# An engine that says nothing for this long, although its loop sends heartbeats, hangs.
SILENT_FOR_S = 60.0
# Time to write where it hangs into the log, before the process is killed.
_LAST_LOOK_S = 3.0
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """How an engine ended."""

    # The engine said that it was done, in order.
    finished: bool
    exit_code: int
    # For people, with figures: signal, memory, the engine's own last words.
    reason: str
    # Whether another engine may fare better.
    restart_may_cure: bool
    # What it left on the disk for others to fetch.
    handed_over: process_pb2.HandedOver | None = None
    # The training microbatch that its device was at.
    at: MicrobatchKey | None = None


class EngineChild:
    """One engine process, from its start to its end.

    `on_message` is called on the event loop for every message but the last words.
    """

    def __init__(self, on_message: Callable[[process_pb2.FromEngine], None], log_path: Path) -> None:
        self._on_message = on_message
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._failed: process_pb2.EngineFailed | None = None
        self._finished: process_pb2.EngineFinished | None = None
        self._memory_kills_before = -1
        # The most memory that the process was seen to use.
        self._peak_bytes = 0
        self._heard_at_s = 0.0
        self._looked_at_s = 0.0
        # Why this side ended the process, if it did.
        self._ended_because = ""
        self._welcomed = False

    @property
    def welcomed(self) -> bool:
        """Whether the present life's Welcome was passed on: before that the engine must not see other messages."""
        return self._welcomed

    def welcome(self) -> None:
        """From now on the engine is expected to send heartbeats."""
        self._welcomed = True
        self._heard_at_s = time.monotonic()

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, settings: process_pb2.StartEngine) -> None:
        """Starts the process and sends its settings.

        Raises:
            OSError: the process cannot be started, or the log cannot be written.
        """
        self._memory_kills_before = memory_kills()
        with _open_log(self._log_path) as log:
            self._process = await start_child(ENGINE_MODULE, log)
        await self.send(process_pb2.ToEngine(start=settings))

    async def send(self, message: process_pb2.ToEngine) -> None:
        """Waits while the engine does not read. To an engine that has ended, nothing is sent."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(pipes.pack(message))
            await self._process.stdin.drain()

    async def pass_on(self, message: control_pb2.ToWorker) -> None:
        """A message of the control stream, as it came."""
        await self.send(process_pb2.ToEngine(control=message))

    async def wait(self) -> EngineEnd:
        """Reads the engine's messages until it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while (message := await pipes.read(self._process.stdout, process_pb2.FromEngine)) is not None:
                self._heard_at_s = time.monotonic()
                match message.WhichOneof("body"):
                    case "failed":
                        self._failed = message.failed
                    case "finished":
                        self._finished = message.finished
                    case _:
                        self._on_message(message)
        except pipes.PipeError as error:
            self.kill(f"the engine wrote nonsense into its pipe: {error}")
        try:
            async with asyncio.timeout(_END_WITHIN_S):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()
            status = await self._process.wait()
        return self._verdict(status)

    async def put_away(self) -> None:
        """Kills the process if it still runs, and waits for its end."""
        self.kill()
        if self._process is not None:
            await self._process.wait()

    def kill(self, because: str = "") -> None:
        self._ended_because = self._ended_because or because
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def look_after(self) -> None:
        """To be called now and then: notes what the engine uses, and ends one that hangs."""
        self._look_at_memory()
        now_s = time.monotonic()
        if now_s - self._looked_at_s > SILENT_FOR_S / 3:
            # This process was stopped itself, or just began to look: what was said meanwhile is read first.
            self._heard_at_s = now_s
        self._looked_at_s = now_s
        silent_s = now_s - self._heard_at_s
        if self.welcomed and silent_s > SILENT_FOR_S and not self._ended_because:
            self._ended_because = f"the engine hung: it said nothing for {silent_s:.0f} s"
            if self._process is not None and self._process.returncode is None:
                # Makes a Python process write its stacks to its standard error (faulthandler).
                with contextlib.suppress(ProcessLookupError, ValueError):
                    self._process.send_signal(getattr(signal, "SIGABRT", signal.SIGTERM))
            asyncio.get_running_loop().call_later(_LAST_LOOK_S, self.kill)

    def _look_at_memory(self) -> None:
        """Notes how much memory the engine uses now: the figure to give when the kernel kills it for that."""
        with contextlib.suppress(psutil.Error):
            self._peak_bytes = max(self._peak_bytes, psutil.Process(self.process_id).memory_info().rss)

    def _verdict(self, status: int) -> EngineEnd:
        if self._finished is not None:
            left = self._finished.handed_over if self._finished.HasField("handed_over") else None
            return EngineEnd(True, 0, self._finished.reason, False, left)
        if self._failed is not None:
            code = int(self._failed.exit_code) or int(ExitCode.BUG)
            return EngineEnd(False, code, self._failed.message, code == ExitCode.BUG)
        reason = self._ended_because or f"the engine ended with status {status}"
        if status < 0 and not self._ended_because:
            reason = f"the engine was ended by {_signal_name(-status)}"
            if -status == getattr(signal, "SIGKILL", 9) and self._killed_for_memory():
                free = psutil.virtual_memory().available / _GIB
                reason = (
                    "the kernel's out-of-memory killer ended the engine: it used "
                    f"{self._peak_bytes / _GIB:.1f} GB, {free:.1f} GB are free now; give it a cap with --memory"
                )
        return EngineEnd(False, int(ExitCode.BUG), f"{reason}; see {self._log_path}", True)

    def _killed_for_memory(self) -> bool:
        return 0 <= self._memory_kills_before < memory_kills()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _open_log(path: Path) -> BinaryIO:
    """The engines' standard error, appended; a file that has grown large is begun anew."""
    if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
        os.replace(path, path.with_suffix(".old.log"))
    return path.open("ab")
