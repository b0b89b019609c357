"""Random swarms and decoder models to measure planners with: from tables in ../shared if there, else our own."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

from starlings_job.devices import DEVICES
from starlings_job.profile import BlockProfile, Profile
from starlings_protos.messages import PlanRequest, PlanWorker, WorkerId
from starlings_simulator.fleets.networks import ACCESS

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
# What drivers and libraries keep of a device.
CONTEXT_BYTES = 0.75e9
# Weights, gradients, AdamW, its temporaries, autocast's copy: design, section 5.
BYTES_PER_PARAMETER = 22.0
BACKWARD_BY_FORWARD = 2.0


@dataclass(frozen=True, slots=True)
class Card:
    memory_bytes: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Line:
    up_bytes_per_s: float
    down_bytes_per_s: float


def cards() -> dict[str, Card]:
    """What people have at home and in labs: no data-centre parts above 48 GB, nothing slower than 2 TFLOPS."""
    table = SHARED / "gpu_classes.csv"
    if not table.exists():
        return {
            name: Card(d.memory_bytes - CONTEXT_BYTES, d.flops_per_s)
            for name, d in DEVICES.items()
            if d.memory_gib <= 48
        }
    found = {}
    with table.open() as lines:
        for row in csv.DictReader(lines):
            memory, speed = float(row["memory_gb"]), float(row["typical_train_tflops"])
            if (
                row["class"] in ("consumer", "laptop", "workstation", "datacenter")
                and memory <= 48
                and speed >= 2
            ):
                found[row["id"]] = Card(memory * 1e9 - CONTEXT_BYTES, speed * 1e12)
    return found


def lines() -> dict[str, Line]:
    table = SHARED / "net_regions.csv"
    if not table.exists():
        return {n: Line(a.up_mbit_per_s * 125e3, a.down_mbit_per_s * 125e3) for n, a in ACCESS.items()}
    with table.open() as rows:
        return {
            row["src"]: Line(float(row["bw_up_mbps"]) * 125e3, float(row["bw_down_mbps"]) * 125e3)
            for row in csv.DictReader(rows)
            if row["kind"] == "access_class"
        }


def llama(layers: int, width: int, inner: int, vocabulary: int = 32_000, sequence: int = 1024) -> Profile:
    """A decoder's profile from its shape. Activations as autocast keeps them with fused attention: two bytes each."""
    layer = 4 * width * width + 3 * width * inner
    kept = 2 * sequence * (10 * width + 4 * inner)
    boundary = 4 * sequence * width
    ends = vocabulary * width
    embed = BlockProfile("embed", "embed", ends, ends, sequence * width, 0, boundary, 4 * ends)
    head = BlockProfile(
        "head",
        "head",
        ends,
        ends,
        2 * ends * sequence,
        4 * sequence * width,
        4 * sequence * vocabulary,
        4 * ends,
    )
    flops = 2 * layer * sequence + 4 * sequence * sequence * width
    middle = [
        BlockProfile(f"layers.{i}", "layer", layer, layer, flops, kept, boundary, 4 * width * inner)
        for i in range(layers)
    ]
    return Profile((embed, *middle, head), "llama", sequence, vocabulary, 4 * sequence)


MODELS: dict[str, Profile] = {
    "1.1B": llama(22, 2048, 5632),
    "3.4B": llama(26, 3200, 8640),
    "6.7B": llama(32, 4096, 11008),
    "13B": llama(40, 5120, 13824),
    "65B": llama(80, 8192, 22016),
}


def swarm(workers: int, kind: str, profile: Profile, seed: int) -> PlanRequest:
    """A request for a plan of a random swarm; figures scatter around the tables' as measured ones do.

    Args:
        kind: `lab` (links that hardly bind), `homes` (each worker behind an access line of its own) or `mixed` (labs of
            two to eight workers behind one line, and homes).
    """
    rng = random.Random(f"{seed}/{workers}/{kind}")
    card_table, line_table = cards(), lines()
    names, access = sorted(card_table), sorted(line_table)
    made: list[PlanWorker] = []
    while len(made) < workers:
        together = rng.randint(2, 8) if kind == "mixed" and rng.random() < 0.15 else 1
        if kind == "lab":
            line = Line(1.25e9, 1.25e9)
        elif together > 1:
            line = Line(125e6, 125e6)
        else:
            line = line_table[rng.choice(access)]
        up = line.up_bytes_per_s * rng.lognormvariate(0, 0.2)
        down = line.down_bytes_per_s * rng.lognormvariate(0, 0.2)
        site = f"site{len(made):04d}"
        for _ in range(min(together, workers - len(made))):
            card = card_table[rng.choice(names)]
            speed = card.flops_per_s * rng.lognormvariate(0, 0.1)
            forward = {block.kind: block.flops_per_sample / speed for block in profile.blocks}
            made.append(
                PlanWorker(
                    WorkerId(f"w{len(made):04d}"),
                    forward,
                    {block: seconds * BACKWARD_BY_FORWARD for block, seconds in forward.items()},
                    int(card.memory_bytes),
                    up,
                    down,
                    site=site,
                )
            )
    return PlanRequest(1, tuple(made), seed, 1, 64, BYTES_PER_PARAMETER)
