"""The coordinator as a process of its own: signals, exit codes, machine-readable lines, and what it never imports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from starlings_coordinator import store as store_module
from starlings_coordinator.options import CoordinatorOptions
from starlings_coordinator.run import run_coordinator
from starlings_coordinator.store import StoreFull
from starlings_job.checkpoint import CheckpointWriter, versions
from starlings_job.checkpoint_owner import Owner
from starlings_job.errors import JobError, NotPrepared
from starlings_protos.errors import PortBusy, UsageError
from starlings_protos.locks import DirectoryInUse, DirectoryLock
from starlings_protos.messages import StepCommitted, Welcome
from support.coordinator_harness import ScriptedWorker, childless, coordinator
from support.prepared_job import block_state, write_prepared_job

_RUN = """
import sys
from pathlib import Path
from starlings_coordinator.options import CoordinatorOptions, json_lines
from starlings_coordinator.run import run_coordinator

def observe(kind, fields):
    json_lines(kind, fields)
    if kind == "keeper":
        found = sorted({"torch", "numpy", "scipy", "transformers", "tokenizers", "pandas"} & set(sys.modules))
        json_lines("imported", {"modules": found})

sys.exit(run_coordinator(CoordinatorOptions(Path(sys.argv[1]), listen_host="127.0.0.1"), observe))
"""


class Process:
    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            record: dict[str, Any] = json.loads(text)
            if record["event"] == kind:
                return record
        raise AssertionError(f"no {kind}: {self.process.stderr.read() if self.process.stderr else ''}")

    def ended(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_prepared_job(tmp_path / "job", min_workers=50)


@pytest.fixture
def process(directory: Path) -> Iterator[Process]:
    started = Process(directory)
    yield started
    started.process.kill()
    started.process.communicate()


def test_sigterm_ends_in_order_and_torch_never_comes_in(process: Process, directory: Path) -> None:
    listening = process.line("listening")
    assert listening["invite"].startswith("starlings://127.0.0.1:")
    assert process.line("imported")["modules"] == []
    inside = psutil.Process(process.process.pid)
    assert inside.memory_info().rss < 200 << 20
    children = [child.pid for child in inside.children()]
    assert len(children) == 3  # planner, keeper, relay
    endpoints = directory / "owner" / "coordinator.json"
    assert json.loads(endpoints.read_text())["control"] == listening["control"]
    assert (directory / "core.sqlite").stat().st_mode & 0o077 == 0
    secret = [*(directory / "ca").iterdir(), *(directory / "owner").iterdir()]
    assert [
        p.name for p in secret if p.suffix in (".key", ".json", ".jsonl") and p.stat().st_mode & 0o077
    ] == []

    process.process.send_signal(signal.SIGTERM)
    code, errors = process.ended()
    assert code == 0, errors
    assert not [pid for pid in children if psutil.pid_exists(pid)]
    assert not endpoints.exists()
    DirectoryLock(directory).release()


def test_second_signal_ends_at_once(process: Process) -> None:
    process.line("listening")
    # Stopped children make the orderly end take its time.
    deadline = time.monotonic() + 30
    while len(psutil.Process(process.process.pid).children()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.process.pid).children()
    try:
        for child in children:
            child.suspend()
        process.process.send_signal(signal.SIGINT)
        process.line("ending")
        process.process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        assert process.ended()[0] == 130
        assert time.monotonic() - started_s < 4
    finally:
        # A stopped process does not notice that its parent is gone; the kernel may have told it by killing it.
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_directory_in_use_names_the_holder(directory: Path) -> None:
    with DirectoryLock(directory), pytest.raises(DirectoryInUse, match="is in use by") as refused:
        run_coordinator(CoordinatorOptions(directory))
    assert refused.value.exit_code == 11


def test_busy_port_is_named_with_the_fix(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = CoordinatorOptions(directory, listen_host="127.0.0.1", control_port=port)
        with pytest.raises(PortBusy, match=rf"Port {port} .* busy: .*0 = any") as refused:
            run_coordinator(options)
    assert refused.value.exit_code == 10
    # Nothing is left behind: it can be started right away.
    DirectoryLock(directory).release()


def test_unprepared_directory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="starlings prepare") as refused:
        run_coordinator(CoordinatorOptions(tmp_path / "nothing"))
    assert refused.value.exit_code == 2
    assert not (tmp_path / "nothing").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs torch"):
        run_coordinator(CoordinatorOptions(tmp_path / "nothing", job_file=tmp_path / "job.toml"))


def test_directory_of_another_job_is_refused(directory: Path, tmp_path: Path) -> None:
    changed = tmp_path / "job.toml"
    text = (directory / "job.toml").read_text()
    changed.write_text(text.replace("seed = 3", "seed = 4"))
    with pytest.raises(NotPrepared):
        run_coordinator(CoordinatorOptions(directory, job_file=changed))


async def test_log_of_another_version_of_the_job_is_refused_and_a_longer_one_goes_on(
    directory: Path, tmp_path: Path
) -> None:
    async with childless(directory):
        pass
    changed, text = tmp_path / "job.toml", (directory / "job.toml").read_text()
    changed.write_text(text.replace("batch = 4", "batch = 8"))
    with pytest.raises(store_module.StoreMismatch, match="another version of the job") as refused:
        async with childless(directory, job_file=changed):
            pass
    assert refused.value.exit_code == 8
    changed.write_text(text.replace("tokens = 192", "tokens = 1920"))
    async with childless(directory, job_file=changed) as running:
        assert running.listening["job"] == "test"


async def test_a_place_with_another_jobs_checkpoints_is_refused(tmp_path: Path) -> None:
    directory, shared = write_prepared_job(tmp_path / "job"), tmp_path / "shared"
    with CheckpointWriter(shared, 7) as writer:
        writer.add_block("embed", block_state("embed", 7))
        writer.finish({**Owner("other", "a" * 43).facts})
    job_file = directory / "job.toml"
    job_file.write_text(job_file.read_text().replace("keep = 2", f'keep = 2\nto = "{shared}"'))
    with pytest.raises(JobError, match=r"of the job 'other': .* `\[checkpoint\] to`") as refused:
        async with childless(directory):
            pass
    assert refused.value.exit_code == 2
    assert versions(shared) == (7,)


async def test_full_disk_ends_with_its_code_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step whose record does not fit is not announced to anybody; the next start goes on before it."""
    directory = write_prepared_job(tmp_path / "job", steps=4)
    real, room = store_module.Store.append, [True]

    def append(store: store_module.Store, records: Any, wall_s: float) -> None:
        if any(kind == "step_recorded" and b'"step":2' in payload for kind, payload in records) and room[0]:
            raise StoreFull("No space left for the coordinator's log.")
        real(store, records, wall_s)

    monkeypatch.setattr(store_module.Store, "append", append)
    async with coordinator(directory) as running, ScriptedWorker(running) as worker:
        worker.begin()
        assert running.task is not None
        with pytest.raises(StoreFull) as full:
            await asyncio.wait_for(running.task, 60)
        assert full.value.exit_code == 9
        await asyncio.wait_for(asyncio.gather(*[worker.reading], return_exceptions=True), 30)  # type: ignore[list-item]
        assert [m.step for m in worker.seen(StepCommitted)] == [0, 1]
    room[0] = False
    async with coordinator(directory) as running, ScriptedWorker(running, worker.identity, nonce=2) as again:
        again.begin()
        assert running.task is not None
        assert await asyncio.wait_for(running.task, 60) == 0
        assert again.finish is not None


async def test_leaving_coordinator_tells_workers_to_come_back(directory: Path) -> None:
    async with childless(directory) as running:
        worker = ScriptedWorker(running)
        await worker.say(worker.hello())
        await worker.expect(Welcome)
        reading = asyncio.create_task(worker.ending())
    code, refusal = await asyncio.wait_for(reading, 10)
    # Not a refusal: the worker tries again.
    assert (code.name, refusal) == ("UNAVAILABLE", "")
    assert await worker.call.details() == "the coordinator is leaving"
    await worker.__aexit__()
