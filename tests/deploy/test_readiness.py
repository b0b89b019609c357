"""Real processes under a service manager's socket: ready when they can work, stopping when the end begins."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from starlings_protos.messages import Finish, Leaving, ProbeReport
from support.fake_control import FakeControl
from support.prepared_job import write_prepared_job

if not hasattr(socket, "AF_UNIX") or sys.platform == "win32":
    pytest.skip("no service manager of this kind here", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]
_WORKER = (
    "import sys, starlings_worker.engine_child as child; from pathlib import Path\n"
    "child.ENGINE_MODULE = 'support.fake_engine'\n"
    "from starlings_worker.supervisor import run_worker\n"
    "from starlings_worker.options import WorkerOptions\n"
    "sys.exit(run_worker(WorkerOptions(directory=Path(sys.argv[1]), devices='cpu')))\n"
)


class Service:
    """A process with NOTIFY_SOCKET and a watchdog, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.setblocking(False)
        self.said: list[str] = []
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        settings = {"NOTIFY_SOCKET": str(self.path), "WATCHDOG_USEC": "60000000", "PYTHONPATH": path}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env={**os.environ, **settings, **environment}
        )
        return self.process

    async def until(self, line: str) -> None:
        """Waits until it has said a line that begins like that; what it says is kept in `said`."""
        try:
            async with asyncio.timeout(60):
                while not any(said.startswith(line) for said in self.said):
                    data = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
                    self.said += data.decode().splitlines()
        except TimeoutError:
            raise AssertionError(f"no {line!r} among {self.said}") from None

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self.socket.close()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(tmp_path)
    yield service
    await service.close()


async def test_a_coordinator_is_ready_when_it_listens_and_says_what_it_waits_for(
    service: Service, tmp_path: Path
):
    directory = write_prepared_job(tmp_path / "job", min_workers=50)
    process = await service.start(
        *("-m", "starlings", "coordinator", str(directory), "--no-invite", "--listen", "127.0.0.1"),
        *("--port", "0", "--enrolment-port", "0"),
    )
    await service.until("READY=1")
    # Before that it was not: its ports are open and known by now.
    assert (directory / "owner" / "coordinator.json").exists()
    assert "STOPPING=1" not in service.said
    await service.until("STATUS=gathering: waiting for")
    await service.until("WATCHDOG=1")
    process.send_signal(signal.SIGTERM)
    await service.until("STOPPING=1")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert service.said.count("READY=1") == 1


async def test_a_worker_is_ready_when_it_was_welcomed_and_stopping_when_it_leaves(
    service: Service, tmp_path: Path
):
    async with FakeControl() as control:
        control.join(tmp_path / "worker")
        engines = str(tmp_path / "engines.log")
        process = await service.start("-c", _WORKER, str(tmp_path / "worker"), FAKE_ENGINE_LOG=engines)
        await service.until("STATUS=This machine takes part in fake")
        await control.next(ProbeReport)
        await service.until("READY=1")
        await service.until("WATCHDOG=1")
        await service.until("STATUS=Measured")
        assert "STOPPING=1" not in service.said
        process.send_signal(signal.SIGTERM)
        await control.next(Leaving)
        await service.until("STOPPING=1")
        await service.until("STATUS=Leaving in order: SIGTERM received")
        await control.say(Finish(False, "you may go"))
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_worker_without_a_coordinator_is_not_ready(service: Service, tmp_path: Path):
    async with FakeControl() as control:
        control.join(tmp_path / "worker")
    engines = str(tmp_path / "engines.log")
    process = await service.start("-c", _WORKER, str(tmp_path / "worker"), FAKE_ENGINE_LOG=engines)
    await service.until("STATUS=Cannot reach")
    assert "READY=1" not in service.said
    process.send_signal(signal.SIGTERM)
    await service.until("STOPPING=1")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert "READY=1" not in service.said
