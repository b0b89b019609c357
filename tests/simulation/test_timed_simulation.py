"""Timed simulations: real cores against what can be worked out by hand, and what happens to swarms in trouble."""

from __future__ import annotations

from dataclasses import replace

import pytest

from starlings_job.memory import stage_memory
from starlings_simulator.timed.machines import Slowdown, Stay, Swarm
from starlings_simulator.timed.report import Report
from starlings_simulator.timed.run import TimedSimulation
from support.timed_swarms import LENGTH, WHOLE_S, homes, job, machine, profile

TOKENS = 2 * LENGTH


def run(schedule: str, swarm: Swarm, seconds: float = 300.0, *, seed: int = 1, **more: object) -> Report:
    return TimedSimulation(job(schedule, **more), profile(), swarm, seed).run(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_worker_alone_does_what_its_device_can(schedule: str) -> None:
    report = run(schedule, Swarm(homes(1), (machine(0),)))
    assert report.tokens_per_s_training == pytest.approx(TOKENS / WHOLE_S, rel=0.03)
    assert report.phase == "training"
    (worker,) = report.workers
    assert sum(worker.seconds.values()) == pytest.approx(report.virtual_s)
    assert report.samples_repeated == 0


def test_unlike_workers_without_a_barrier_do_what_each_can() -> None:
    speeds = (1.0, 1.0, 2.0, 4.0)
    swarm = Swarm(homes(4), tuple(machine(n, speed) for n, speed in enumerate(speeds)))
    report = run("async", swarm)
    assert report.tokens_per_s_training == pytest.approx(sum(speeds) * TOKENS / WHOLE_S, rel=0.05)
    tokens = [worker.tokens for worker in report.workers]
    assert tokens[3] / tokens[0] == pytest.approx(4.0, rel=0.1)


def test_who_can_begin_nothing_itself_is_given_what_waits_at_who_can() -> None:
    """One holds the whole model and could do every sample alone; of the others one holds the end only."""
    model, per_parameter = profile(), job("async").bytes_per_parameter
    last = len(model.blocks) - 1
    whole = stage_memory(model, 0, last, per_parameter=per_parameter, microbatch=2, slots=4).total
    small = [machine(n, 0.5, memory_bytes=0.6 * whole) for n in (1, 2)]
    report = run("async", Swarm(homes(3), (machine(0), *small)), 150.0)
    spans = sorted(worker.stages for worker in report.workers)
    assert spans == ["0-0", "0-1", "1-1"]
    helper = next(worker for worker in report.workers if worker.stages == "1-1")
    # By its own latency alone the first would send it nothing, and it would stand idle for a third of its time.
    assert helper.seconds["compute"] > 0.85 * (150 - helper.seconds["start"] - helper.seconds["no place"])
    assert report.tokens_per_s_training > 1.7 * TOKENS / WHOLE_S


def test_an_uplink_that_binds_sets_the_pace() -> None:
    """Two workers need each other, and what one sends takes longer than what the other computes."""
    per_parameter = job("async").bytes_per_parameter
    last = len(profile().blocks) - 1
    memory = 0.7 * stage_memory(profile(), 0, last, per_parameter=per_parameter, microbatch=2, slots=2).total
    workers = tuple(machine(n, 10.0, memory_bytes=memory) for n in range(2))
    narrow, wide = (Swarm(sites, workers, default_rtt_s=0.002) for sites in (homes(2, 20e3, 20e3), homes(2)))
    report, free = run("async", narrow), run("async", wide, 100.0)
    assert len({worker.stages for worker in free.workers}) == 2
    assert report.tokens_per_s_training < 0.5 * free.tokens_per_s_training
    sent = report.sent_bytes["forward"] + report.sent_bytes["backward"]
    training_s = report.virtual_s - next(point.at_s for point in report.points if point.tokens > 0)
    # Memory lets one microbatch be under way at a time: it is forward on one uplink, or backward on the other.
    assert 0.4 < sent / 2 / (20e3 * training_s) <= 0.5


def test_a_slow_spell_costs_its_worker_alone() -> None:
    workers = (machine(0), machine(1))
    slow = Slowdown(workers[1].worker_id, 100.0, 300.0, 4.0)
    report = run("async", Swarm(homes(2), workers, slowdowns=(slow,)))
    expected = TOKENS / WHOLE_S
    fast, slowed = report.workers
    assert fast.tokens / report.virtual_s == pytest.approx(expected, rel=0.12)
    assert slowed.tokens < 0.65 * fast.tokens


@pytest.mark.parametrize("schedule", ["sync", "async"])
@pytest.mark.parametrize("vanishes", [False, True])
def test_who_goes_without_a_word_is_missed_and_comes_back(schedule: str, *, vanishes: bool) -> None:
    workers = tuple(machine(n) for n in range(3))
    stays = (
        Stay(workers[0].worker_id),
        Stay(workers[1].worker_id),
        Stay(workers[2].worker_id, 0.0, 120.0, vanishes=vanishes),
        Stay(workers[2].worker_id, 180.0),
    )
    report = run(schedule, Swarm(homes(3), workers, stays), 400.0)
    kinds = [kind for _, kind, _ in report.events]
    assert "lost" in kinds
    assert report.phase == "training"
    assert report.workers[2].stages, "it did not come back"
    late = [point for point in report.points if point.at_s > 300]
    assert late[-1].tokens > late[0].tokens
    assert late[-1].holders == 3


def test_who_is_warned_leaves_in_order() -> None:
    workers = (machine(0), machine(1))
    stays = (Stay(workers[0].worker_id), Stay(workers[1].worker_id, 0.0, 150.0, notice_s=60.0))
    report = run("async", Swarm(homes(2), workers, stays))
    kinds = [kind for _, kind, _ in report.events]
    assert "left" in kinds
    assert "lost" not in kinds


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_job_ends_as_jobs_do(schedule: str) -> None:
    workers = tuple(machine(n, 4.0) for n in range(2))
    report = run(schedule, Swarm(homes(2), workers), 3000.0, tokens=200 * TOKENS)
    assert report.phase == "done", report.events[-3:]
    assert report.tokens == 200 * TOKENS


def test_equal_seeds_give_equal_runs() -> None:
    workers = tuple(machine(n, 1.0 + n) for n in range(3))
    swarm = Swarm(
        homes(3, 1e5, 1e6),
        workers,
        (*[Stay(w.worker_id) for w in workers[:2]], Stay(workers[2].worker_id, 60.0)),
    )
    one, two = run("async", swarm, 100.0, seed=5), run("async", swarm, 100.0, seed=5)
    assert one == two
    assert one != run("async", swarm, 100.0, seed=6)


def test_what_cannot_be_is_refused() -> None:
    workers = (machine(0), machine(0))
    with pytest.raises(ValueError, match="two machines"):
        Swarm(homes(1), workers)
    with pytest.raises(ValueError, match="not described"):
        Swarm({}, workers[:1])
    with pytest.raises(ValueError, match="no machine"):
        Swarm(homes(1), workers[:1], stays=(Stay(replace(machine(7)).worker_id),))
