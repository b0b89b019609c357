"""The owner's commands on real cores of both sides and a virtual clock: a pause of an hour, a worker sent away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from starlings_coordinator.core.events import EvictionRequested, PauseRequested, ResumeRequested
from starlings_coordinator.core.streaming.streaming import Streaming
from starlings_simulator.timed.machines import Swarm
from starlings_simulator.timed.run import TimedSimulation
from support.timed_swarms import LENGTH, WHOLE_S, homes, job, machine, profile

HOUR = 3600.0
EXCHANGE = '[exchange]\npreset = "pairs"\nevery = 4\nwarmup_fraction = 0.0\n'


@dataclass
class Watched:
    """A swarm of three that hold the whole model each, looked at when the test says."""

    schedule: str
    seen: dict[float, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        more = EXCHANGE if self.schedule == "async" else ""
        swarm = Swarm(homes(3), tuple(machine(n) for n in range(3)))
        self.simulation = TimedSimulation(job(self.schedule, more=more), profile(), swarm, 1)
        self.core = self.simulation.owner.core

    def at(self, seconds: float, what: Callable[[], object]) -> None:
        self.simulation.world.clock.at(seconds, what)

    def look_at(self, *times_s: float) -> None:
        for time_s in times_s:
            self.at(time_s, lambda t=time_s: self.seen.update({t: self._look()}))  # type: ignore[misc]

    def _look(self) -> dict[str, float]:
        state, schedule = self.core.state, self.core.schedule
        look = {
            "samples": state.samples_trained,
            "leased": len(state.leased.blocks),
            "repeated": state.samples_repeated,
        }
        if isinstance(schedule, Streaming):
            (rounds,) = schedule.exchanges.status()
            look |= {"rounds": rounds.rounds_averaged, "slot_s": rounds.slot_length_s}
        return look


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_an_hour_of_pause_costs_an_hour_and_nothing_else(schedule: str) -> None:
    watched = Watched(schedule)
    handle = watched.simulation.owner.handle
    watched.at(200.0, lambda: handle(PauseRequested(1, "for an hour")))
    watched.at(200.0 + HOUR, lambda: handle(ResumeRequested(2)))
    end = 200.0 + HOUR
    watched.look_at(60.0, 199.0, 215.0, end - 1.0, end + 15.0, end + 155.0)
    slots = [end + 5.0 + 10.0 * n for n in range(50)]
    watched.look_at(*(time_s for time_s in slots if time_s not in (end + 15.0, end + 155.0)))
    report = watched.simulation.run(end + 500.0)
    seen = watched.seen
    assert seen[215.0]["samples"] == seen[end - 1.0]["samples"], "something was trained in the pause"
    assert seen[215.0]["leased"] == 0
    assert seen[215.0]["samples"] - seen[199.0]["samples"] <= 3 * 16
    before = (seen[199.0]["samples"] - seen[60.0]["samples"]) / 139.0
    after = (seen[end + 155.0]["samples"] - seen[end + 15.0]["samples"]) / 140.0
    assert after == pytest.approx(before, rel=0.08), "it goes on as fast as it was"
    assert seen[end + 155.0]["repeated"] == 0
    assert report.phase == "training"
    kinds = {kind for _, kind, _ in watched.simulation.world.books.events}
    assert {"paused", "resumed"} <= kinds
    assert not kinds & {"lost", "suspect", "step_restarted", "pace"}
    if schedule == "async":
        assert seen[end - 1.0]["rounds"] - seen[215.0]["rounds"] <= 2, "rounds go on in the pause"
        assert seen[end + 155.0]["rounds"] - seen[end + 15.0]["rounds"] > 3
        longest = max(seen[time_s]["slot_s"] for time_s in slots)
        assert longest <= 1.3 * seen[199.0]["slot_s"], "the pause is taken for somebody's pace"


def test_one_that_is_sent_away_comes_back_when_its_time_is_over() -> None:
    watched = Watched("async")
    handle, victim = watched.simulation.owner.handle, machine(1).worker_id
    watched.at(100.0, lambda: handle(EvictionRequested(1, victim, "too loud", 120.0)))
    spans: dict[float, int] = {}
    for time_s in (99.0, 110.0, 215.0, 320.0):
        watched.at(time_s, lambda t=time_s: spans.update({t: len(watched.core.state.spans)}))  # type: ignore[misc]
    report = watched.simulation.run(330.0)
    assert spans == {99.0: 3, 110.0: 2, 215.0: 2, 320.0: 3}
    assert report.phase == "training"
    assert watched.core.state.samples_unmerged <= 60 * 2 * LENGTH / WHOLE_S
