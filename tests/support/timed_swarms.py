"""Jobs, profiles and swarms for timed simulations: a model of unlike blocks, machines by their speed."""

from __future__ import annotations

from math import inf

from starlings_job.profile import BlockProfile, Profile
from starlings_job.spec import JobSpec, parse_job
from starlings_protos.messages import WorkerId
from starlings_simulator.timed.machines import Machine, Site

LENGTH = 64
WIDTH = 64
VOCABULARY = 256
LAYERS = 6
# Of a machine of speed 1, a microbatch through one block; back takes twice that.
FORWARD_S = {"embed": 0.01, "layer": 0.05, "head": 0.04}
WHOLE_S = 3 * (FORWARD_S["embed"] + LAYERS * FORWARD_S["layer"] + FORWARD_S["head"])


def profile() -> Profile:
    boundary = 4 * LENGTH * WIDTH
    ends = VOCABULARY * WIDTH
    blocks = [BlockProfile("embed", "embed", ends, ends, 10**6, boundary, boundary, 4 * ends)]
    for index in range(LAYERS):
        size = 12 * WIDTH * WIDTH
        blocks.append(
            BlockProfile(f"layers.{index}", "layer", size, size, 10**8, 10 * boundary, boundary, size)
        )
    blocks.append(BlockProfile("head", "head", ends, ends, 10**8, 4 * boundary, 4 * boundary, 4 * ends))
    return Profile(tuple(blocks), "llama", LENGTH, VOCABULARY, 4 * LENGTH)


def job(schedule: str, *, tokens: int = 10**12, batch: int = 16, more: str = "") -> JobSpec:
    inner = "inner_batch = 8" if schedule == "async" else ""
    return parse_job(
        f"""
        [job]
        name = "timed"
        seed = 3
        tokens = {tokens}
        [model]
        preset = "micro"
        [data]
        sequence_length = {LENGTH}
        [train]
        schedule = "{schedule}"
        batch = {batch}
        microbatch = 2
        {inner}
        [swarm]
        min_workers = 1
        settle_s = 2
        {more}
        """
    )


def machine(number: int, speed: float = 1.0, *, site: str = "", memory_bytes: float = 1e9) -> Machine:
    forward = {kind: seconds / speed for kind, seconds in FORWARD_S.items()}
    backward = {kind: 2 * seconds for kind, seconds in forward.items()}
    worker_id = WorkerId(f"w{number:016x}")
    return Machine(
        worker_id, site or f"home{number}", forward, backward, int(memory_bytes), host_id=f"h{number}"
    )


def homes(count: int, up_bytes_per_s: float = inf, down_bytes_per_s: float = inf) -> dict[str, Site]:
    return {f"home{n}": Site(f"home{n}", up_bytes_per_s, down_bytes_per_s) for n in range(count)}
