"""The supervisor with a real control stream and engines that only pretend: what is passed on, restarted, refused,
drained.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

import starlings_worker.control_stream
import starlings_worker.engine_child
import starlings_worker.engine_keeper
from starlings_protos.errors import ExitCode, RefusedError
from starlings_protos.locks import DirectoryInUse
from starlings_protos.messages import (
    EngineDown,
    Finish,
    HeartbeatAck,
    Leaving,
    ProbeReport,
    Refusal,
    Standby,
    StepCommitted,
)
from starlings_worker.device_list import CPU
from starlings_worker.device_worker import DeviceWorker
from starlings_worker.errors import WorkerError
from starlings_worker.lock import lock_directory
from starlings_worker.options import WorkerEvent, WorkerOptions
from support.fake_control import FakeControl

TESTS = Path(__file__).resolve().parents[1]


class Bench:
    """One worker that runs against a fake coordinator with fake engines."""

    def __init__(self, directory: Path, control: FakeControl) -> None:
        self.directory = directory
        self.control = control
        self.events: list[WorkerEvent] = []
        self.membership = control.join(directory)
        self.log = directory / "fake.log"

    def start(self, **changes: object) -> asyncio.Task[None]:
        options = WorkerOptions(directory=self.directory, on_event=self.events.append, **changes)  # type: ignore[arg-type]
        self.worker = DeviceWorker(options, None, self.directory, CPU, 0, 1)
        self.task = asyncio.create_task(self.worker.run())
        return self.task

    def heard(self) -> list[str]:
        """What engines were told, in order, without their process ids."""
        return [line.partition(" ")[2] for line in self.log.read_text().splitlines()]

    def engines(self) -> list[int]:
        return list(dict.fromkeys(int(line.partition(" ")[0]) for line in self.log.read_text().splitlines()))

    async def until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, (self.heard(), [e.text for e in self.events])
            if self.task.done():
                await self.task
            await asyncio.sleep(0.01)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(starlings_worker.engine_child, "ENGINE_MODULE", "support.fake_engine")
    monkeypatch.setattr(starlings_worker.engine_keeper, "RESTART_PAUSES_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(starlings_worker.control_stream, "PAUSE_FIRST_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "worker" / "fake.log"))
    monkeypatch.delenv("FAKE_ENGINE", raising=False)
    async with FakeControl() as control:
        bench = Bench(tmp_path / "worker", control)
        yield bench
        if not bench.task.done():
            bench.worker.abandon()
            await asyncio.gather(bench.task, return_exceptions=True)


async def test_messages_are_passed_on_and_the_end_of_the_job_is_exit_0(bench: Bench):
    task = bench.start()
    await bench.control.next(ProbeReport)
    (hello,) = bench.control.hellos
    assert (hello.worker_id, hello.numeric_class, hello.device) == (
        bench.membership.worker_id,
        "cpu/fake",
        "a fake",
    )
    assert hello.host_id
    assert hello.site == hello.host_id
    await bench.control.say(Standby("a test"))
    await bench.control.say(StepCommitted(3, 0, 1e-3, 1.0, 2.0))
    await bench.until(lambda: "step_committed" in bench.heard())
    # The engine's own last heartbeat, on schedule.
    await bench.until(lambda: any(h.progress > 0 for h in bench.control.heartbeats))
    await bench.control.say(Finish(True, "all steps are trained"))
    await task
    assert bench.heard()[:3] == ["start", "welcome", "link True"]
    assert bench.heard()[-1] == "finish"
    assert {"joined", "engine_started", "connected", "probed", "standby", "step", "finished"} <= set(
        bench.kinds()
    )


async def test_heartbeats_keep_the_pace_of_the_last_acknowledgement(bench: Bench):
    bench.start()
    await bench.control.next(ProbeReport)
    await bench.until(lambda: "welcome" in bench.heard())
    said = bench.control.heartbeats

    async def next_comes_after_s() -> float:
        count = len(said)
        await bench.until(lambda: len(said) > count)
        begun_s = time.monotonic()
        await bench.until(lambda: len(said) > count + 1)
        return time.monotonic() - begun_s

    await bench.control.say(HeartbeatAck(time.time(), 0.4))
    async with asyncio.timeout(20):
        while await next_comes_after_s() < 0.35:
            pass
        # 0 says nothing of it.
        await bench.control.say(HeartbeatAck(time.time()))
        assert await next_comes_after_s() > 0.3
        await bench.control.say(HeartbeatAck(time.time(), 0.05))
        while await next_comes_after_s() > 0.2:
            pass


async def test_a_crashed_engine_is_started_three_times_and_the_coordinator_hears_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_ENGINE", "crash")
    task = bench.start()
    for number in range(4):
        down = await bench.control.next(EngineDown)
        assert "SIGKILL" in down.reason
        assert down.restarting == (number < 3)
        # The coordinator's answer is a new life.
        bench.control.incarnation += 1
        if down.restarting:
            await bench.control.welcome()
    with pytest.raises(WorkerError, match="SIGKILL") as failed:
        await task
    assert failed.value.exit_code == ExitCode.BUG
    assert len(bench.engines()) == 4
    assert bench.kinds()[-1] == "failed"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
async def test_an_engine_that_hangs_is_restarted_and_leaves_its_stacks_in_the_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_ENGINE", "hang")
    monkeypatch.setattr(starlings_worker.engine_child, "SILENT_FOR_S", 0.3)
    bench.start()
    down = await bench.control.next(EngineDown)
    assert "hung" in down.reason
    assert down.restarting
    assert "fake_engine.py" in (bench.directory / "engine.log").read_text()


async def test_a_device_that_cannot_be_used_ends_the_worker_with_its_own_code(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_ENGINE", "no_device")
    with pytest.raises(WorkerError, match="update the driver") as failed:
        await bench.start()
    assert failed.value.exit_code == ExitCode.NO_DEVICE
    assert not bench.control.hellos
    assert len(bench.engines()) == 1


async def test_a_lost_stream_comes_back_as_the_same_life(bench: Bench):
    bench.start()
    await bench.control.next(ProbeReport)
    bench.control.hang_up()
    await bench.until(lambda: bench.heard().count("link True") == 2)
    assert "link False" in bench.heard()
    first, second = bench.control.hellos
    assert first.session_nonce == second.session_nonce != 0
    assert second.job_digest == "d1"
    assert len(bench.engines()) == 1
    # Where it listens is said on each stream.
    await bench.until(lambda: len(bench.control.reach_reports) >= 2)
    assert bench.control.reach_reports[-1].addresses == ("127.0.0.1:9",)


async def test_a_refusal_that_time_may_cure_is_tried_again(bench: Bench):
    bench.control.refusals = [Refusal.BUSY, Refusal.STALE]
    bench.start()
    await bench.control.next(ProbeReport)
    assert len(bench.control.hellos) == 3
    assert bench.kinds().count("reconnecting") == 2


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(Refusal.REVOKED, 7), (Refusal.VERSION, 8), (Refusal.JOB_MISMATCH, 8), (Refusal.SUPERSEDED, 11)],
)
async def test_a_refusal_that_nothing_cures_ends_the_worker_with_its_code(
    bench: Bench, refusal: Refusal, code: int
):
    bench.control.refusals = [refusal]
    with pytest.raises(RefusedError, match="a test says no") as failed:
        await bench.start()
    assert failed.value.exit_code == code
    assert len(bench.control.hellos) == 1


async def test_leaving_in_order_waits_for_the_coordinators_goodbye(bench: Bench):
    task = bench.start()
    await bench.control.next(ProbeReport)
    bench.worker.leave("SIGTERM received")
    leaving = await bench.control.next(Leaving)
    assert leaving == Leaving("SIGTERM received", 60.0)
    assert not task.done()
    await bench.control.say(Finish(False, "you may go"))
    await task
    assert bench.kinds()[-1] == "left"


async def test_leaving_takes_no_longer_than_it_may(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_ENGINE", "stubborn")
    task = bench.start(drain_s=0.2)
    await bench.control.next(ProbeReport)
    bench.worker.leave("SIGTERM received")
    await asyncio.wait_for(task, 20)
    assert not any(psutil.pid_exists(pid) for pid in bench.engines())


async def test_a_directory_serves_one_worker(bench: Bench):
    with lock_directory(bench.directory), pytest.raises(DirectoryInUse):
        await bench.start()


async def _process(bench: Bench) -> asyncio.subprocess.Process:
    """The supervisor as a process of its own, as far as a running engine."""
    script = (
        "import sys, starlings_worker.engine_child as child; from pathlib import Path\n"
        "child.ENGINE_MODULE = 'support.fake_engine'\n"
        "from starlings_worker.supervisor import run_worker\n"
        "from starlings_worker.options import WorkerOptions\n"
        "sys.exit(run_worker(WorkerOptions(directory=Path(sys.argv[1]), devices='cpu')))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(bench.directory))
    bench.task = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    await bench.control.next(ProbeReport)
    return process


async def _ended(process: asyncio.subprocess.Process) -> int:
    return await asyncio.wait_for(process.wait(), 30)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
async def test_a_signal_drains_and_exits_0(bench: Bench):
    process = await _process(bench)
    process.send_signal(signal.SIGTERM)
    await bench.control.next(Leaving)
    await bench.control.say(Finish(False, "you may go"))
    assert await _ended(process) == 0
    bench.task.set_result(None)  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
async def test_a_second_signal_ends_at_once(bench: Bench):
    process = await _process(bench)
    process.send_signal(signal.SIGINT)
    await bench.control.next(Leaving)
    process.send_signal(signal.SIGINT)
    assert await _ended(process) == 130
    bench.task.set_result(None)  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's order to die with the parent")
async def test_an_engine_dies_with_its_supervisor(bench: Bench):
    process = await _process(bench)
    (engine,) = bench.engines()
    os.kill(process.pid, signal.SIGKILL)
    await _ended(process)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(engine) and psutil.Process(engine).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    bench.task.set_result(None)  # type: ignore[attr-defined]


def test_the_supervisor_imports_neither_torch_nor_numpy():
    script = (
        "import sys, starlings_worker.supervisor\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
