"""The supervisor's side of leaving something behind: a process serves it, and what became of it is said."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

from starlings_protos import pipes, process_pb2
from starlings_worker.child_process import start_child

# What the child process runs.
HANDOVER_MODULE = "starlings_worker.handover"
# Until it serves; a cold disk and a loaded machine are slow.
START_WITHIN_S = 30.0
_GB = 1e9


class HandingOver:
    """From the engine's end to the goodbye."""

    def __init__(self, left: process_pb2.HandedOver, log_path: Path) -> None:
        self.left = left
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self.fetched: set[str] = set()
        self.failure = ""

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def _blocks(self) -> set[str]:
        return (
            {p.stem for p in Path(self.left.directory).glob("*.safetensors")}
            if self.left.directory
            else set()
        )

    async def start(self, start: process_pb2.StartHandover) -> str:
        """Serves what was left; returns why that is not possible, or ""."""
        if not self.left.directory:
            return ""
        start.directory, start.version = self.left.directory, self.left.report.version
        with self._log_path.open("ab") as log:
            self._process = await start_child(HANDOVER_MODULE, log)
        self._reader = asyncio.create_task(self._read())
        await self._send(process_pb2.ToHandover(start=start))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WITHIN_S):
                await self._serving.wait()
                return self.failure
        return f"it did not serve within {START_WITHIN_S:.0f} s"

    async def _send(self, message: process_pb2.ToHandover) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(pipes.pack(message))
            await self._process.stdin.drain()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(pipes.PipeError):
            while (message := await pipes.read(self._process.stdout, process_pb2.FromHandover)) is not None:
                match message.WhichOneof("body"):
                    case "serving":
                        self._serving.set()
                    case "fetched":
                        self.fetched.add(message.fetched.block)
                    case "failed":
                        self.failure = message.failed.message
                    case _:
                        pass
        self.failure = self.failure or f"the process that serves it ended; see {self._log_path}"
        self._serving.set()

    async def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    def account(self, *, released: bool) -> str:
        """What became of it, for people; "" when nothing was left. Files that nobody needs any more are removed.

        Args:
            released: the coordinator said that this worker may go. What is asked for by then was fetched.
        """
        if not self.left.directory:
            return ""
        blocks = self._blocks
        if released and self.fetched:
            shutil.rmtree(Path(self.left.directory).parent, ignore_errors=True)
            return f"its state of {self.left.byte_count / _GB:.2f} GB was handed over"
        missing = len(blocks - self.fetched)
        return (
            f"of its state (version {self.left.report.version}, {self.left.byte_count / _GB:.2f} GB) {missing} of "
            f"{len(blocks)} blocks were not fetched in time; it lies in {self.left.directory}"
        )
