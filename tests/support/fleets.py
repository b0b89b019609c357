"""A job, models and swarms for what the planner says of fleets that need not exist."""

from __future__ import annotations

from starlings_job.profile import BlockProfile, Profile
from starlings_job.spec import JobSpec, parse_job
from starlings_simulator.fleets.file import parse_fleet
from starlings_simulator.fleets.swarm import Swarm
from starlings_simulator.study.setting import Setting

JOB = """
[job]
name = "planned"
tokens = "1B"
[model]
preset = "tiny"
[train]
schedule = "async"
batch = 8
microbatch = 1
"""


def job(more: str = "") -> JobSpec:
    return parse_job(JOB + more)


def decoder(
    layers: int = 8, *, megabytes: float = 40, gigaflops: float = 1.0, boundary: int = 400_000
) -> Profile:
    """Alike layers between an embedding and a head.

    Args:
        megabytes: float32 weights of a layer.
        gigaflops: of a layer's forward.
        boundary: bytes of a layer's float32 output.
    """
    count = int(megabytes * 1e6 / 4)
    flops = int(gigaflops * 1e9)
    middle = [
        BlockProfile(f"layers.{i}", "layer", count, count, flops, 8 * boundary, boundary, 4000)
        for i in range(layers)
    ]
    embed = BlockProfile("embed", "embed", count, count, 0, 0, boundary, 4000)
    head = BlockProfile("head", "head", count, count, flops, boundary, boundary, 4000)
    return Profile((embed, *middle, head), "llama", 128, 256, 129)


def setting(
    fleet: str, profile: Profile | None = None, *, job_more: str = "", seed: int = 0, budget: int = 20
) -> Setting:
    return Setting(job(job_more), profile or decoder(), Swarm(parse_fleet(fleet)), seed, budget)
