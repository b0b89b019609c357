"""Holders that live and do not get on: suspected, given up, slow; and silence that peers confirm."""

from __future__ import annotations

import dataclasses

import pytest

from starlings_coordinator.core.config import Timings
from starlings_coordinator.core.events import WorkerSaid
from starlings_coordinator.core.liveness import CEILING, SUSPECT_FROM, SilenceDetector, patience_s
from starlings_protos.messages import Heartbeat, LeaseGrant, PeerUnreachable, WorkerId
from support.core_world import Fake, World, config, received
from support.streaming_world import lazy_world, streaming

FLOOR_S = Timings().silence_least_s


def beat(world: World, name: str, **figures: object) -> None:
    fake = world.fakes[WorkerId(name)]
    world.feed(WorkerSaid(fake.session, fake.worker_id, Heartbeat(**figures)))  # type: ignore[arg-type]


def kinds(world: World, name: str) -> list[str]:
    return [
        e.kind
        for e in world.core.events
        if e.text.startswith(name) and e.kind in ("suspect", "trusted", "lost")
    ]


def accuse(world: World, by: str, whom: str) -> None:
    fake = world.fakes[WorkerId(by)]
    world.feed(WorkerSaid(fake.session, fake.worker_id, PeerUnreachable(WorkerId(whom), "no answer")))


# ------------------------------------------------------------------ silence


def test_more_confirmations_mean_less_patience() -> None:
    waits = [patience_s(3.0, 7.5, count) for count in range(6)]
    assert waits[0] == 7.5
    assert waits[3] == waits[5] == 3.0
    assert waits == sorted(waits, reverse=True)
    assert len(set(waits)) == 4


def test_a_silence_is_confirmed_by_peers_and_never_before_half_of_the_floor() -> None:
    detector = SilenceDetector(6.0, 0.0)
    assert not detector.suspect(2.9, 6.0)
    assert detector.suspect(4.5, 6.0)
    assert not detector.lost(2.9, 6.0, confirmations=9)
    assert detector.lost(3.0, 6.0, confirmations=3)
    assert not detector.lost(5.0, 6.0, confirmations=1)
    assert detector.lost(5.3, 6.0, confirmations=1)


def silence(world: World, name: str, accusers: tuple[str, ...] = ()) -> float:
    """Until it is given up."""
    begun_s = world.now_s
    world.fakes[WorkerId(name)].mute = True
    while WorkerId(name) in world.core.members:
        world.tick(0.25)
        if accusers and world.now_s - begun_s >= 1.0:
            for by in accusers:
                accuse(world, by, name)
            accusers = ()
        assert world.now_s - begun_s < 30.0
    return world.now_s - begun_s


def test_peers_that_cannot_reach_a_silent_worker_shorten_the_wait() -> None:
    world = lazy_world()
    alone_s = silence(world, "wd")
    assert FLOOR_S <= alone_s <= CEILING * FLOOR_S + 1.5
    assert kinds(world, "wd") == ["suspect", "lost"]
    world = lazy_world()
    confirmed_s = silence(world, "wd", ("wa", "wb", "wc"))
    assert SUSPECT_FROM * FLOOR_S <= confirmed_s <= SUSPECT_FROM * FLOOR_S + 2.0
    assert any("3 of its peers cannot reach it either" in e.text for e in world.core.events)


def test_a_link_that_is_dead_accuses_nobody_who_speaks() -> None:
    world = lazy_world()
    for by in ("wa", "wb", "wc"):
        accuse(world, by, "wd")
    for _ in range(60):
        world.tick()
    assert WorkerId("wd") in world.core.members
    assert kinds(world, "wd") == []


def suspected(world: World, name: str) -> Fake:
    fake = world.fakes[WorkerId(name)]
    fake.mute = True
    for _ in range(11):
        world.tick(0.5)
    assert world.core.members[WorkerId(name)].suspicion is not None
    return fake


def test_a_suspect_gets_no_work_and_a_word_of_it_ends_that() -> None:
    world = lazy_world()
    fake = suspected(world, "wc")
    fake.leases.clear()
    granted = len(received(fake, LeaseGrant))
    member = world.core.members[WorkerId("wc")]
    assert not member.takes_work
    member.wish = 4
    status = {w.worker_id: w for w in world.core.status(world.now()).workers}[WorkerId("wc")]
    assert status.suspect
    assert "nothing was heard" in status.reason
    world.tick(0.25)
    assert len(received(fake, LeaseGrant)) == granted
    fake.mute = False
    beat(world, "wc")
    world.tick(0.25)
    assert member.suspicion is None
    assert kinds(world, "wc") == ["suspect", "trusted"]
    assert len(received(fake, LeaseGrant)) > granted


def test_a_coordinator_that_was_asleep_accuses_nobody() -> None:
    world = lazy_world()
    suspected(world, "wd")
    for by in ("wa", "wb", "wc"):
        accuse(world, by, "wd")
    world.tick(60.0)
    world.tick(0.25)
    assert WorkerId("wd") in world.core.members
    assert world.core.members[WorkerId("wd")].suspicion is None


# ------------------------------------------------------------------ devices that hang


def hanging_for(world: World, name: str, *, moves: bool, busy: bool = True, seconds: float = 400.0) -> float:
    """Heartbeats come; until it is given up, or the time is over."""
    begun_s, progress = world.now_s, 5
    while world.now_s - begun_s < seconds:
        progress += moves
        beat(world, name, progress=progress, busy_s=world.now_s - begun_s + 1 if busy else 0.0)
        world.tick(1.0)
        if WorkerId(name) not in world.core.members:
            break
    return world.now_s - begun_s


def test_a_device_that_hangs_is_suspected_and_given_up_and_its_samples_are_leased_again() -> None:
    world = lazy_world()
    leased = len(world.fakes[WorkerId("wc")].leases)
    assert leased
    patience = world.core.watch.patience_s(world.core.members[WorkerId("wc")], 0.0)
    took_s = hanging_for(world, "wc", moves=False)
    assert patience <= took_s <= patience + 10.0
    assert kinds(world, "wc") == ["suspect", "lost"]
    assert not any(b.worker_id == "wc" for b in world.core.state.leased.blocks.values())
    # It counts as a failure: no plan counts on it for a while.
    assert world.core.phase.value == "training"


@pytest.mark.parametrize(("moves", "busy"), [(True, True), (False, False), (True, False)])
def test_who_is_slow_or_has_nothing_to_do_does_not_hang(moves: bool, busy: bool) -> None:
    world = lazy_world()
    assert hanging_for(world, "wc", moves=moves, busy=busy) >= 400.0
    assert kinds(world, "wc") == []


def test_a_suspected_device_that_gets_on_is_trusted_again() -> None:
    world = lazy_world()
    hanging_for(world, "wc", moves=False, seconds=60.0)
    assert kinds(world, "wc") == ["suspect"]
    beat(world, "wc", progress=6, busy_s=0.1)
    for _ in range(5):
        world.tick(1.0)
    assert kinds(world, "wc") == ["suspect", "trusted"]


# ------------------------------------------------------------------ stragglers


def pace_of(world: World, slow: dict[str, float], seconds: float) -> None:
    """Every holder computes as it was measured, or so many times slower."""
    until_s, passes = world.now_s + seconds, 0
    while world.now_s < until_s:
        passes += 1
        for name in world.spans:
            seen = world.core.watch._seen.get(WorkerId(name))
            planned = seen.planned_seconds if seen is not None else ()
            factor = slow.get(name, 1.0)
            beat(
                world, name, progress=passes, passes=passes, stage_seconds=tuple(factor * s for s in planned)
            )
        world.tick(2.0)


def test_a_straggler_is_named_shown_and_gets_less_in_store() -> None:
    world = lazy_world(steps=100_000)
    pace_of(world, {"wc": 3.0}, 60.0)
    status = {w.worker_id: w for w in world.core.status(world.now()).workers}
    assert (status[WorkerId("wc")].pace, status[WorkerId("wc")].cause) == ("red", "compute")
    assert status[WorkerId("wc")].slowdown == pytest.approx(3.0, abs=0.2)
    assert "slower than planned" in status[WorkerId("wc")].reason
    assert (status[WorkerId("wa")].pace, status[WorkerId("wa")].reason) == ("green", "")
    said = [e.text for e in world.core.events if e.kind == "pace"]
    assert said[-1].startswith("wc is red: 3.")
    core = world.core
    for name in ("wa", "wc"):
        fake, member = world.fakes[WorkerId(name)], core.members[WorkerId(name)]
        world.train(name, len(fake.leases))
        member.wish = 1024
    world.tick(0.5)
    held = {n: len(world.fakes[WorkerId(n)].leases) for n in ("wa", "wc")}
    assert held["wc"] < held["wa"] / 2


def test_figures_of_another_span_are_no_figures() -> None:
    world = lazy_world()
    for passes in range(20):
        beat(world, "wc", progress=passes, passes=passes, stage_seconds=(9.0,))
        world.tick(2.0)
    assert world.core.watch.paces.verdict(WorkerId("wc")).slowdown == 1.0


def test_in_steps_too_a_straggler_is_granted_less() -> None:
    core_config = config(
        train={"batch": 32, "microbatch": 2}, job={"name": "test", "tokens": 400 * 32 * 64, "seed": 7}
    )
    world = World(core_config, {"wa": (0, 2), "wb": (0, 2)})
    world.boot()
    for name in world.spans:
        world.join(name, lazy=True)
    for _ in range(6):
        world.tick()
    assert world.core.phase.value == "training"
    pace_of(world, {"wb": 3.0}, 60.0)
    assert world.core.watch.slowdown(WorkerId("wb")) > 2.0
    # Both ask for all of it.
    ledger = world.core.ledger
    assert ledger is not None
    for name in world.spans:
        world.core.members[WorkerId(name)].wish = 16
    world.tick(0.25)
    shares = {name: ledger.outstanding(WorkerId(name)) for name in world.spans}
    assert sum(shares.values()) == 16
    assert shares["wa"] >= 2 * shares["wb"] > 0


def test_timings_are_the_configs_own() -> None:
    timings = Timings(hung_least_s=10.0)
    world = World(dataclasses.replace(streaming(100), timings=timings), {"wa": (0, 2), "wb": (0, 2)})
    world.boot()
    for name in world.spans:
        world.join(name, lazy=True)
    for _ in range(6):
        world.tick()
    assert hanging_for(world, "wb", moves=False) < 30.0
