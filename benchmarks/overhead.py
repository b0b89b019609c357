"""What a swarm costs on top of plain PyTorch, on the same cores and the same model.

Rows, measured in turns within one run, medians over the turns:
(a) a plain single-process loop over the job's samples (`starlings_job.reference`), all cores;
(b) the swarm with one worker that holds every stage, all cores;
(c) two and four workers, the cores shared among them.

For the swarm: tokens/s between the first and the last commit, so that neither imports nor loading count, and for each
worker where its time went. TLS cannot be told from gRPC's own work from outside; its share is estimated from the bytes
that were sent and from how fast this machine encrypts AES-128-GCM.

    python benchmarks/overhead.py [--quick] [--json FILE] [--turns N] [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import Claim, environment, show, write_json

from starlings import template
from starlings.demo.swarm import Swarm
from starlings.owner_client import OwnerClient

CORES = os.cpu_count() or 1
LOCAL = ("--listen", "127.0.0.1", "--port", "0")
RUN_LIMIT_S = 900.0
# A single worker reaches at least this share of the plain loop.
ONE_WORKER_BOUND = 0.9
PLAIN = """
import json, sys
import torch
torch.set_num_threads(int(sys.argv[3]))
import time
from starlings_job.reference import train_reference
at = []
run = train_reference(sys.argv[1], int(sys.argv[2]), on_step=lambda step, loss: at.append(time.monotonic()))
print(json.dumps({"first": at[0], "last": at[-1], "loss": run.losses[-1]}))
"""


def job_text(steps: int, workers: int) -> str:
    """The `tiny` preset; the exchange and the boundaries travel as they do by default."""
    return template.render(
        {
            "job": {"name": "overhead", "tokens": steps * 32 * 128},
            "model": {"preset": "tiny"},
            "data": {"source": "stdlib", "limit": "2M", "sequence_length": 128, "held_out": 8},
            "train": {"batch": 32, "microbatch": 8},
            "swarm": {"min_workers": workers, "settle_s": 0.5},
            "network.ports": {"control": 0, "enrolment": 0},
        },
        comments=False,
    )


def prepare(directory: Path, steps: int, workers: int) -> Path:
    """A prepared job directory."""
    file = directory / "job.toml"
    directory.mkdir(parents=True)
    file.write_text(job_text(steps, workers))
    subprocess.run(
        [sys.executable, "-m", "starlings", "prepare", str(file), "--dir", str(directory / "job"), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return directory / "job"


def plain(job: Path, steps: int) -> float:
    """Tokens/s of the plain loop, the first step left out."""
    # Its errors go to the terminal: a benchmark that fails must say why.
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(job), str(steps), str(CORES)],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(CORES)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    times = json.loads(done.stdout.splitlines()[-1])
    return (steps - 1) * 32 * 128 / (times["last"] - times["first"])


def swarm(directory: Path, steps: int, workers: int) -> dict[str, Any]:
    """One run of the swarm to its end: tokens/s over the committed steps, and each worker's account."""
    job = prepare(directory, steps, workers)
    threads = str(max(1, CORES // workers))
    with Swarm(directory) as running:
        invite = running.start_coordinator([str(job), "--listen", "127.0.0.1", "--host", "127.0.0.1"])
        for _ in range(workers):
            running.start_worker(invite, [*LOCAL, "--threads", threads])
        return asyncio.run(_follow(running, job, workers))


async def _follow(running: Swarm, job: Path, workers: int) -> dict[str, Any]:
    deadline = time.monotonic() + RUN_LIMIT_S
    curve: dict[int, tuple[float, int]] = {}
    accounts: dict[str, dict[str, Any]] = {}
    begun: dict[str, dict[str, float]] = {}
    spans: dict[str, str] = {}
    async with OwnerClient(job) as client:
        async for reply in client.watch(interval_s=0.25):
            running.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the swarm did not end within {RUN_LIMIT_S:.0f} s: {reply.waiting_for}")
            for point in reply.loss_curve:
                curve[point.step] = (point.at_s, point.tokens)
            for worker in reply.workers:
                if worker.HasField("span"):
                    spans[worker.worker_id] = f"{worker.span.first_stage}-{worker.span.last_stage}"
                seconds = dict(worker.seconds)
                if reply.phase == "training" and curve:
                    begun.setdefault(worker.worker_id, {"elapsed": reply.elapsed_s, **seconds})
                    accounts[worker.worker_id] = {
                        "elapsed": reply.elapsed_s,
                        "seconds": seconds,
                        "bytes": sum(worker.bytes_sent.values()),
                    }
            if reply.phase in ("done", "failed"):
                break
    if reply.phase == "failed":
        raise RuntimeError(reply.failure)
    (first_at, first_tokens), (last_at, last_tokens) = curve[min(curve)], curve[max(curve)]
    return {
        "tokens_per_s": (last_tokens - first_tokens) / (last_at - first_at),
        "stages": len(reply.stages),
        "workers": [
            {"span": spans.get(w, ""), **_shares(begun[w], account)}
            for w, account in sorted(accounts.items())
        ],
    }


def _shares(begun: dict[str, float], account: dict[str, Any]) -> dict[str, float]:
    """Shares of the wall time between the first and the last look during training."""
    wall = max(1e-9, account["elapsed"] - begun["elapsed"])
    shares = {
        kind: (seconds - begun.get(kind, 0.0)) / wall
        for kind, seconds in account["seconds"].items()
        if kind in ("compute", "serialise", "send", "wait")
    }
    return {**shares, "tls": account["bytes"] * encryption_s_per_byte() / account["elapsed"]}


_ENCRYPTION: list[float] = []


def encryption_s_per_byte() -> float:
    """Seconds to encrypt and to decrypt one byte with AES-128-GCM in records of 16 KiB, as TLS does."""
    if not _ENCRYPTION:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher, data, count = AESGCM(bytes(16)), bytes(16 << 10), 2000
        begin = time.perf_counter()
        for number in range(count):
            cipher.encrypt(number.to_bytes(12, "big"), data, None)
        _ENCRYPTION.append(2 * (time.perf_counter() - begin) / (count * len(data)))
    return _ENCRYPTION[0]


def run(turns: int, steps: int, sizes: Sequence[int]) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Turns of (a), (b), (c): whatever else the machine does hits all alike."""
    plain_rates: list[float] = []
    swarms: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="starlings-overhead-") as scratch:
        job = prepare(Path(scratch) / "plain", steps, 1)
        for turn in range(turns):
            plain_rates.append(plain(job, steps))
            for size in sizes:
                print(f"turn {turn + 1} of {turns}: {size} worker{'s' if size > 1 else ''}", file=sys.stderr)
                swarms[size].append(swarm(Path(scratch) / f"{turn}-{size}", steps, size))
            # The plain loop before and after, so that a drifting machine does not favour either.
            plain_rates.append(plain(job, steps))
            ratios.append(swarms[1][-1]["tokens_per_s"] / statistics.mean(plain_rates[-2:]))
    base = statistics.median(plain_rates)
    rows: list[dict[str, Any]] = [{"what": "(a) plain loop", "tokens/s": base, "ratio to (a)": 1.0}]
    for size in sizes:
        rate = statistics.median(result["tokens_per_s"] for result in swarms[size])
        name = "(b) swarm, 1 worker" if size == 1 else f"(c) swarm, {size} workers"
        last = swarms[size][-1]
        rows.append({"what": name, "tokens/s": rate, "ratio to (a)": rate / base, "stages": last["stages"]})
        rows += [{"what": f"    worker {n + 1}", **worker} for n, worker in enumerate(last["workers"])]
    ratio = statistics.median(ratios)
    return rows, [
        Claim("one worker against a plain loop, tokens/s", ratio, ONE_WORKER_BOUND, ratio >= ONE_WORKER_BOUND)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one short turn of (a) and (b), under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    environ = environment()
    if options.quick:
        rows, claims = run(1, 8, (1,))
    else:
        rows, claims = run(options.turns, options.steps, (1, 2, 4))
    show("Overhead of the swarm", rows, claims)
    write_json(options.json, "overhead", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
