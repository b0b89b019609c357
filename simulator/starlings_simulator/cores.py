"""Which coordinator a simulation runs: the real core, or its stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlings_coordinator.core.config import CoreConfig, Timings
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.records import record_from_json, record_to_json
from starlings_job.profile import BlockProfile, Profile
from starlings_job.schedule import learning_rate
from starlings_job.spec import JobSpec, parse_job
from starlings_protos.messages import PlanReply, PlanRequest
from starlings_simulator.coordinator import CoordinatorCore
from starlings_simulator.reference import Reference
from starlings_simulator.scenario import Scenario
from starlings_simulator.simulation import CoreFactory, Simulation, block_names
from starlings_simulator.standin import StandIn

SAMPLES_PER_MICROBATCH = 2
SEQUENCE_LENGTH = 16
HELD_OUT = 6
# Shorter than in real life, so that a virtual hour does not have to pass before a verdict.
TIMINGS = Timings(
    heartbeat_least_s=1.0,
    silence_least_s=4.0,
    load_s=60.0,
    probe_s=30.0,
    exchange_s=20.0,
    digest_s=30.0,
    lease_s=60.0,
    forward_lease_s=30.0,
    save_s=30.0,
    plan_s=30.0,
    retry_s=2.0,
)


def standin_core(
    scenario: Scenario, names: tuple[str, ...], count_targets: Callable[[Sequence[int]], int]
) -> CoordinatorCore:
    return StandIn(
        scenario.steps,
        scenario.microbatches,
        SAMPLES_PER_MICROBATCH,
        count_targets,
        scenario.least_workers,
        tied=scenario.tied,
    )


def job_of(scenario: Scenario) -> JobSpec:
    batch = scenario.microbatches * SAMPLES_PER_MICROBATCH
    return parse_job(
        f"""
        [job]
        name = "simulated"
        seed = {scenario.seed}
        tokens = {scenario.steps * batch * SEQUENCE_LENGTH}
        [model]
        preset = "micro"
        [data]
        sequence_length = {SEQUENCE_LENGTH}
        [train]
        batch = {batch}
        microbatch = {SAMPLES_PER_MICROBATCH}
        [swarm]
        min_workers = 1
        settle_s = 1
        [checkpoint]
        every = {scenario.checkpoint_every}
        """
    )


def profile_of(scenario: Scenario, names: tuple[str, ...]) -> Profile:
    """Blocks of one kind, so that the probe's figures are the scenario's seconds per block."""
    blocks = tuple(BlockProfile(name, "block", 1000, 1000, 10**6, 4096, 1024, 4096) for name in names)
    return Profile(blocks, "llama", SEQUENCE_LENGTH, 256, 4 * SEQUENCE_LENGTH, 1000 if scenario.tied else 0)


def config_of(
    scenario: Scenario, names: tuple[str, ...], count_targets: Callable[[Sequence[int]], int]
) -> CoreConfig:
    return CoreConfig(
        job_of(scenario),
        profile_of(scenario, names),
        population=997,
        held_out_count=HELD_OUT,
        count_targets=count_targets,
        timings=TIMINGS,
        generated_tokens=5,
    )


def restore_real(
    scenario: Scenario,
    names: tuple[str, ...],
    count_targets: Callable[[Sequence[int]], int],
    log: Sequence[object],
) -> CoordinatorCore:
    """From the log as a store would give it back: a snapshot of the older half, then the newer half as JSON rows."""
    config = config_of(scenario, names, count_targets)
    rows = [record_to_json(record) for record in log]  # type: ignore[arg-type]
    records = tuple(record_from_json(row) for row in rows)
    half = len(records) // 2
    snapshot = Core.restore(config, None, records[:half]).snapshot()
    core = Core.restore(config, snapshot, records[half:])
    assert core.snapshot() == Core.restore(config, None, records).snapshot()
    return core


def restore_standin(
    scenario: Scenario,
    names: tuple[str, ...],
    count_targets: Callable[[Sequence[int]], int],
    log: Sequence[object],
) -> CoordinatorCore:
    """It keeps no log: it starts from nothing."""
    return standin_core(scenario, names, count_targets)


def simulation_of(
    scenario: Scenario, core: str = "real", plan: Callable[[PlanRequest], PlanReply] | None = None
) -> Simulation:
    """Ready to run. With the real core and one numeric class every state is compared with an undisturbed machine's."""
    reference = None
    if core == "real" and scenario.single_class is not None:
        job = job_of(scenario)
        reference = Reference(
            block_names(scenario.blocks),
            scenario.microbatches,
            lambda step: learning_rate(job.train, step, job.steps_total),
            job.train.clip,
            scenario.single_class,
            # Where one stage is the model there is no vector that joins two ends.
            tied=scenario.tied and scenario.stages > 1,
        )
    return Simulation(scenario, CORES[core], plan=plan, reference=reference)


CORES: dict[str, CoreFactory] = {"real": restore_real, "standin": restore_standin}
