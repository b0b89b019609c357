"""When silence is a loss, while the swarm and so the interval between heartbeats grows and shrinks."""

from __future__ import annotations

import dataclasses
import random

import pytest

from starlings_coordinator.core import membership
from starlings_coordinator.core.config import Timings
from starlings_coordinator.core.events import WorkerDisconnected
from starlings_coordinator.core.liveness import (
    CLOCK_WITHIN_S,
    PACE_TOLERANCE,
    SilenceDetector,
    SlowestBeat,
    worth_an_answer,
)
from starlings_coordinator.core.members import Member
from starlings_protos.messages import WorkerId
from support.core_world import World, config


def test_the_larger_of_both_floors_counts_and_the_ceiling_follows() -> None:
    detector = SilenceDetector(6.0, 0.0)
    assert not detector.lost(7.4, 0.0)
    assert detector.lost(7.5, 0.0)
    assert not detector.lost(14.9, 12.0)
    assert detector.lost(15.0, 12.0)
    regular = SilenceDetector(6.0, 0.0)
    for beat in range(10):
        regular.heard(float(beat))
    # Of a worker that was regular, the statistics are sure at the floor.
    assert not regular.lost(9.0 + 5.9, 6.0)
    assert regular.lost(9.0 + 6.0, 6.0)
    assert not regular.lost(9.0 + 11.9, 12.0)


def test_a_longer_interval_holds_at_once_and_a_shorter_one_when_all_have_been_told() -> None:
    slowest = SlowestBeat(15.0)
    assert slowest.look(0.0, 2.0) == 2.0
    assert slowest.look(1.0, 40.0) == 40.0
    assert slowest.look(2.0, 30.0) == 40.0
    assert slowest.look(3.0, 2.0) == 40.0
    assert slowest.look(1.0 + 95.0, 2.0) == 40.0
    # In between some were told 30.
    assert slowest.look(97.0, 2.0) == 30.0
    assert slowest.look(97.0 + 75.0, 2.0) == 30.0
    assert slowest.look(97.0 + 76.0, 2.0) == 2.0
    slowest.look(200.0, 40.0)
    slowest.forgive(1000.0)
    assert slowest.look(1000.0 + 94.0, 2.0) == 40.0


def test_whoever_is_told_at_acknowledgements_only_is_never_accused() -> None:
    """Against a twin that plays it out: workers learn the present interval when an answer is due, and sleep on."""
    for seed in range(200):
        rng = random.Random(seed)
        slowest, present_s = SlowestBeat(15.0), 2.0
        # Per worker: the interval that it keeps, its next heartbeat, the last acknowledgement.
        workers = [[2.0, rng.uniform(0, 2), 0.0] for _ in range(4)]
        now_s = 0.0
        while now_s < 400.0:
            now_s += 0.25
            if rng.random() < 0.03:
                present_s = rng.choice((2.0, 2.05, 4.0, 15.0, 40.0, 41.0))
            assert slowest.look(now_s, present_s) >= present_s
            for worker in workers:
                kept_s, next_s, told_at_s = worker
                if now_s >= next_s:
                    assert kept_s * (1 - PACE_TOLERANCE) <= slowest.interval_s, f"seed {seed}, at {now_s}"
                    if worth_an_answer(now_s - told_at_s, kept_s, present_s):
                        worker[0], worker[2] = present_s, now_s
                    # What it has just been told comes too late for the sleep that begins.
                    worker[1] = now_s + kept_s


def test_a_pace_that_stays_is_not_told_again_and_the_clock_is() -> None:
    assert worth_an_answer(float("inf"), 0.0, 2.0), "the first heartbeat of a stream"
    assert not worth_an_answer(CLOCK_WITHIN_S - 0.1, 40.0, 41.9)
    assert worth_an_answer(CLOCK_WITHIN_S, 40.0, 40.0)
    assert worth_an_answer(10.0, 40.0, 42.1)
    assert worth_an_answer(10.0, 40.0, 37.9)
    assert not worth_an_answer(9.9, 40.0, 2.0)


@pytest.mark.parametrize(("heartbeats_per_second", "looks"), [(250.0, 20), (0.05, 4)])
def test_everybody_is_looked_at_at_each_tick_unless_patience_is_long(
    monkeypatch: pytest.MonkeyPatch, heartbeats_per_second: float, looks: int
) -> None:
    timings = Timings(heartbeats_per_second=heartbeats_per_second)
    world = World(dataclasses.replace(config(swarm={"min_workers": 50}), timings=timings), {"wa": (0, 2)})
    world.boot()
    world.join("wa")
    looked_at, is_well = list[float](), membership._is_well

    def counted(member: Member, since_s: float) -> bool:
        looked_at.append(world.now_s)
        return is_well(member, since_s)

    monkeypatch.setattr(membership, "_is_well", counted)
    until_s = world.now_s + 10.0
    while world.now_s < until_s:
        world.tick()
    assert abs(len(looked_at) - looks) <= 1


def test_a_stream_that_ended_is_noticed_as_soon_where_patience_is_long() -> None:
    """A heartbeat every 200 s: everybody is looked at every 25 s, and this one within its grace and two looks."""
    timings = Timings(heartbeats_per_second=0.01)
    world = World(dataclasses.replace(config(swarm={"min_workers": 50}), timings=timings), {"wa": (0, 2)})
    world.boot()
    for name in ("wa", "wb"):
        world.join(name)
    for _ in range(10):
        world.tick()
    world.feed(WorkerDisconnected(world.fakes[WorkerId("wa")].session, WorkerId("wa")))
    ended_s = world.now_s
    while WorkerId("wa") in world.core.members:
        world.tick()
        assert world.now_s <= ended_s + timings.reconnect_grace_s + 2.0
    assert WorkerId("wb") in world.core.members


def grown() -> World:
    """Two of four spans are held; with four workers heartbeats are 8 s apart, with two 4 s, with one 2 s."""
    timings = Timings(heartbeats_per_second=0.5)
    world = World(dataclasses.replace(config(swarm={"min_workers": 50}), timings=timings), {"wa": (0, 2)})
    world.boot()
    for name in ("wa", "wb", "wc", "wd"):
        world.join(name)
    return world


def silent_until_lost_s(world: World, name: str) -> float:
    begun_s = world.now_s
    world.fakes[WorkerId(name)].mute = True
    while WorkerId(name) in world.core.members:
        world.tick()
    return world.now_s - begun_s


def test_early_workers_of_a_swarm_that_has_grown_have_the_patience_of_its_size() -> None:
    world = grown()
    assert [f.inbox[0].heartbeat_interval_s for f in world.fakes.values()] == [2.0, 4.0, 6.0, 8.0]
    assert world.core.membership.heartbeat_interval_s == 8.0
    assert 24.0 <= silent_until_lost_s(world, "wa") <= 30.5


def test_a_swarm_that_has_shrunk_is_quicker_again_for_those_who_know() -> None:
    world = grown()
    for name in ("wb", "wc", "wd"):
        silent_until_lost_s(world, name)
    # Longer than it takes until everybody has been told.
    for _ in range(200):
        world.tick()
    assert silent_until_lost_s(world, "wa") <= 8.0
