"""Jobs, profiles and swarms for timed simulations: a model of unlike blocks, machines by their speed."""

from __future__ import annotations

from math import inf

from starlings_job.profile import BlockProfile, Profile
from starlings_job.spec import JobSpec, parse_job
from starlings_protos.messages import PlannedWorker, PlanReply, PlanRequest, Span, Stage, WorkerId
from starlings_simulator.timed.machines import Machine, Site
from starlings_simulator.timed.run import Planner

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


def chain(seconds: float, slots: int, *, leaders: int = 1) -> tuple[tuple[Machine, ...], Planner]:
    """Three stages of about `seconds` per microbatch, one holder each but for the first, and the plan that says so."""
    stages = (Stage(0, 2), Stage(3, 4), Stage(5, 7))
    machines = tuple(machine(n, WHOLE_S / (3 * seconds)) for n in range(leaders + 2))
    spans = {m.worker_id: Span(s, s) for m, s in zip(machines, [*[0] * leaders, 1, 2], strict=True)}

    def plan(request: PlanRequest) -> PlanReply:
        workers = tuple(
            PlannedWorker(w.worker_id, spans[w.worker_id], slots, memory_bytes=1) for w in request.workers
        )
        return PlanReply(request.request_id, stages, workers, 1.0, 1.0)

    return machines, plan
