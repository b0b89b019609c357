"""Flows between control events against the simulation that plays every event, and what is only in flows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from starlings_coordinator.planner.linear.node_form import solve
from starlings_job.memory import stage_memory
from starlings_protos.messages import PlannedWorker, PlanRequest, Span, Stage
from starlings_simulator.flow import holders as holders_module
from starlings_simulator.flow import placing
from starlings_simulator.flow.copies import finish_s
from starlings_simulator.flow.holders import Holder, gather, holder_of
from starlings_simulator.flow.run import FlowSimulation
from starlings_simulator.flow.sample import drawn
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.machines import Stay, Swarm
from starlings_simulator.timed.report import Report
from starlings_simulator.timed.run import TimedSimulation
from support.timed_swarms import LAYERS, LENGTH, WHOLE_S, homes, job, machine, profile

TOKENS = 2 * LENGTH


def memory(part: float, schedule: str) -> float:
    """What holds a part of the model."""
    per_parameter = job(schedule).bytes_per_parameter
    return (
        part
        * stage_memory(profile(), 0, LAYERS + 1, per_parameter=per_parameter, microbatch=2, slots=2).total
    )


def both(schedule: str, swarm: Swarm, seconds: float) -> tuple[Report, Report]:
    made = job(schedule, batch=64)
    return (
        TimedSimulation(made, profile(), swarm, 1).run(seconds),
        FlowSimulation(made, profile(), swarm, 1).run(seconds),
    )


def unlike(schedule: str, count: int = 8) -> Swarm:
    rng = random.Random(4)
    machines = [
        machine(n, rng.uniform(0.4, 1.5), memory_bytes=memory(rng.choice([0.4, 0.6, 1.2]), schedule))
        for n in range(count)
    ]
    return Swarm(homes(count, 2e5, 4e5), tuple(machines))


@pytest.mark.parametrize(
    ("schedule", "within"), [("async", 0.05), pytest.param("sync", 0.1, marks=pytest.mark.slow)]
)
def test_flows_are_as_fast_as_what_is_played(schedule: str, within: float) -> None:
    """In `sync` the whole plan's holders have few microbatches per step each: what chance gives them weighs more."""
    exact, flow = both(schedule, unlike(schedule), 240.0)
    assert flow.tokens_per_s_training == pytest.approx(exact.tokens_per_s_training, rel=within)
    assert flow.tokens == pytest.approx(exact.tokens, rel=within)
    assert flow.sent_bytes["forward"] == pytest.approx(exact.sent_bytes["forward"], rel=0.4)
    assert flow.phase == exact.phase == "training"
    for worker in flow.workers:
        assert sum(worker.seconds.values()) == pytest.approx(flow.virtual_s)
        assert all(seconds >= -1e-6 for seconds in worker.seconds.values())


def test_who_comes_and_goes_does_in_both() -> None:
    workers = tuple(machine(n) for n in range(4))
    stays = (
        *[Stay(worker.worker_id) for worker in workers[:2]],
        Stay(workers[2].worker_id, 0.0, 150.0, vanishes=True),
        Stay(workers[2].worker_id, 250.0),
        Stay(workers[3].worker_id, 100.0),
    )
    exact, flow = both("async", Swarm(homes(4), workers, stays), 400.0)
    assert flow.tokens == pytest.approx(exact.tokens, rel=0.05)
    for one, other in zip(exact.workers, flow.workers, strict=True):
        assert one.present_s == pytest.approx(other.present_s, abs=5.0)
        assert bool(one.stages) == bool(other.stages)
    assert [p.workers for p in flow.points][-1] == 4


def test_a_stage_that_falls_bare_stops_all_until_somebody_has_a_new_plan() -> None:
    half = memory(0.7, "async")
    workers = tuple(machine(n, memory_bytes=half) for n in range(3))
    stays = (
        Stay(workers[0].worker_id),
        Stay(workers[1].worker_id, 0.0, 150.0),
        Stay(workers[2].worker_id, 250.0),
    )
    report = FlowSimulation(job("async"), profile(), Swarm(homes(3), workers, stays), 1).run(500.0)
    at = {point.at_s: point.tokens for point in report.points}
    assert at[120.0] > at[60.0] > 0
    assert at[180.0] == at[240.0]
    assert at[480.0] > at[360.0]
    assert report.plans == 2


def test_a_job_ends_when_its_tokens_are_trained() -> None:
    report = FlowSimulation(
        job("async", tokens=100 * TOKENS), profile(), Swarm(homes(2), (machine(0), machine(1))), 1
    ).run(3000.0)
    assert report.phase == "done"
    assert report.tokens == 100 * TOKENS
    assert report.virtual_s == pytest.approx(50 * WHOLE_S + 15, abs=20.0)


def test_equal_seeds_give_equal_runs() -> None:
    swarm = unlike("async", 4)
    made = [FlowSimulation(job("async"), profile(), swarm, seed).run(60.0) for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_alike_holders_flow_together_as_they_do_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, stages = Costs(job("async"), profile()), (Stage(0, 3), Stage(4, LAYERS + 1))
    rng = random.Random(2)
    machines = [machine(n, rng.uniform(0.5, 2.0)) for n in range(60)]
    sites = homes(60, 3e5, 5e5)
    held = [
        holder_of(costs, m, stages, PlannedWorker(m.worker_id, Span(n % 2, n % 2), 4))
        for n, m in enumerate(machines)
    ]
    swarm = Swarm(sites, tuple(machines))
    apart = gather(costs, swarm, stages, held)
    monkeypatch.setattr(holders_module, "APART_MOST", 10)
    together = gather(costs, swarm, stages, held)
    assert together.problem.workers < 50 < apart.problem.workers
    rates = [solve(g.problem, g.choice).rate for g in (apart, together)]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)
    assert np.bincount(together.group, together.part) == pytest.approx(1.0)


def test_a_sample_has_all_stages_and_spans_in_their_shares() -> None:
    costs, stages = Costs(job("async"), profile()), tuple(Stage(b, b) for b in range(LAYERS + 2))
    spans = [Span(0, 3)] * 200 + [Span(4, 6)] * 100 + [Span(7, 7)] * 3
    held: list[Holder] = []
    for number, span in enumerate(spans):
        one = machine(number, 1.0 + number % 7)
        held.append(holder_of(costs, one, stages, PlannedWorker(one.worker_id, span, 2)))
    few = drawn(held, len(stages), 30)
    assert {h.span for h in few} == set(spans)
    part = sum(h.span == Span(0, 3) for h in few) / len(few)
    assert part == pytest.approx(200 / 303, abs=0.05)
    assert drawn(held[:5] + held[-3:] + held[200:203], len(stages), 48) != []


def test_copies_that_share_a_link_arrive_by_their_sizes() -> None:
    free = np.full(3, np.inf)
    assert finish_s(np.array([10.0, 10.0, 30.0]), free, 10.0) == pytest.approx([3.0, 3.0, 5.0])
    assert finish_s(np.array([10.0, 10.0]), np.array([1.0, np.inf]), 10.0) == pytest.approx([10.0, 10 / 9])
    many = finish_s(np.linspace(1, 2, 5000), np.full(5000, np.inf), 100.0)
    assert many.max() == pytest.approx(np.linspace(1, 2, 5000).sum() / 100, rel=0.01)


def test_very_many_are_placed_without_a_search_and_newcomers_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "THOROUGH_MOST", 10)
    simulation = FlowSimulation(job("async"), profile(), unlike("async", 24), 1)
    report = simulation.run(200.0)
    assert report.tokens > 0
    assert sum(bool(worker.stages) for worker in report.workers) >= 22
    request = PlanRequest(1, (), 0, 2, 8, 1.0)
    assert placing.plan_of(request, profile(), "int8:128").impossible
