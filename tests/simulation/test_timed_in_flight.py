"""Pipelines with long ways between their stages, in virtual time: how busy they are, and how old gradients get."""

from __future__ import annotations

import pytest

from starlings_simulator.timed.machines import Swarm
from starlings_simulator.timed.run import TimedSimulation
from support.timed_swarms import chain, homes, job, profile

SECONDS = 60.0
RTT_S = 0.08


def busiest(schedule: str, slots: int, rtt_s: float = RTT_S, **more: object) -> tuple[float, TimedSimulation]:
    """Share of its time in its place that the busiest worker of a chain computes."""
    machines, plan = chain(0.02, slots)
    swarm = Swarm(homes(3), machines, default_rtt_s=rtt_s)
    simulation = TimedSimulation(job(schedule, batch=128, **more), profile(), swarm, 1, plan)  # type: ignore[arg-type]
    report = simulation.run(SECONDS)
    placed = [(w.seconds, w.present_s - w.seconds["start"] - w.seconds["no place"]) for w in report.workers]
    return max(seconds["compute"] / placed_s for seconds, placed_s in placed), simulation


@pytest.mark.parametrize(("schedule", "share"), [("async", 0.95), ("sync", 0.75)])
def test_a_chain_is_busy_across_80_ms(schedule: str, share: float) -> None:
    """Four microbatches, as many as a single stage was given once, leave it idle. (Steps of `sync` run dry at their
    end.)
    """
    few, _ = busiest(schedule, 4)
    many, _ = busiest(schedule, 64)
    assert few < 0.5
    assert many > share
    near, _ = busiest(schedule, 64, 0.001)
    assert many > 0.8 * near


def test_gradients_get_no_older_than_the_way_makes_them() -> None:
    """inner_batch is 8: what is under way makes some two steps, not the eight that memory has room for."""
    _, simulation = busiest("async", 64)
    for home in simulation.homes.values():
        assert home.engine is not None
        stream = home.engine.core.stream
        assert stream is not None
        assert stream.gradients_stale == 0
        assert sum(stream.staleness) <= 2.5 * len(stream.staleness)


def test_max_staleness_bounds_what_is_under_way() -> None:
    """One step of 8: eight others may go by while one is under way, whatever the way would take."""
    machines, plan = chain(0.02, 64)
    swarm = Swarm(homes(3), machines, default_rtt_s=0.4)
    rules = job("async", batch=128)
    rules = rules.model_copy(update={"train": rules.train.model_copy(update={"max_staleness": 1})})
    simulation = TimedSimulation(rules, profile(), swarm, 1, plan)
    simulation.run(SECONDS)
    leader = simulation.homes[machines[0].worker_id].engine
    assert leader is not None
    assert leader.core.table.in_flight.limit == 9
    assert leader.core.stream is not None
    assert leader.core.stream.gradients_stale < 0.02 * leader.core.stream.inner_steps * 8
