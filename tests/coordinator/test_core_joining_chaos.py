"""Joiners among trouble: donors that die, observers that fail, fall silent or leave, restarts; the invariants hold."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starlings_coordinator.core.core import Core
from starlings_coordinator.core.events import WorkerDisconnected, WorkerSaid
from starlings_coordinator.core.records import (
    StepRecorded,
    record_from_json,
    record_to_json,
)
from starlings_protos.messages import CatchUpFailed, EngineDown, Leaving, Ready, Span, WorkerId
from support.core_world import Fake, World, attempts_begun, config

HOLDERS = {"wa": (0, 1), "wb": (2, 2), "wc": (0, 2)}
LATE = {"wd": (0, 2), "we": (1, 2), "wf": (0, 0)}


def pass_time(world: World, draw: random.Random) -> None:
    """A few events are heard, and a moment passes."""
    for _ in range(draw.randrange(1, 20)):
        if world._queue:
            world.feed(world._queue.pop(0))
    world.tick(draw.choice([0.1, 0.25, 0.5, 1.5]))


def trouble(world: World, draw: random.Random) -> None:
    """One thing that happens to a swarm that others are joining."""
    fake = world.fakes[draw.choice(sorted(world.fakes))]
    joining = world.core.joining
    observers = [world.fakes[w] for w in sorted(joining.observers)]
    donors = sorted({w for o in joining.observers.values() for w in o.donors})
    match draw.randrange(9):
        case 0 if donors:
            crash(world, world.fakes[draw.choice(donors)])
        case 1 if observers:
            crash(world, draw.choice(observers))
        case 2 if observers:
            failed = draw.choice(observers)
            say(world, failed, CatchUpFailed(failed.version, "the donor forgot it"))
        case 3 if observers:
            # Anything that an observer may claim, also of the future and of other groups.
            liar = draw.choice(observers)
            claim = liar.version + draw.choice([-2, -1, 0, 1, 5])
            digests = draw.choice([{}, {"stage:1": 99}, {"stage:1": 7}, {"nonsense": 1}])
            say(world, liar, Ready(draw.randrange(9), max(0, claim), {}, digests))
        case 4 if fake.worker_id in world.core.members:
            world.feed(WorkerDisconnected(fake.session, fake.worker_id))
            if draw.random() < 0.7:
                world.reconnect(fake.worker_id)
        case 5:
            fake.pace = draw.choice(["fast", "slow", "never"])
        case 6 if draw.random() < 0.3:
            say(world, fake, Leaving("bored", 60))
        case 7:
            for other in observers:
                if other.pace == "slow" and other.observing:
                    world.catch_up(other)
        case 8 if draw.random() < 0.2:
            world.restart(draw.choice([0.5, 5.0]), tuple({0, *world.core.state.checkpoints}))
        case _:
            absent = [n for n in (*HOLDERS, *LATE) if WorkerId(n) not in world.core.members]
            if absent:
                world.join(draw.choice(absent), pace=draw.choice(["fast", "fast", "slow", "never"]))


def say(world: World, fake: Fake, message: Any) -> None:
    world.feed(WorkerSaid(fake.session, fake.worker_id, message))


def crash(world: World, fake: Fake) -> None:
    fake.observing, fake.unheard = False, []
    say(world, fake, EngineDown("signal 9", True))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_joiners_among_any_trouble_keep_the_invariants_and_the_job_ends(seed: int) -> None:
    draw = random.Random(seed)
    world = World(config(job={"tokens": 40 * 8 * 64}, checkpoint={"every": 3}), HOLDERS)
    world.pause_at = 1
    world.start()
    world.spans |= {WorkerId(w): Span(*span) for w, span in LATE.items()}
    world.pause_at = 0  # From here on events are heard one by one.
    for _ in range(60):
        if world.ended is not None:
            break
        trouble(world, draw)
        for _ in range(3):
            pass_time(world, draw)
    world.pause_at = None
    for name in (*HOLDERS, *LATE):
        if world.ended is None and WorkerId(name) not in world.core.members:
            world.join(name)
    for fake in list(world.fakes.values()):
        fake.pace, fake.digest_offset = "fast", 0
        if world.ended is None and fake.worker_id in world.core.members and fake.observing:
            world.catch_up(fake)
        member = world.core.members.get(fake.worker_id)
        if world.ended is None and member is not None and not member.here:
            world.reconnect(fake.worker_id)
    for _ in range(900):
        if world.ended is not None:
            break
        world.tick(2.0)
    assert world.ended is not None, world.core.waiting_words()
    assert world.core.state.samples_lost == 0
    log = [record_from_json(record_to_json(record)) for record in world.records]
    assert Core.restore(world.config, None, tuple(log)).state == world.core.state
    begun = attempts_begun(world)
    assert len(begun) == len(set(begun)), "an attempt began twice"
    committed = [(r.step, r.attempt) for r in log if isinstance(r, StepRecorded)]
    assert len(committed) == len(set(committed))
