"""`starlings leave` and `health` against a worker's process: what they ask, what it answers, what they say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from starlings.commands import local
from starlings.main import app
from starlings_protos.locks import DirectoryLock
from starlings_protos.messages import Finish, Leaving, ProbeReport
from starlings_worker.local_files import (
    LEAVE_FILE,
    Phase,
    Request,
    Running,
    ask_to_leave,
    read_running,
    write_running,
)
from support.fake_control import FakeControl

TESTS = Path(__file__).resolve().parents[1]
# A supervisor as a process of its own, with an engine that only pretends.
_WORKER = (
    "import sys, starlings_worker.engine_child as child; from pathlib import Path\n"
    "child.ENGINE_MODULE = 'support.fake_engine'\n"
    "from starlings_worker.supervisor import run_worker\n"
    "from starlings_worker.options import WorkerOptions\n"
    "sys.exit(run_worker(WorkerOptions(directory=Path(sys.argv[1]), devices=sys.argv[2])))\n"
)


@dataclass
class Place:
    """A machine with a user data directory of its own."""

    data: Path
    control: FakeControl
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        return {
            **os.environ,
            "XDG_DATA_HOME": str(self.data),
            "PYTHONPATH": path,
            "FAKE_ENGINE_LOG": str(self.data / "engines.log"),
        }

    def worker_directory(self, name: str) -> Path:
        return self.data / "starlings" / "workers" / name

    async def worker(self, name: str = "fake", *, mode: str = "", ready: bool = True) -> Path:
        """A worker that has been welcomed; returns its directory."""
        directory = self.worker_directory(name)
        self.control.join(directory)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", _WORKER, str(directory), "cpu"),
            env={**self.environment, "FAKE_ENGINE": mode},
        )
        self.processes.append(process)
        if ready:
            await self.control.next(ProbeReport)
        return directory

    async def starlings(self, *arguments: str | Path) -> Command:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "starlings", *map(str, arguments)),
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        return Command(process)

    async def say(self, *arguments: str | Path) -> tuple[int, str, str]:
        """The same command within this process, which is quicker."""
        runner = CliRunner(env={"XDG_DATA_HOME": str(self.data)})
        done = await asyncio.to_thread(runner.invoke, app, [str(a) for a in arguments])
        return done.exit_code, done.stdout, done.stderr


@dataclass
class Command:
    process: asyncio.subprocess.Process

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return dict(json.loads(await self.process.stdout.readline()))

    async def end(self) -> tuple[int, str, str]:
        async with asyncio.timeout(60):
            out, errors = await self.process.communicate()
        assert self.process.returncode is not None
        assert b"Traceback" not in errors, errors.decode()
        return self.process.returncode, out.decode(), errors.decode()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with FakeControl() as control:
        place = Place(tmp_path, control)
        yield place
        for process in place.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_only_worker_leaves_in_order_and_is_seen_off(place: Place):
    directory = await place.worker()
    healthy, out, _ = await place.say("health")
    assert (healthy, out.startswith(read_running(directory).worker_id[:7])) == (0, True)  # type: ignore[union-attr]

    leaving = await place.starlings("leave", "--json")
    asked = await leaving.line()
    assert (asked["event"], asked["directory"]) == ("asked", str(directory))
    said = await place.control.next(Leaving)
    assert said.reason == "asked to by `starlings leave`"
    assert "Leaving in order" in (await leaving.line())["text"]
    code, _, errors = await place.say("health")
    assert code == 3
    assert "cannot work now (leaving)" in errors
    assert leaving.process.returncode is None
    await place.control.say(Finish(False, "you may go"))
    code, out, _ = await leaving.end()
    assert code == 0
    left = json.loads(out.splitlines()[-1])
    assert (left["event"], left["text"], left["exit_code"]) == ("left", "you may go", 0)
    # It is gone by then, not just on its way.
    async with asyncio.timeout(0.5):
        assert await place.processes[0].wait() == 0
    assert not (directory / LEAVE_FILE).exists()
    if sys.platform != "win32":
        assert (directory / "running.json").stat().st_mode & 0o777 == 0o600

    code, _, errors = await place.say("health", "--dir", directory)
    assert code == 3
    assert "ended with exit code 0: you may go" in errors


async def test_now_is_a_second_signal(place: Place):
    directory = await place.worker(mode="stubborn")
    first = await place.starlings("leave", "--json")
    assert (await first.line())["event"] == "asked"
    assert "Leaving in order" in (await first.line())["text"]
    code, out, _ = await place.say("leave", "fake", "--now")
    assert code == 0
    assert "asked to end at once" in out
    code, out, _ = await first.end()
    assert code == 0
    assert json.loads(out.splitlines()[-1])["exit_code"] == 130
    assert await place.processes[0].wait() == 130
    found = read_running(directory)
    assert found is not None
    assert found.phase is Phase.ENDED


async def test_of_several_workers_one_must_be_named(place: Place):
    one, two = await place.worker("one"), await place.worker("two")
    code, _, errors = await place.say("leave")
    assert code == 2
    assert str(one) in errors
    assert str(two) in errors
    code, out, errors = await place.say("leave", "--all", "--now", "--json")
    assert code == 0, out + errors
    left = [r["directory"] for r in map(json.loads, out.splitlines()) if r["event"] == "left"]
    assert left == [str(one), str(two)]


async def test_a_request_to_an_earlier_life_means_nothing(place: Place):
    directory = place.worker_directory("fake")
    directory.mkdir(parents=True)
    earlier = Running("0123", 1, 0.0, Phase.READY, "")
    ask_to_leave(directory, earlier, now=True)
    await place.worker()
    assert not (directory / LEAVE_FILE).exists(), "a new life begins with an empty desk"
    ask_to_leave(directory, earlier, now=True)
    async with asyncio.timeout(30):
        while (directory / LEAVE_FILE).exists():
            await asyncio.sleep(0.02)
    code, out, errors = await place.say("health")
    assert code == 0, out + errors


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
async def test_a_worker_that_does_not_answer_or_was_killed(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "ANSWER_WITHIN_S", 1.5)
    directory = await place.worker()
    place.processes[0].send_signal(signal.SIGSTOP)
    code, _, errors = await place.say("health")
    assert code == 3
    assert "does not answer" in errors
    place.processes[0].kill()
    await place.processes[0].wait()
    code, _, errors = await place.say("leave", "--dir", directory)
    assert code == 3
    assert "was killed" in errors


async def test_a_worker_without_a_coordinator_is_not_healthy(place: Place):
    directory = place.worker_directory("fake")
    await place.control._server.stop(None)
    await place.worker(ready=False)
    async with asyncio.timeout(60):
        while (found := read_running(directory)) is None or found.phase is not Phase.INTERRUPTED:
            await asyncio.sleep(0.05)
    code, _, errors = await place.say("health")
    assert code == 3
    assert "(interrupted)" in errors
    code, _, _ = await place.say("leave")
    assert code == 0
    assert await place.processes[0].wait() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("leave",), 3, "`starlings join` starts one"),
        (("leave", "swarm"), 3, "workers/swarm"),
        (("leave", "swarm", "--all"), 2, "once"),
        (("health", "--dir", "nowhere"), 3, "No worker runs in nowhere"),
    ],
)
async def test_nobody_there_is_one_clear_sentence(
    place: Place, arguments: tuple[str, ...], code: int, says: str
):
    ended, _, errors = await place.say(*arguments)
    assert ended == code
    assert says in errors.replace("\\", "/")
    assert len(errors.splitlines()) == 1


async def test_a_holder_that_is_no_worker_is_left_alone(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "ANSWER_WITHIN_S", 0.5)
    directory = place.worker_directory("fake")
    with DirectoryLock(directory):
        write_running(directory, Running("0123", 1, 0.0, Phase.READY, ""))
        code, _, errors = await place.say("leave")
    assert code == 3
    assert f"process {os.getpid()}" in errors
    assert not (directory / LEAVE_FILE).exists()


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"{", b'{"life": 1}', b"\xff", b"[" * 60000])
def test_nonsense_in_the_files_is_no_crash(data: bytes):
    assert Running.from_json(data) is None
    assert Request.from_json(data) is None


def test_what_is_written_is_read():
    running = Running("l", 3, 1.5, Phase.LEAVING, "text", "w", 5.0, "a", 7)
    assert Running.from_json(running.to_json()) == running
    assert Request.from_json(Request("l", "i", True).to_json()) == Request("l", "i", True)
    broken = running.to_json().replace(b"1.5", b"NaN")
    assert Running.from_json(broken) is None
