"""Real processes for tests: commands with deadlines, and swarms that end with the test whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from starlings import template
from starlings.demo.kill import kill_at_once
from starlings.demo.swarm import Child, Swarm
from starlings.main import app
from starlings.owner_client import OwnerClient
from starlings.views.status import History
from starlings_protos import control_pb2

# Enough for a handful of steps of tiny models; deterministic, no download.
TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n\n" for i in range(400))
LOCAL = ("--listen", "127.0.0.1", "--port", "0")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """What it printed with --json."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


def starlings(
    *arguments: str | Path,
    cwd: Path,
    within_s: float = 60,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> Done:
    """Runs one `starlings` command to its end, with a user data directory of its own below `cwd`.

    Raises:
        subprocess.TimeoutExpired: a hang, which is always a failure.
    """
    done = subprocess.run(
        [sys.executable, "-m", "starlings", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "XDG_DATA_HOME": str(cwd / "data"), "COLUMNS": "120", **(environment or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def starlings_here(*arguments: str | Path) -> Done:
    """One command in this process: the same program, without the start of one."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return Done(done.exit_code, done.stdout, done.stderr)


def job_text(tokens: int, **sections: Mapping[str, Any]) -> str:
    """A job file on `texts/*.txt` with free ports; `sections` override, a dotted section is written `network_ports`."""
    chosen: dict[str, dict[str, Any]] = {
        "job": {"name": "test", "tokens": tokens},
        "model": {"preset": "micro"},
        "data": {"source": "texts/*.txt", "sequence_length": 32, "held_out": 8},
        "train": {"batch": 8, "microbatch": 2},
        "swarm": {"settle_s": 0.5},
        "network.ports": {"control": 0, "enrolment": 0},
    }
    for name, keys in sections.items():
        section = name.replace("_", ".")
        chosen[section] = {**chosen.get(section, {}), **keys}
        if section == "model" and ("config" in keys or "from" in keys):
            chosen["model"].pop("preset", None)
    return template.render(chosen, comments=False)


def write_job(folder: Path, text: str) -> Path:
    """job.toml and its texts in `folder`."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    (folder / "texts" / "code.txt").write_text(TEXT)
    path = folder / "job.toml"
    path.write_text(text)
    return path


def prepared_job(folder: Path, text: str) -> Path:
    """A prepared job directory, prepared in this process: faster than a child that imports torch anew."""
    from starlings_job.prepare import prepare

    out = folder / "job"
    prepare(write_job(folder, text), out)
    return out


@dataclass
class LiveSwarm:
    """A coordinator and workers of one prepared job. Use as a context; everything ends with it."""

    job: Path
    swarm: Swarm
    host: str = "127.0.0.1"
    invite: str = ""
    history: History = field(default_factory=History)

    @classmethod
    def of(cls, job: Path, folder: Path, host: str = "127.0.0.1") -> LiveSwarm:
        return cls(job, Swarm(folder / "swarm"), host)

    def __enter__(self) -> LiveSwarm:
        self.swarm.__enter__()
        try:
            self.start_coordinator()
        except BaseException:
            self.swarm.close()
            raise
        return self

    def start_coordinator(self, port: int = 0) -> None:
        """On any free port, or on one that its workers know: only who was killed takes its old one by itself."""
        self.invite = self.swarm.start_coordinator(
            [
                str(self.job),
                "--listen",
                self.host,
                "--host",
                self.host,
                "--port",
                str(port),
                "--enrolment-port",
                "0",
            ]
        )

    def kill_coordinator(self) -> None:
        """SIGKILL to it and its children at once."""
        coordinator = self.swarm.coordinator
        assert coordinator is not None
        kill_at_once(coordinator.process)
        coordinator.process.wait(10)

    def __exit__(self, *error: Any) -> None:
        self.swarm.close()

    def join(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        host: str = "",
        through: Sequence[str] = (),
    ) -> Child:
        """A worker that listens on `host` (the coordinator's by default), started `through` another command."""
        listen = ["--listen", host or self.host, "--port", "0"]
        options = ["--devices", "cpu", "--threads", "1", *listen, *arguments]
        return self.swarm.start_worker(self.invite, options, environment, through=through)

    def wait(
        self, condition: Callable[[control_pb2.StatusReply], object], within_s: float
    ) -> control_pb2.StatusReply:
        """Follows the job until `condition` holds.

        Raises:
            CommandError: a process failed.
            AssertionError: it did not come true in time; shows the logs.
        """
        return asyncio.run(self._wait(condition, within_s))

    async def _wait(
        self, condition: Callable[[control_pb2.StatusReply], object], within_s: float
    ) -> control_pb2.StatusReply:
        deadline = time.monotonic() + within_s
        try:
            async with asyncio.timeout(within_s), OwnerClient(self.job) as client:
                async for reply in client.watch(interval_s=0.1):
                    self.swarm.check()
                    self.history.add(reply)
                    if condition(reply):
                        return reply
        except TimeoutError:
            pass
        self.swarm.check()
        last = self.history.last
        logs = "\n\n".join(child.obituary() for child in self.swarm.all())
        state = (
            f"{last.phase} step {last.step}, waiting for {last.waiting_for!r}, {last.failure}"
            if last
            else "silence"
        )
        raise AssertionError(
            f"not in {within_s} s ({deadline - time.monotonic():.0f} s left): {state}\n{logs}"
        )

    def finish(self, within_s: float) -> control_pb2.StatusReply:
        """Waits for the job's end and for every process to leave with exit code 0."""
        reply = self.wait(lambda r: r.phase in ("done", "failed"), within_s)
        assert reply.phase == "done", reply.failure
        deadline = time.monotonic() + 30
        while self.swarm.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = {child.name: child.process.poll() for child in self.swarm.all()}
        assert set(codes.values()) == {0}, codes
        return reply


def freeze(child: Child) -> None:
    """SIGSTOP to a worker's supervisor and to its engine, which has a session of its own."""
    for process in _family(child):
        process.suspend()


def thaw(child: Child) -> None:
    for process in _family(child):
        process.resume()


def kill_frozen(child: Child) -> None:
    """SIGKILL to both: an engine that is stopped does not notice that its supervisor is gone."""
    for process in _family(child):
        process.kill()


def _family(child: Child) -> list[psutil.Process]:
    parent = psutil.Process(child.process.pid)
    return [parent, *parent.children(recursive=True)]


def spans(reply: control_pb2.StatusReply) -> Sequence[tuple[int, int] | None]:
    return [(w.span.first_stage, w.span.last_stage) if w.HasField("span") else None for w in reply.workers]
