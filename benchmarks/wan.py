"""How busy unequal workers are behind home uplinks, and how soon they get anywhere.

Four workers of speeds 1:1:2:4 with uplinks of 100, 100, 50 and 20 Mbit/s, 80 ms apart: real processes that train
`micro` over real mTLS. Their computing takes a fixed time per microbatch, so that two cores are not the limit, and
their uplinks are paced in the transport (`--emulate-pass`, `--emulate-link`). torch's DistributedDataParallel over
gloo, exact and with PowerSGD, runs in network namespaces with the same rates (`tc tbf`; without the delay, in its
favour); where that is not allowed it is modelled from its bytes and says so.

`utilisation`: seconds of microbatches that were trained, over workers x seconds. `of an infinite network`: against
the same swarm with uplinks without limit and delay. A second table: equal workers, seconds per global batch.

    python benchmarks/wan.py [--quick] [--json FILE] [--seconds S] [--only ROW]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import wan_network
from report import Claim, environment, show, write_json

from starlings import template
from starlings.demo.swarm import Swarm
from starlings.owner_client import OwnerClient
from starlings_job.model import initial_state
from starlings_job.prepared import load_prepared
from starlings_protos import control_pb2
from starlings_protos.identity import identity_of_certificate

MICROBATCH, LENGTH = 4, 64
DELAY_MS = 40.0
LEARNING_RATE = 2e-3
RUN_LIMIT_S = 900.0
# Steps that are not measured: the workers connect to each other, and the first codes are loaded.
FIRST_STEPS = 3
# Loss that `time to target` waits for, as a mean over this many points of the curve.
TARGET_LOSS, SMOOTHED_POINTS = 3.6, 5
UTILISATION_BOUND = 0.95
# Nobody waits for the slowest: not even the one that computes least does so for the network.
IDLEST_BOUND = 0.9


@dataclass(frozen=True, slots=True)
class Peer:
    """pass_s: what a microbatch takes it. uplink_mbit_s: 0 = without limit."""

    pass_s: float
    uplink_mbit_s: float = 0.0

    @property
    def arguments(self) -> list[str]:
        link = (
            ["--emulate-link", f"{self.uplink_mbit_s:g}Mbit/s,{DELAY_MS:g}ms"] if self.uplink_mbit_s else []
        )
        return ["--emulate-pass", f"{self.pass_s:g}", *link]


HOMES = (Peer(0.4, 100), Peer(0.4, 100), Peer(0.2, 50), Peer(0.1, 20))
NO_LIMIT = tuple(Peer(peer.pass_s) for peer in HOMES)
WORKER = ("--listen", "127.0.0.1", "--port", "0", "--devices", "cpu", "--threads", "1", "--precision", "fp32")


@dataclass(frozen=True, slots=True)
class Way:
    """How a swarm exchanges: sections of its job file."""

    name: str
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Samples per step of the whole swarm.
    batch: int = 64
    # Whether equal workers are tried too, 1 to 8 of them.
    scaled: bool = True

    @property
    def pairs(self) -> bool:
        return self.name.startswith("pairs")


ASYNC = {"schedule": "async", "inner_batch": 4}
WAYS = (
    Way("allreduce", {"exchange": {"codec": "exact"}}),
    Way("allreduce int8:128", {"exchange": {"codec": "int8:128"}}),
    # A replica steps after a quarter of the batch, as each of four equal ones does above. The job is endless, so that
    # "pairs" is in its warm-up (H = 5, exchanges ten times as often as later) all the time.
    Way("pairs", {"train": ASYNC, "exchange": {"preset": "pairs"}}),
    Way(
        "pairs, after its warm-up",
        {"train": ASYNC, "exchange": {"preset": "pairs", "warmup_fraction": 0.0}},
        scaled=False,
    ),
)


@dataclass(slots=True)
class Trained:
    """What a run came to, from `begin_s` on. microbatches: per worker, in the order of the fleet."""

    seconds: float
    microbatches: list[float]
    to_target_s: float | None
    sent_bytes: float | None = None

    def utilisation(self, fleet: Sequence[Peer]) -> float:
        useful_s = sum(count * peer.pass_s for count, peer in zip(self.microbatches, fleet, strict=True))
        return useful_s / (len(fleet) * self.seconds)


# ---------------------------------------------------------------- the swarm


def job_text(way: Way, workers: int, tokens: int) -> str:
    sections: dict[str, dict[str, Any]] = {
        "job": {"name": "wan", "seed": 0, "tokens": tokens},
        "model": {"preset": "micro"},
        "data": {"source": "stdlib", "limit": "4M", "held_out": 8},
        "train": {"batch": way.batch, "microbatch": MICROBATCH, "lr": LEARNING_RATE, "decay": "none"},
        "swarm": {"min_workers": workers, "settle_s": 0.5},
        "network.ports": {"control": 0, "enrolment": 0},
    }
    for name, settings in way.sections.items():
        sections[name] = {**sections.get(name, {}), **settings}
    return template.render(sections, comments=False)


def prepare(directory: Path, way: Way, workers: int, tokens: int) -> Path:
    """A job's directory, prepared. The first one is there for the others to copy: what they prepare is the same."""
    directory.mkdir(parents=True)
    text, job = job_text(way, workers, tokens), directory / "job"
    first = directory.parent / "prepared"
    if not first.exists():
        (directory / "job.toml").write_text(text)
        command = [sys.executable, "-m", "starlings", "prepare", str(directory / "job.toml")]
        subprocess.run([*command, "--dir", str(first), "--json"], check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(first, job)
    (job / "job.toml").write_text(text)
    return job


def train(directory: Path, way: Way, fleet: Sequence[Peer], seconds: float) -> Trained:
    """One swarm, watched for `seconds` of its training after the first steps."""
    job = prepare(directory, way, len(fleet), 1 << 40)
    with Swarm(directory) as swarm:
        invite = swarm.start_coordinator([str(job), "--listen", "127.0.0.1", "--host", "127.0.0.1"])
        for peer in fleet:
            swarm.start_worker(invite, [*WORKER, *peer.arguments], {"OMP_WAIT_POLICY": "PASSIVE"})
        return asyncio.run(_watch(swarm, job, directory, fleet, way, seconds))


async def _watch(
    swarm: Swarm, job: Path, directory: Path, fleet: Sequence[Peer], way: Way, seconds: float
) -> Trained:
    first: control_pb2.StatusReply | None = None
    first_s = 0.0
    curve: dict[int, tuple[float, float]] = {}
    async with asyncio.timeout(RUN_LIMIT_S), OwnerClient(job) as client:
        async for reply in client.watch(interval_s=0.25):
            swarm.check()
            if reply.phase in ("done", "failed"):
                raise RuntimeError(f"the job ended before it was measured: {reply.failure}")
            curve |= {point.step: (point.at_s, point.loss) for point in reply.loss_curve}
            if first is None and reply.step >= FIRST_STEPS:
                first, first_s = reply, time.monotonic()
            elif first is not None and time.monotonic() - first_s >= seconds:
                passed = time.monotonic() - first_s
                return _between(first, reply, passed, curve, _ids(directory, len(fleet)))
    raise RuntimeError("the coordinator said nothing any more")


def _ids(directory: Path, workers: int) -> list[str]:
    """Ids of the workers in the order in which they were started."""
    found = []
    for number in range(1, workers + 1):
        (file,) = (directory / "workers" / str(number)).rglob("id.pem")
        found.append(identity_of_certificate(file.read_bytes()).id)
    return found


def _between(
    first: control_pb2.StatusReply,
    last: control_pb2.StatusReply,
    seconds: float,
    curve: dict[int, tuple[float, float]],
    ids: Sequence[str],
) -> Trained:
    before = {worker.worker_id: worker for worker in first.workers}
    now = {worker.worker_id: worker for worker in last.workers}
    per_microbatch = MICROBATCH * LENGTH
    counts = [(now[one].tokens - before[one].tokens) / per_microbatch for one in ids]
    sent = sum(
        now[one].bytes_sent.get("exchange", 0) - before[one].bytes_sent.get("exchange", 0) for one in ids
    )
    points = [curve[step] for step in sorted(curve)]
    return Trained(seconds, counts, _reached(points), sent / len(ids))


def _reached(points: Sequence[tuple[float, float]]) -> float | None:
    """When the mean of some neighbouring losses first is at the target, from the first point on."""
    for number in range(len(points) - SMOOTHED_POINTS + 1):
        window = points[number : number + SMOOTHED_POINTS]
        if statistics.fmean(loss for _, loss in window) <= TARGET_LOSS:
            return window[-1][0] - points[0][0]
    return None


# ---------------------------------------------------------------- DistributedDataParallel


def train_ddp(directory: Path, fleet: Sequence[Peer], power_rank: int, seconds: float) -> Trained:
    """DDP in namespaces: everybody trains one microbatch per step, so the slowest sets the pace."""
    steps = max(8, round(seconds / max(peer.pass_s for peer in fleet)))
    job = prepare(directory, WAYS[0], len(fleet), 1 << 30)
    here = Path(__file__).parent
    with wan_network.hosts([peer.uplink_mbit_s for peer in fleet]) as hosts:
        children = []
        for rank, (host, peer) in enumerate(zip(hosts, fleet, strict=True)):
            command = [
                *host.through, sys.executable, str(here / "wan_ddp.py"), "--job", str(job), "--rank", str(rank),
                "--world", str(len(fleet)), "--store", f"tcp://{hosts[0].address}:29400", "--steps", str(steps),
                "--pass-s", str(peer.pass_s), "--power-rank", str(power_rank), "--lr", str(LEARNING_RATE),
            ]  # fmt: skip
            environment = {
                **os.environ, "GLOO_SOCKET_IFNAME": wan_network.DEVICE, "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
            }  # fmt: skip
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True))
        try:
            out, _ = children[0].communicate(timeout=RUN_LIMIT_S)
            if any(child.wait(60) for child in children):
                raise RuntimeError("a rank of DDP failed")
        finally:
            for child in children:
                child.kill()
                child.wait()
    points = [(at_s, loss) for at_s, loss in json.loads(out.splitlines()[-1])["steps"]]
    first = points[FIRST_STEPS - 1]
    count = len(points) - FIRST_STEPS
    return Trained(points[-1][0] - first[0], [count] * len(fleet), _reached(points))


def model_ddp(directory: Path, fleet: Sequence[Peer], power_rank: int) -> Trained:
    """Where there are no namespaces: a step takes the slowest pass, and then the slowest uplink's share of the ring."""
    job = load_prepared(prepare(directory, WAYS[0], len(fleet), 1 << 30))
    elements = 0
    for _, tensors in initial_state(job.description, 0):
        for tensor in tensors.values():
            # PowerSGD sends the two factors of a matrix (Vogels et al. 2019, algorithm 1).
            factored = power_rank and tensor.ndim == 2
            elements += power_rank * sum(tensor.shape) if factored else tensor.numel()
    sent_bytes = 4 * elements * 2 * (len(fleet) - 1) / len(fleet)
    step_s = max(p.pass_s for p in fleet) + 8e-6 * sent_bytes / min(p.uplink_mbit_s for p in fleet)
    return Trained(step_s, [1] * len(fleet), None, sent_bytes)


# ---------------------------------------------------------------- tables


def row_of(name: str, network: str, fleet: Sequence[Peer], run: Trained, way: Way | None) -> dict[str, Any]:
    samples = sum(run.microbatches) * MICROBATCH
    row = {
        "what": name,
        "network": network,
        "utilisation": run.utilisation(fleet),
        "of an infinite network": "",
        "samples/s": samples / run.seconds,
        "idlest": min(
            count * peer.pass_s / run.seconds for count, peer in zip(run.microbatches, fleet, strict=True)
        ),
        "s to target": "" if run.to_target_s is None else run.to_target_s,
        "KB/sample": "" if not run.sent_bytes or not samples else run.sent_bytes / samples / 1e3 * len(fleet),
        "batch": way.batch if way else MICROBATCH * len(fleet),
    }
    print(json.dumps(row), file=sys.stderr)
    return row


def unequal(
    scratch: Path, seconds: float, only: str, *, quick: bool
) -> tuple[list[dict[str, Any]], list[Claim]]:
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    refused = wan_network.why_not()
    if refused:
        print(f"DDP is modelled, because it {refused}", file=sys.stderr)
    for name, rank in (("DDP fp32", 0), ("DDP PowerSGD 4", 4)):
        if only and only not in name:
            continue
        print(name, file=sys.stderr)
        if refused:
            rows.append(row_of(name, "modelled", HOMES, model_ddp(scratch / name, HOMES, rank), None))
        else:
            run = train_ddp(scratch / name, HOMES, rank, seconds)
            rows.append(row_of(name, "homes, no delay", HOMES, run, None))
    for way in WAYS:
        if only and only not in way.name:
            continue
        print(way.name, file=sys.stderr)
        homes = row_of(
            way.name, "homes", HOMES, train(scratch / f"{way.name} homes", way, HOMES, seconds), way
        )
        rows.append(homes)
        if quick:
            continue
        ideal = row_of(
            way.name, "infinite", NO_LIMIT, train(scratch / f"{way.name} ideal", way, NO_LIMIT, seconds), way
        )
        homes["of an infinite network"] = share = homes["utilisation"] / ideal["utilisation"]
        rows.append(ideal)
        if way.pairs:
            name = f"{way.name}: utilisation, of what an infinitely fast network gives"
            claims.append(Claim(name, share, UTILISATION_BOUND, share >= UTILISATION_BOUND))
            idlest = homes["idlest"] / ideal["idlest"]
            name = f"{way.name}: the idlest worker, of the idlest with an infinitely fast network"
            claims.append(Claim(name, idlest, IDLEST_BOUND, idlest >= IDLEST_BOUND))
    return rows, claims


def equal(
    scratch: Path, seconds: float, only: str, counts: Sequence[int]
) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Seconds per global batch of equal workers must fall with each."""
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for way in WAYS:
        if (only and only not in way.name) or not way.scaled:
            continue
        per_batch: list[float] = []
        for count in counts:
            print(f"{way.name}: {count} equal workers", file=sys.stderr)
            fleet = [Peer(0.4, 50)] * count
            run = train(scratch / f"{way.name} {count}", way, fleet, seconds)
            per_batch.append(run.seconds * way.batch / (sum(run.microbatches) * MICROBATCH))
            row = {
                "equal workers": count,
                "way": way.name,
                "s per global batch": per_batch[-1],
                "speed-up": per_batch[0] / per_batch[-1],
                "utilisation": run.utilisation(fleet),
            }
            print(json.dumps(row), file=sys.stderr)
            rows.append(row)
        if way.name == "pairs":
            falls = max(b / a for a, b in itertools.pairwise(per_batch))
            claims.append(
                Claim("pairs: seconds per batch, each to the fewer workers'", falls, 1.0, falls < 1)
            )
    return rows, claims


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds of one row; says little")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training that are measured, per row")
    parser.add_argument("--only", default="", help="only rows with this in their name")
    options = parser.parse_args()
    environ = environment()
    with tempfile.TemporaryDirectory(prefix="starlings-wan-") as scratch:
        if options.quick:
            rows, claims = unequal(Path(scratch), 3.0, options.only or "int8", quick=True)
        else:
            rows, claims = unequal(Path(scratch), options.seconds, options.only, quick=False)
            more, others = equal(Path(scratch), options.seconds / 2, options.only, (1, 2, 4, 8))
            rows, claims = rows + more, claims + others
    show("Behind home uplinks", rows, claims)
    write_json(options.json, "wan", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
