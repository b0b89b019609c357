"""Whether int8 codecs cost a real swarm anything: the same job trained exactly and in `int8:128`, with the same seed.

Four workers, real processes over mTLS, of which none has room for more than half of the `tiny` model, which the job
cuts in its middle: in every run two workers hold each half, a boundary is crossed by each microbatch and gradients are
exchanged in every step, both in the codec of the run. Weights, samples and their order follow from the seed, so runs
of one seed differ by the codec, and by the order in which floats were added up. How much the latter does alone is what
`exact, again` shows.

`gap`: of the final loss on held-out text, against the exact run of the seed.

    python benchmarks/codec_swarm.py [--quick] [--json FILE] [--seeds N] [--steps N] [--codec SPEC]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from real_swarm import train_job
from report import Claim, environment, show, write_json

from starlings import template
from starlings_protos import control_pb2

WORKERS, BATCH, MICROBATCH, LENGTH, HELD_OUT = 4, 16, 4, 128, 64
# The planner would cut by what it measures and by what the codec makes of a boundary: another layout in every run.
STAGES = (4, 4)
# At twice that, runs part by a percent from whatever touches them (compression/README.md), and no codec can be judged.
RATE = 1e-3
# Room for either stage and not for both, so that four workers can only be two holders of each.
MEMORY = ("--memory", "60MB")
GAP_BOUND = 0.005


def job_text(codec: str, seed: int, steps: int) -> str:
    return template.render(
        {
            "job": {"name": "codec-swarm", "seed": seed, "tokens": steps * BATCH * LENGTH},
            "model": {"preset": "tiny"},
            "data": {"source": "stdlib", "limit": "4M", "sequence_length": LENGTH, "held_out": HELD_OUT},
            "train": {"batch": BATCH, "microbatch": MICROBATCH, "lr": RATE},
            "pipeline": {"codec": codec, "stages": STAGES},
            "exchange": {"codec": codec},
            "swarm": {"min_workers": WORKERS, "settle_s": 0.5},
            "network.ports": {"control": 0, "enrolment": 0},
        },
        comments=False,
    )


def train(directory: Path, codec: str, seed: int, steps: int) -> control_pb2.StatusReply:
    """One swarm from its start to its end; how the job stands then."""
    reply = train_job(directory, job_text(codec, seed, steps), WORKERS, MEMORY).reply
    if reply.samples_trained != steps * BATCH:
        raise RuntimeError(f"{reply.samples_trained} samples were trained instead of {steps * BATCH}")
    if layout(reply) != [(0, 0), (0, 0), (1, 1), (1, 1)]:
        raise RuntimeError(f"the runs cannot be compared: workers hold stages {layout(reply)}")
    return reply


def layout(reply: control_pb2.StatusReply) -> list[tuple[int, int]]:
    """First and last stage of each worker's span, sorted."""
    return sorted((w.span.first_stage, w.span.last_stage) for w in reply.workers if w.HasField("span"))


def row_of(
    name: str, seed: int, reply: control_pb2.StatusReply, exact: float, seconds: float
) -> dict[str, Any]:
    sent: dict[str, int] = {}
    for worker in reply.workers:
        for kind, amount in worker.bytes_sent.items():
            sent[kind] = sent.get(kind, 0) + amount
    return {
        "run": name,
        "seed": seed,
        "steps": reply.step,
        "stages": len(reply.stages),
        "held-out loss": f"{reply.validation_loss:.5f}",
        "gap %": 100 * (reply.validation_loss / exact - 1),
        "last training loss": reply.loss,
        "MB sent": sum(sent.values()) / 1e6,
        "seconds": seconds,
        "validation_loss": reply.validation_loss,
        "bytes_sent": sent,
    }


def run(seeds: int, steps: int, codec: str) -> tuple[list[dict[str, Any]], list[Claim]]:
    rows: list[dict[str, Any]] = []
    gaps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="starlings-codec-swarm-") as scratch:
        for seed in range(seeds):
            exact = 0.0
            for name, spec in (("exact", "exact"), (codec, codec), ("exact, again", "exact")):
                print(f"seed {seed}: {name}", file=sys.stderr)
                begin = time.perf_counter()
                reply = train(Path(scratch) / f"{seed}-{len(rows)}", spec, seed, steps)
                exact = exact or reply.validation_loss
                rows.append(row_of(name, seed, reply, exact, time.perf_counter() - begin))
                # Runs are long: who is cut off has what there is.
                print(f"    {rows[-1]['held-out loss']} in {rows[-1]['seconds']:.0f} s", file=sys.stderr)
                if name == codec:
                    gaps.append(reply.validation_loss / exact - 1)
    gap = statistics.mean(gaps)
    title = f"{codec}: loss above the exact run's, mean of {seeds} seed{'s' if seeds > 1 else ''}, share"
    return rows, [Claim(title, gap, GAP_BOUND, gap <= GAP_BOUND)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps: says little of the loss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--codec", default="int8:128", help="on boundaries and in the exchange")
    options = parser.parse_args()
    environ = environment()
    rows, claims = run(options.seeds, 12 if options.quick else options.steps, options.codec)
    show("Codecs in a real swarm", rows, claims, hidden={"validation_loss", "bytes_sent"})
    write_json(options.json, "codec_swarm", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
