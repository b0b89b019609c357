"""How long a loss holds a swarm up, and how much work it costs: real processes over mTLS on emulated slow devices.

Four workers train a small language model in a pipeline in which every stage has two holders. One incident after the
other: a worker is killed or frozen, the others go on, it comes back and takes part again; then the next.

(a) a worker that shares its stages, at a random moment: SIGKILL, and SIGSTOP (as a cut cable looks to the others);
(b) the coordinator: SIGKILL, and started again at once;
(c) a worker in the exchange of a step: SIGKILL and SIGSTOP.

`held up`: seconds from the blow to the commit of the step that it hit, less one step at 95 % of the rate that the
remaining workers show afterwards. That is, how much later than without the blow a swarm of the remaining workers would
be where it is, the replay of the step in `sync` not counted. `redone`: samples whose computation was thrown away.

    python benchmarks/recovery.py [--quick] [--json FILE] [--runs N] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import Claim, environment, show, write_json

from starlings import template
from starlings.demo.kill import child_of, choose_victim, kill_at_once
from starlings.demo.swarm import Child, Swarm
from starlings.owner_client import OwnerClient
from starlings.views.status import History
from starlings_protos import control_pb2
from starlings_protos.errors import StarlingsError

LOCAL = ("--listen", "127.0.0.1", "--port", "0", "--threads", "1", "--devices", "cpu")
WORKERS, BATCH, MICROBATCH, LENGTH = 4, 16, 2, 64
# Memory for about half of the model each: two stages, two holders of each.
FLEET = ("--emulate", "rtx4060", "--memory", "110MB")
MODEL = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
KILL_BOUND_S, FREEZE_BOUND_S = 2.0, 8.0
# Commits that are watched after an incident, for the rate of those who are left.
COMMITS_AFTER = 5
LIMIT_S = 90.0
COORDINATOR = ("--listen", "127.0.0.1", "--host", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    blow: str
    in_exchange: bool = False
    bound_s: float | None = None


CASES = (
    Case("(a) a stage's worker", "kill", bound_s=KILL_BOUND_S),
    Case("(a) a stage's worker", "freeze", bound_s=FREEZE_BOUND_S),
    Case("(b) the coordinator", "kill"),
    Case("(c) in the exchange", "kill", in_exchange=True, bound_s=KILL_BOUND_S),
    Case("(c) in the exchange", "freeze", in_exchange=True, bound_s=FREEZE_BOUND_S),
)


@dataclass(frozen=True, slots=True)
class Incident:
    """All in seconds. `redone_samples`: leased, and computed in vain."""

    held_up_s: float
    step_s: float
    redone_samples: int
    resyncs: int
    hit: bool


class Watcher:
    """Follows the job; times are those of this process, taken from the coordinator's by the least delay ever seen."""

    def __init__(self, job: Path, swarm: Swarm) -> None:
        self._job, self._swarm = job, swarm
        self.history = History()
        self._offset_s = float("inf")

    async def until(self, condition: Callable[[control_pb2.StatusReply], object]) -> control_pb2.StatusReply:
        """Raises TimeoutError, and CommandError when a process failed that should live."""
        try:
            return await self._until(condition)
        except TimeoutError:
            last = self.history.last
            states = [(w.worker_id, w.state, w.reason) for w in last.workers] if last is not None else []
            said = "\n".join(event.text for event in self.history.events[-12:])
            raise TimeoutError(f"nothing came of it in {LIMIT_S:.0f} s: {states}\n{said}") from None

    async def _until(self, condition: Callable[[control_pb2.StatusReply], object]) -> control_pb2.StatusReply:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with OwnerClient(self._job) as client:
                        async for reply in client.watch(interval_s=0.05):
                            self._swarm.check()
                            self._offset_s = min(self._offset_s, time.monotonic() - reply.elapsed_s)
                            self.history.add(reply)
                            if condition(reply):
                                return reply
                except StarlingsError:
                    pass  # A coordinator that was killed comes back; the time limit is the end of patience.
                await asyncio.sleep(0.05)

    def forget_clock(self) -> None:
        self._offset_s = float("inf")

    def commit_at_s(self, step: int) -> float:
        """When `step` was committed, by this process's clock."""
        return next(p.at_s for p in self.history.points if p.step == step) + self._offset_s


def job_text(steps: int) -> str:
    return template.render(
        {
            "job": {"name": "recovery", "tokens": steps * BATCH * LENGTH},
            "model": {"config": "config.json"},
            "data": {"source": "stdlib", "limit": "1M", "sequence_length": LENGTH, "held_out": 8},
            "train": {"batch": BATCH, "microbatch": MICROBATCH},
            "exchange": {"codec": "exact"},
            "swarm": {"min_workers": WORKERS, "settle_s": 0.5},
            "network.ports": {"control": 0, "enrolment": 0},
        },
        comments=False,
    )


def prepare(directory: Path) -> Path:
    import json

    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "job.toml").write_text(job_text(100_000))
    command = [sys.executable, "-m", "starlings", "prepare", str(directory / "job.toml"), "--json"]
    subprocess.run([*command, "--dir", str(directory / "job")], check=True, stdout=subprocess.DEVNULL)
    return directory / "job"


def all_train(reply: control_pb2.StatusReply) -> bool:
    return sum(worker.state == "training" for worker in reply.workers) == WORKERS


async def strike(case: Case, watcher: Watcher, swarm: Swarm, job: Path, rng: random.Random) -> Incident:
    """One incident from a swarm at work to a swarm at work."""
    begin = await watcher.until(lambda r: r.phase == "training" and all_train(r))
    await watcher.until(lambda r: r.step >= begin.step + 3)
    points = watcher.history.points
    step_s = statistics.median(b.at_s - a.at_s for a, b in pairwise(points[-4:]))
    if case.in_exchange:
        reply = await watcher.until(
            lambda r: 0 < r.step_microbatches == r.step_microbatches_done and r.phase == "training"
        )
    else:
        await asyncio.sleep(rng.uniform(0.0, step_s))
        reply = await watcher.until(lambda r: r.phase == "training")
    victim, child = _victim(case, reply, swarm, rng)
    events = len(watcher.history.events)
    blow_at_s = time.monotonic()
    _blow(case, child)
    if case.blow == "kill":
        child.process.wait(10)
    if victim is None:
        watcher.forget_clock()
        swarm.start_coordinator([str(job), *COORDINATOR])
    hit = reply.step
    await watcher.until(lambda r: r.phase == "training" and r.step >= hit + 1 + COMMITS_AFTER)
    seen = watcher.history.events[events:]
    again = [e for e in seen if "begins again" in e.text]
    first = min(
        (s for s in range(hit, hit + 2) if any(f"step {s} begins again" in e.text for e in again)),
        default=hit,
    )
    commits = [watcher.commit_at_s(s) for s in range(first, first + COMMITS_AFTER)]
    rest_s = statistics.median(b - a for a, b in pairwise(commits))
    held_up_s = max(0.0, commits[0] - rest_s / 0.95 - blow_at_s)
    redone = reply.step_microbatches_done * MICROBATCH if again else 0
    await _bring_back(case, watcher, swarm, victim, child)
    seen = watcher.history.events[events:]
    resyncs = sum(event.kind == "joined" for event in seen)
    in_exchange = any("it was being exchanged" in event.text for event in again)
    return Incident(held_up_s, rest_s, redone, resyncs, hit=in_exchange or not case.in_exchange)


def _victim(
    case: Case, reply: control_pb2.StatusReply, swarm: Swarm, rng: random.Random
) -> tuple[str | None, Child]:
    if case.name.startswith("(b)"):
        assert swarm.coordinator is not None
        return None, swarm.coordinator
    first = choose_victim(reply.workers)
    if first is None:
        raise RuntimeError("no worker of this plan can be spared")
    span = next(w.span for w in reply.workers if w.worker_id == first)
    alike = sorted(w.worker_id for w in reply.workers if w.HasField("span") and w.span == span)
    victim = rng.choice(alike)
    return victim, child_of(swarm, victim)


def _blow(case: Case, child: Child) -> None:
    if case.blow == "freeze":
        os.killpg(child.process.pid, signal.SIGSTOP)
        return
    child.expendable = True
    kill_at_once(child.process)


async def _bring_back(case: Case, watcher: Watcher, swarm: Swarm, victim: str | None, child: Child) -> None:
    if victim is None:
        await watcher.until(all_train)
        return
    if case.blow == "freeze":
        os.killpg(child.process.pid, signal.SIGCONT)
    else:
        swarm.start_again(child)
    await watcher.until(all_train)


def run(cases: tuple[Case, ...], runs: int, seed: int) -> tuple[list[dict[str, Any]], list[Claim]]:
    rng = random.Random(seed)
    found: dict[Case, list[Incident]] = {}
    with tempfile.TemporaryDirectory(prefix="starlings-recovery-") as scratch:
        directory = Path(scratch)
        job = prepare(directory)
        with Swarm(directory) as swarm:
            invite = swarm.start_coordinator([str(job), *COORDINATOR])
            for _ in range(WORKERS):
                swarm.start_worker(invite, [*LOCAL, *FLEET])
            watcher = Watcher(job, swarm)
            for case in cases:
                found[case] = []
                while len(found[case]) < runs:
                    incident = asyncio.run(strike(case, watcher, swarm, job, rng))
                    note = "" if incident.hit else " (the exchange was over already: not counted)"
                    print(
                        f"{case.name}, {case.blow}: held up {incident.held_up_s:.2f} s{note}", file=sys.stderr
                    )
                    if incident.hit:
                        found[case].append(incident)
    return [_row(case, incidents) for case, incidents in found.items()], _claims(found)


def _row(case: Case, incidents: list[Incident]) -> dict[str, Any]:
    held = [incident.held_up_s for incident in incidents]
    redone = [incident.redone_samples for incident in incidents]
    return {
        "what": case.name,
        "blow": "SIGKILL" if case.blow == "kill" else "SIGSTOP",
        "runs": len(incidents),
        "held up, median s": statistics.median(held),
        "worst s": max(held),
        "bound s": case.bound_s if case.bound_s is not None else "",
        "step s": statistics.median(incident.step_s for incident in incidents),
        f"redone of {BATCH} samples": statistics.median(redone),
        "resyncs, most": max(incident.resyncs for incident in incidents),
    }


def _claims(found: dict[Case, list[Incident]]) -> list[Claim]:
    claims = []
    for case, incidents in found.items():
        if case.bound_s is not None:
            worst = max(incident.held_up_s for incident in incidents)
            claims.append(
                Claim(
                    f"{case.name}, {case.blow}: held up, worst of {len(incidents)}, s",
                    worst,
                    case.bound_s,
                    worst <= case.bound_s,
                )
            )
        most = max(incident.resyncs for incident in incidents)
        bound = 0 if case.name.startswith("(b)") else 1
        claims.append(Claim(f"{case.name}, {case.blow}: resyncs, most", most, bound, most <= bound))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one SIGKILL of (a), under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--runs", type=int, default=10, help="incidents of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    environ = environment()
    print(f"seed {options.seed}", file=sys.stderr)
    cases, runs = (CASES[:1], 1) if options.quick else (CASES, options.runs)
    rows, claims = run(cases, runs, options.seed)
    show("Recovery", rows, claims)
    write_json(options.json, "recovery", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
