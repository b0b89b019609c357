"""A coordinator that may open few files: it takes all that it may have, and refuses workers before it runs out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import psutil
import pytest

from starlings_coordinator.descriptors import RESERVED
from starlings_protos import control_pb2
from starlings_protos.errors import refusal_of
from starlings_protos.messages import Heartbeat, HeartbeatAck, Refusal, Welcome
from support.coordinator_harness import Running, ScriptedWorker, until
from support.prepared_job import write_prepared_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are read on Linux")

SOFT, HARD = 90, 150
# Without planner and keeper, as the harness has it: this is about the coordinator's own files.
_RUN = """
import asyncio, sys
from pathlib import Path
from starlings_coordinator.children import Child
from starlings_coordinator.options import CoordinatorOptions, json_lines
from starlings_coordinator.run import run_coordinator

async def no_child(child):
    await asyncio.Event().wait()

Child.run = no_child
sys.exit(run_coordinator(CoordinatorOptions(Path(sys.argv[1]), listen_host="127.0.0.1"), json_lines))
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    directory = write_prepared_job(tmp_path / "job", min_workers=1000)
    limits = f'ulimit -Sn {SOFT} && ulimit -Hn {HARD} && exec "$@"'
    command = ["sh", "-c", limits, "sh", sys.executable, "-c", _RUN, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_workers_are_refused_before_descriptors_run_out(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert process.stdout is not None
    said = (json.loads(line) for line in process.stdout)
    running = Running(tmp_path / "job")
    running.told.append(("listening", next(r for r in said if r["event"] == "listening")))
    served = psutil.Process(process.pid)
    assert served.rlimit(psutil.RLIMIT_NOFILE) == (HARD, HARD)

    async with AsyncExitStack() as stack:

        async def come() -> ScriptedWorker:
            worker = await stack.enter_async_context(ScriptedWorker(running))
            await worker.say(worker.hello())
            return worker

        welcomed: list[ScriptedWorker] = []
        refused: grpc.aio.AioRpcError | None = None
        while refused is None:
            worker = await come()
            try:
                await worker.expect(Welcome)
                welcomed.append(worker)
            except grpc.aio.AioRpcError as error:
                refused = error
        assert len(welcomed) > (HARD - RESERVED) // 3
        assert refusal_of(refused) is Refusal.LIMIT
        assert "ulimit -Hn" in str(refused.details())
        assert served.num_fds() <= HARD - RESERVED + 1
        # Those who are in are served, the owner too, and a place that is left is taken again.
        await welcomed[0].say(Heartbeat())
        await welcomed[0].expect(HeartbeatAck)
        stub, channel = running.owner()
        async with channel:
            assert (await stub.Status(control_pb2.StatusRequest(), timeout=10)).phase == "gathering"
        for leaver in (worker, *welcomed[-3:]):
            await leaver.channel.close()
            leaver.call = None  # gRPC keeps a connection as long as a call of it is referred to
        # The newcomer's own connection counts too.
        await until(lambda: served.num_fds() + 1 + RESERVED < HARD, "descriptors to be free again", 10)
        await (await come()).expect(Welcome)
