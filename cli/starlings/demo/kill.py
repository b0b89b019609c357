"""`--kill-one-at`: a worker is killed in the middle of training, as a power cut would, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlings.demo.swarm import Child, Swarm
from starlings.failures import CommandError, ExitCode
from starlings_protos import control_pb2
from starlings_protos.errors import UsageError
from starlings_protos.identity import Identity


def choose_victim(workers: Sequence[control_pb2.WorkerStatus]) -> str | None:
    """The id of a worker all of whose stages others hold too, so that nothing but its work can be lost: of several the
    one with the most stages, then the lowest id. None when there is no such worker.
    """
    holding = [worker for worker in workers if worker.state == "training" and worker.HasField("span")]

    def stages(worker: control_pb2.WorkerStatus) -> set[int]:
        return set(range(worker.span.first_stage, worker.span.last_stage + 1))

    sharing = [
        worker
        for worker in holding
        if stages(worker) <= {s for other in holding if other is not worker for s in stages(other)}
    ]
    chosen = min(sharing, key=lambda worker: (-len(stages(worker)), worker.worker_id), default=None)
    return chosen.worker_id if chosen is not None else None


def kill_at_once(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a worker's supervisor and its engine at the same moment: neither says a last word."""
    if sys.platform == "win32":
        # The engine's pipe ends with its supervisor.
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Kill:
    """One kill, planned and done. `at_step`: as soon as that many steps are committed."""

    at_step: int
    worker_id: str = ""
    name: str = ""
    step: int = -1
    at_s: float = 0.0

    @property
    def done(self) -> bool:
        return bool(self.worker_id)

    def look(self, reply: control_pb2.StatusReply, swarm: Swarm) -> bool:
        """Kills when the time has come; True when it just did.

        Raises:
            CommandError: no worker can be spared.
        """
        if self.done or reply.phase != "training" or reply.step < self.at_step:
            return False
        victim = choose_victim(reply.workers)
        if victim is None:
            raise CommandError(
                "No worker of this plan shares all of its stages with others, so none can be killed without loss: "
                "try more --workers.",
                ExitCode.USAGE,
            )
        child = child_of(swarm, victim)
        child.expendable = True
        kill_at_once(child.process)
        self.worker_id, self.name, self.step, self.at_s = victim, child.name, reply.step, reply.elapsed_s
        return True

    def report(self, events: Sequence[control_pb2.Event]) -> dict[str, Any]:
        """What was killed, and what the coordinator said of it."""
        about = [event for event in events if event.at_s >= self.at_s and self.worker_id in event.text]
        lost = next((event for event in about if event.kind == "lost"), None)
        return {
            "worker_id": self.worker_id,
            "name": self.name,
            "step": self.step,
            "at_s": self.at_s,
            "noticed_after_s": lost.at_s - self.at_s if lost is not None else None,
            "said": lost.text if lost is not None else "",
        }


def child_of(swarm: Swarm, worker_id: str) -> Child:
    """The process of a worker id, by the certificate in its directory."""
    for number, child in enumerate(swarm.workers, 1):
        with contextlib.suppress(UsageError):
            if Identity.load(swarm.directory / "workers" / str(number)).id == worker_id:
                return child
    raise CommandError(f"No process of this demo is {worker_id}.", ExitCode.BUG)
