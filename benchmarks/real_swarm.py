"""A job trained by a real swarm on this machine, from its preparation to its end: one process per worker, over mTLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlings.demo.swarm import Swarm
from starlings.owner_client import OwnerClient
from starlings_protos import control_pb2

WORKER = (
    "--listen", "127.0.0.1", "--port", "0", "--devices", "cpu", "--threads", "1", "--precision", "fp32",
)  # fmt: skip
RUN_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Run:
    """losses: training loss by step, of the steps that the coordinator still had when it was asked."""

    reply: control_pb2.StatusReply
    losses: dict[int, float]


def train_job(directory: Path, text: str, workers: int, arguments: Sequence[str]) -> Run:
    """Prepares `directory`/job from the text of a job file, and trains it with equal workers.

    Raises:
        RuntimeError: a process ended, or the job did not come to its evaluation.
    """
    directory.mkdir(parents=True)
    file, job = directory / "job.toml", directory / "job"
    file.write_text(text)
    command = [sys.executable, "-m", "starlings", "prepare", str(file), "--dir", str(job), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with Swarm(directory) as swarm:
        invite = swarm.start_coordinator([str(job), "--listen", "127.0.0.1", "--host", "127.0.0.1"])
        for _ in range(workers):
            swarm.start_worker(invite, [*WORKER, *arguments], {"OMP_WAIT_POLICY": "PASSIVE"})
        run = asyncio.run(_to_the_end(swarm, job))
    if run.reply.phase == "failed" or not run.reply.has_validation_loss:
        raise RuntimeError(f"the job did not come to its evaluation: {run.reply.failure}")
    return run


async def _to_the_end(swarm: Swarm, job: Path) -> Run:
    losses: dict[int, float] = {}
    async with asyncio.timeout(RUN_LIMIT_S), OwnerClient(job) as client:
        async for reply in client.watch(interval_s=0.5):
            swarm.check()
            losses |= {point.step: point.loss for point in reply.loss_curve}
            if reply.phase in ("done", "failed"):
                return Run(reply, losses)
    raise RuntimeError("the coordinator said nothing any more")
