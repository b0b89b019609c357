"""The demo's processes: one coordinator and some workers, started as a user would, that never outlive us."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from starlings import children
from starlings.failures import CommandError, ExitCode

TOGETHER_S = 15.0


@dataclass
class Child:
    """A process with its log file, for messages."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    # How it was started; the invite among it.
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    through: Sequence[str] = ()
    # It was killed on purpose: how it ended is no failure.
    expendable: bool = False

    def obituary(self) -> str:
        """How it ended and the tail of its log."""
        status = self.process.poll()
        how = (
            f"was ended by signal {-status}" if status is not None and status < 0 else f"exited with {status}"
        )
        return f"The {self.name} {how}. The end of {self.log}:\n{children.tail(self.log)}"


class Swarm:
    """Starts processes below one directory; leaving the context ends them all, whatever happened."""

    def __init__(self, directory: Path) -> None:
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.coordinator: Child | None = None
        self.workers: list[Child] = []
        self._said: queue.Queue[Mapping[str, Any] | None] = queue.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        read: bool,
        through: Sequence[str] = (),
    ) -> Child:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        with log.open("ab") as file:
            process = children.spawn(
                "starlings.tether",
                arguments,
                log=file,
                environment=environment,
                read_output=read,
                through=through,
            )
        return Child(name, process, log, tuple(arguments), dict(environment), tuple(through))

    def start_coordinator(self, arguments: Sequence[str], *, within_s: float = 60.0) -> str:
        """Runs `starlings coordinator ARGUMENTS --json` and returns the invite that it prints.

        Raises:
            CommandError: it ended, or said nothing in time.
        """
        child = self._start("coordinator", ["coordinator", *arguments, "--json"], {}, read=True)
        self.coordinator = child
        self._said = queue.Queue()
        threading.Thread(target=self._listen, args=(child, self._said), daemon=True).start()
        deadline = time.monotonic() + within_s
        while True:
            try:
                record = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise CommandError(
                    f"The coordinator did not start within {within_s:.0f} s.\n{child.obituary()}",
                    ExitCode.BUG,
                ) from None
            if record is None:
                child.process.wait(5)
                raise CommandError(child.obituary(), child.process.returncode or ExitCode.BUG)
            if "invite" in record:
                return str(record["invite"])

    @staticmethod
    def _listen(child: Child, said: queue.Queue[Mapping[str, Any] | None]) -> None:
        """Drains the coordinator's stdout to its end, so that its pipe never fills."""
        assert child.process.stdout is not None
        with contextlib.suppress(ValueError):
            for record in children.json_lines(child.process.stdout):
                said.put(record)
        said.put(None)

    def start_worker(
        self,
        invite: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        through: Sequence[str] = (),
    ) -> Child:
        """Runs `starlings join ARGUMENTS`; the invite goes by environment, so that it is in no process list."""
        name = f"worker {len(self.workers) + 1}"
        where = self.directory / "workers" / str(len(self.workers) + 1)
        child = self._start(
            name,
            ["join", "--dir", str(where), *arguments],
            {"STARLINGS_INVITE": invite, **(environment or {})},
            read=False,
            through=through,
        )
        self.workers.append(child)
        return child

    def start_again(self, child: Child) -> None:
        """A worker that has ended, once more in the same directory."""
        again = self._start(child.name, child.arguments, child.environment, read=False, through=child.through)
        child.process, child.expendable = again.process, False

    def all(self) -> list[Child]:
        return ([self.coordinator] if self.coordinator else []) + self.workers

    def check(self) -> None:
        """Raises CommandError when any process has failed."""
        for child in self.all():
            status = child.process.poll()
            if status not in (None, 0) and not child.expendable:
                raise CommandError(child.obituary(), status if status and 0 < status < 100 else ExitCode.BUG)

    def running(self) -> list[Child]:
        return [child for child in self.all() if child.process.poll() is None]

    def close(self) -> None:
        """Ends what still runs: all are asked at once, then killed after a common deadline."""
        for child in self.running():
            with contextlib.suppress(OSError):
                child.process.terminate()
        deadline = time.monotonic() + TOGETHER_S
        # The coordinator last: workers say goodbye to it.
        for child in reversed(self.all()):
            children.end(child.process, within_s=max(0.1, deadline - time.monotonic()))
