"""Children are restarted with backoff, speak only protobuf, and end when asked or when we die."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from starlings_coordinator.children import Child, ChildSpec, next_backoff_s
from starlings_protos.process_pb2 import FromKeeper, ToKeeper
from support.coordinator_harness import until

# Answers each save with a log line of its version; version 13 crashes it, 99 makes it print garbage.
_CHILD = """
import os, sys
from starlings_protos import pipes
from starlings_protos.process_pb2 import FromKeeper, LogLine, ToKeeper
incoming, outgoing = pipes.claim_stdio()
print("a stray print")
while (message := pipes.read_blocking(incoming, ToKeeper)) is not None:
    if message.save.version == 13:
        os._exit(7)
    if message.save.version == 99:
        outgoing.write(b"Hello, I am a banner of some library")
        outgoing.flush()
        continue
    pipes.write(outgoing, FromKeeper(log=LogLine(text=str(message.save.version))))
    outgoing.flush()
"""


class Watched:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "scripted_child.py").write_text(_CHILD)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        self.said: list[str] = []
        self.ends: list[str] = []
        self.starts = 0
        spec = ChildSpec("child", "scripted_child", FromKeeper, tmp_path / "logs" / "child.log")
        self.child: Child[ToKeeper, FromKeeper] = Child(
            spec,
            on_start=self.started,
            on_message=lambda m: self.said.append(m.log.text),
            on_end=self.ends.append,
        )

    def started(self) -> None:
        self.starts += 1
        self.send(0)

    def send(self, version: int) -> None:
        message = ToKeeper()
        message.save.version = version
        assert self.child.send(message)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


async def test_crash_and_garbage_are_named_and_the_child_comes_back(watched: Watched, tmp_path: Path) -> None:
    running = asyncio.create_task(watched.child.run())
    await until(lambda: watched.said == ["0"], "the first answer")
    watched.send(13)
    await until(lambda: watched.ends, "the end")
    assert "the child ended with status 7 (a stray print)" in watched.ends[0]
    await until(lambda: watched.said == ["0", "0"], "the next life")
    watched.send(99)
    await until(lambda: len(watched.ends) == 2, "the second end")
    assert "length prefix" in watched.ends[1]
    await until(lambda: watched.starts == 3, "the third life")
    await watched.child.stop()
    await running
    assert len(watched.ends) == 2
    assert "a stray print" in (tmp_path / "logs" / "child.log").read_text()
    assert not watched.child.send(ToKeeper())


async def test_stop_before_the_start_leaves_nobody_behind(watched: Watched) -> None:
    running = asyncio.create_task(watched.child.run())
    await asyncio.sleep(0)
    await watched.child.stop()
    await asyncio.wait_for(running, 20)
    assert watched.child.process_id is None


def test_backoff_doubles_to_a_limit_and_forgets_after_a_good_life() -> None:
    waits, backoff_s = [], 0.0
    for _ in range(8):
        backoff_s = next_backoff_s(backoff_s, lived_s=0.1)
        waits.append(backoff_s)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert next_backoff_s(30.0, lived_s=61.0) == 0.5


_PARENT = """
import asyncio, sys
from pathlib import Path
from starlings_coordinator.children import Child, ChildSpec
from starlings_protos.process_pb2 import FromKeeper
async def main():
    spec = ChildSpec("child", "starlings_coordinator.keeper", FromKeeper, Path(sys.argv[1]))
    child = Child(spec, on_start=lambda: None, on_message=print, on_end=print)
    asyncio.create_task(child.run())
    while child.process_id is None:
        await asyncio.sleep(0.01)
    print(child.process_id, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_keeper_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while _alive(child):
        assert time.monotonic() < deadline, "the keeper outlived its parent"
        time.sleep(0.05)


def _alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False
