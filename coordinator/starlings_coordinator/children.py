"""Child processes that speak protobuf over their pipes: started, watched, restarted with backoff, ended with us.

A child ends when its standard input ends, so it dies with this process however this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

from google.protobuf.message import Message

from starlings_protos import pipes
from starlings_protos.errors import clean_text

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A child that lived this long was well: the next restart is quick again.
WELL_AFTER_S = 60.0
# A Ctrl-C in the terminal is for us: we end our children in order.
if sys.platform == "win32":
    _CREATION_FLAGS = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _CREATION_FLAGS = 0
# From the end of its pipes to its own end.
GRACE_S = 5.0
LOG_LIMIT_BYTES = 8 << 20
LOG_TAIL_BYTES = 2000


def next_backoff_s(previous_s: float, lived_s: float) -> float:
    """Seconds to wait before the next start: doubles from 0.5 to 30; a child that lived 60 s starts over."""
    if previous_s == 0.0 or lived_s >= WELL_AFTER_S:
        return FIRST_BACKOFF_S
    return min(2.0 * previous_s, LONGEST_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class ChildSpec(Generic[In, Out]):
    """What to run and what it says. `module` is run as `python -m module`."""

    name: str
    module: str
    reply: type[Out]
    log_path: Path
    arguments: Sequence[str] = ()
    # It has nothing to finish: it is killed when we leave, instead of waiting for its interpreter to fold up.
    disposable: bool = False


class Child(Generic[In, Out]):
    """One child at a time, for ever, until `stop`.

    Callbacks run in the event loop: `on_start` right after each start (send the first message from there), `on_message`
    for each message, `on_end` with the reason each time the child is gone without having been asked to go.
    """

    def __init__(
        self,
        spec: ChildSpec[In, Out],
        *,
        on_start: Callable[[], None],
        on_message: Callable[[Out], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._on_start = on_start
        self._on_message = on_message
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def send(self, message: In) -> bool:
        """False when no child is there to read it."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return False
        pipes.write(process.stdin, message)
        return True

    def kill(self) -> None:
        """For a child that hangs; it is started again."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def run(self) -> None:
        """Keeps a child alive until `stop`."""
        loop = asyncio.get_running_loop()
        backoff_s = 0.0
        while not self._stopping.is_set():
            started_s = loop.time()
            reason = await self._live_once()
            if self._stopping.is_set():
                return
            self._on_end(reason)
            backoff_s = next_backoff_s(backoff_s, loop.time() - started_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)

    async def stop(self) -> None:
        """Closes the child's standard input, waits, and kills it when it does not go."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        if self._spec.disposable:
            self.kill()
        if process.stdin is not None:
            process.stdin.close()
        await _gone(process)

    async def _live_once(self) -> str:
        """Runs one child to its end and says why it ended."""
        with self._open_log() as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self._spec.module,
                    *self._spec.arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                    creationflags=_CREATION_FLAGS,
                )
            except OSError as error:
                return f"the {self._spec.name} could not be started: {error}"
        self._process = process
        assert process.stdout is not None
        assert process.stdin is not None
        fault = ""
        try:
            if self._stopping.is_set():
                process.stdin.close()
            else:
                self._on_start()
            while (message := await pipes.read(process.stdout, self._spec.reply)) is not None:
                self._on_message(message)
        except pipes.PipeError as error:
            fault = f": {error}"
        finally:
            self._process = None
            process.stdin.close()
            status = await _gone(process)
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        said = last_line(self._spec.log_path)
        return f"the {self._spec.name} {how}{fault}{f' ({said})' if said else ''}; see {self._spec.log_path}"

    def _open_log(self) -> IO[bytes]:
        path = self._spec.log_path
        path.parent.mkdir(parents=True, exist_ok=True)
        # One older log is kept, so that a crash loop neither fills the disk nor hides its beginning.
        if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
            os.replace(path, path.with_suffix(".old" + path.suffix))
        return path.open("ab")


async def _gone(process: asyncio.subprocess.Process) -> int:
    """The exit status of a child whose pipes are closed; one that stays all the same is killed."""
    try:
        return await asyncio.wait_for(process.wait(), GRACE_S)
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def last_line(path: Path) -> str:
    """The last line of a log, cut to a length that fits into a message; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((clean_text(line, 200) for line in reversed(lines) if line.strip()), "")
