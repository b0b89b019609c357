"""Whether a real swarm learns as `convergence.py` says: `pairs` and `allreduce`, against their training in one process.

Four workers, real processes over mTLS, with whole `tiny` models; a microbatch takes each the same fixed time, so that
slots are as many steps long as the preset says whatever else the machine does. The same job is then trained in one
process, from the same weights on the same samples: those of `allreduce` in the same order, those of `pairs` in the
order of their steps, which differs from that of the leases by what replicas are ahead of each other.

`loss` is of the replicas' exact average on held-out text; `curve`: the mean difference of the training losses, after
the first quarter of the steps, in windows of a twelfth of them.

    python benchmarks/convergence_swarm.py [--quick] [--json FILE] [--steps N] [--pass-s SECONDS]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from inprocess.local import train_locally
from inprocess.rounds import Course, rounds_of
from inprocess.stacked import Stacked
from inprocess.swarm import Setup, Swarm
from inprocess.text import Text
from inprocess.training import train_synchronously
from real_swarm import Run, train_job
from report import Claim, environment, show, write_json

from starlings import template
from starlings_job.exchange_rules import Preset
from starlings_job.model import initial_state
from starlings_job.prepared import load_prepared
from starlings_worker.optimizers.adam import AdamW

PRESETS: tuple[Preset, ...] = ("allreduce", "pairs")
WORKERS, MICROBATCH, LENGTH, HELD_OUT, SEED = 4, 4, 128, 64, 0
BATCH = WORKERS * MICROBATCH
STEPS, RATE = 240, 2e-3
# So that a dozen of rounds fit in.
PAIRS = {"every": 20, "warmup_every": 6}
# Longer than what four workers on two cores take for one.
PASS_S = 0.5
WINDOWS = 12
BOUND = 0.01


def job_text(preset: Preset, steps: int) -> str:
    train: dict[str, Any] = {"batch": BATCH, "microbatch": MICROBATCH, "lr": RATE}
    exchange: dict[str, Any] = {"preset": preset}
    if preset == "pairs":
        train |= {"schedule": "async", "inner_batch": 1}
        exchange |= PAIRS
    return template.render(
        {
            "job": {"name": "convergence-swarm", "seed": SEED, "tokens": steps * BATCH * LENGTH},
            "model": {"preset": "tiny"},
            "data": {"source": "stdlib", "limit": "4M", "sequence_length": LENGTH, "held_out": HELD_OUT},
            "train": train,
            "exchange": exchange,
            "pipeline": {"stages": 1},
            "swarm": {"min_workers": WORKERS, "settle_s": 0.5},
            "network.ports": {"control": 0, "enrolment": 0},
        },
        comments=False,
    )


def train_in_one_process(prepared: Path) -> tuple[float, list[float]]:
    """The job of a prepared directory; its held-out loss, and the training loss of each step."""
    job, text = load_prepared(prepared), Text.opened(prepared)
    state = dict(initial_state(text.description, job.job.seed))
    swarm = Swarm(text.description, state, Setup(AdamW(), replicas=WORKERS))
    until = {"seed": job.job.seed, "steps": job.job.tokens // (BATCH * LENGTH)}
    if job.pair_rules is None:
        losses = train_synchronously(swarm, text, job.train, compute=Stacked(swarm).train, **until)
    else:
        rounds = rounds_of(swarm, job.pair_rules, Course(until["steps"], job.exchange.seed))
        losses = train_locally(swarm, text, job.train, rounds, **until)
        rounds.finish()
    loss = swarm.evaluate(0, text.held_out(HELD_OUT, MICROBATCH), through_codec=False)
    text.close()
    return loss, losses


def curve_difference(real: Mapping[int, float], losses: Sequence[float]) -> float:
    """Mean of the windows' |real / in one process - 1|, after the first quarter; nan without a point in any."""
    size = max(1, len(losses) // WINDOWS)
    found = []
    for begin in range(len(losses) // 4, len(losses) - size + 1, size):
        window = [step for step in range(begin, begin + size) if step in real]
        if window:
            means = (statistics.fmean(own[step] for step in window) for own in (real, losses))
            found.append(abs(next(means) / next(means) - 1))
    return statistics.fmean(found) if found else math.nan


def row_of(preset: Preset, run: Run, seconds: float, found: tuple[float, list[float]]) -> dict[str, Any]:
    reply, (loss, losses) = run.reply, found
    return {
        "preset": preset,
        "steps": len(losses),
        "loss": f"{reply.validation_loss:.5f}",
        "in one process": f"{loss:.5f}",
        "difference %": 100 * (reply.validation_loss / loss - 1),
        "curve %": 100 * curve_difference(run.losses, losses),
        "rounds averaged": sum(stage.rounds_averaged for stage in reply.exchanges),
        "MB/worker": sum(w.bytes_sent.get("exchange", 0) for w in reply.workers) / WORKERS / 1e6,
        "seconds": seconds,
        "losses": {"real": run.losses, "in one process": losses},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps; its claims mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pass-s", type=float, default=PASS_S, help=f"of a microbatch (default {PASS_S})")
    options = parser.parse_args()
    environ = environment()
    torch.set_num_threads(1)
    steps = 12 if options.quick else options.steps
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="starlings-convergence-swarm-") as scratch:
        for preset in PRESETS:
            print(f"{preset}: {steps} steps", file=sys.stderr)
            begin, folder = time.perf_counter(), Path(scratch) / preset
            run = train_job(folder, job_text(preset, steps), WORKERS, ["--emulate-pass", str(options.pass_s)])
            seconds = time.perf_counter() - begin
            rows.append(row_of(preset, run, seconds, train_in_one_process(folder / "job")))
            gap = abs(rows[-1]["difference %"])
            name = f"{preset}: held-out loss, real and in one process, difference in %"
            claims.append(Claim(name, gap, 100 * BOUND, gap <= 100 * BOUND))
    if options.quick:
        claims = []
    show("A real swarm against its training in one process", rows, claims, hidden={"losses"})
    write_json(options.json, "convergence_swarm", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
