"""Unequal data of an `async` job: who leases from which shard of an epoch, through losses and restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.records import SampleEpochOpened, SamplesAcknowledged
from starlings_job.skew import SkewedOrder
from starlings_job.source_ranges import SourceRange
from starlings_protos.messages import Hop, LeaseGrant, LeaseKind, LeaseRequest, MicrobatchDone, WorkerId
from support.core_world import World, config, received

SOURCES = tuple(SourceRange(name, first, 20) for name, first in (("a", 0), ("b", 20), ("c", 40), ("d", 60)))
POPULATION = 80


def skewed(steps: int, alpha: float = 0.05, **overrides: Any) -> CoreConfig:
    made = config(
        job={"name": "test", "tokens": steps * 8 * 64, "seed": 7},
        train={"schedule": "async"},
        data={"skew": alpha},
        **overrides,
    )
    return replace(made, population=POPULATION, sources=SOURCES)


def world_of(names: str, steps: int = 1000, **settings: Any) -> World:
    """Workers that hold everything, and train when the test says so."""
    world = World(skewed(steps, **settings), dict.fromkeys(names, (0, 2)))
    world.boot()
    for name in names:
        world.join(name, lazy=True)
    for _ in range(6):
        if world.core.phase.value == "training":
            return world
        world.tick()
    raise AssertionError(world.core.waiting_words())


def leased(world: World, name: str) -> list[tuple[int, int]]:
    """(epoch, sample), of all that it was ever granted."""
    return [
        (lease.key.step, sample)
        for grant in received(world.fakes[WorkerId(name)], LeaseGrant)
        for lease in grant.leases
        if lease.key.kind is LeaseKind.TRAIN
        for sample in lease.samples
    ]


def work(world: World, name: str, microbatches: int) -> None:
    """With one block in stock, as small as it may be."""
    fake = world.fakes[WorkerId(name)]
    for _ in range(microbatches):
        if not fake.leases:
            world.say(fake, LeaseRequest(1))
            world.settle()
        lease, route = fake.leases.pop(0), (Hop(fake.worker_id, 0, 2),)
        world.say(fake, MicrobatchDone(lease.key, route, 64.0 * len(lease.samples), 64 * len(lease.samples)))
        world.settle()


def own(place: int, shards: int, alpha: float = 0.05) -> set[int]:
    order = SkewedOrder(SOURCES, alpha, shards, 7)
    return set(order.samples_at(0, *order.bounds(place)))


def test_each_worker_leases_from_a_shard_of_its_own() -> None:
    world = world_of("xy")
    for _ in range(4):
        work(world, "x", 2)
        work(world, "y", 2)
    mine, other = leased(world, "x"), leased(world, "y")
    assert {sample for _, sample in mine} <= own(0, 2)
    assert {sample for _, sample in other} <= own(1, 2)
    assert not set(mine) & set(other)
    of_sources = [Counter(sample // 20 for _, sample in some) for some in (mine, other)]
    assert set(of_sources[0]) != set(of_sources[1])
    (opened,) = [r for r in world.records if isinstance(r, SampleEpochOpened)]
    assert (opened.samples, opened.shards) == (POPULATION, 2)


def test_a_fast_worker_goes_on_with_its_shard_of_the_next_epoch_and_then_helps() -> None:
    world = world_of("xy")
    work(world, "x", 40)
    by_epoch = [{sample for e, sample in leased(world, "x") if e == epoch} for epoch in (0, 1)]
    assert by_epoch == [own(0, 2), own(0, 2)]
    work(world, "x", 10)
    helped = leased(world, "x")[80:]
    assert {epoch for epoch, _ in helped} == {0}
    assert {sample for _, sample in helped} <= own(1, 2)
    assert len(world.core.state.leased.epochs) == 2
    everything = leased(world, "x") + leased(world, "y")
    assert len(set(everything)) == len(everything)


def test_epochs_complete_and_no_sample_is_acknowledged_twice() -> None:
    world = world_of("xyz")
    for _ in range(40):
        for name, count in (("x", 4), ("y", 2), ("z", 1)):
            work(world, name, count)
        world.tick(1.1)
    assert world.core.state.samples_trained > 6 * POPULATION
    assert min(world.core.state.leased.epochs) >= 5
    assert len(world.core.state.leased.epochs) <= 3
    granted = [pair for name in "xyz" for pair in leased(world, name)]
    assert len(set(granted)) == len(granted)


def test_nobody_elses_samples_are_not_forgotten() -> None:
    """Who is lost leaves its place: the others take what was its, before they begin another epoch."""
    world = world_of("xyz")
    world.core.membership.lose(world.core.members[WorkerId("y")], "test")
    del world.fakes[WorkerId("y")]
    world.tick()
    for _ in range(11):
        work(world, "x", 2)
        work(world, "z", 2)
    both = leased(world, "x") + leased(world, "z")
    of_epoch = {sample for epoch, sample in both if epoch == 0}
    assert of_epoch == set(range(POPULATION))


def test_a_restart_keeps_everybodys_place() -> None:
    world = world_of("xyz", checkpoint={"every": 0})
    for name in "xyz":
        work(world, name, 1)
        world.say(world.fakes[WorkerId(name)], LeaseRequest(4))
    world.settle()
    world.tick(1.1)
    before = {name: {s for _, s in leased(world, name)} for name in "xyz"}
    world.restart()
    for name in "zyx":
        world.reconnect(name)
    for _ in range(4):
        world.tick()
    for name in "xyz":
        work(world, name, 3)
    for place, name in enumerate("xyz"):
        after = {s for epoch, s in leased(world, name) if epoch == 0}
        assert before[name] < after <= own(place, 3), name


def test_a_job_with_unequal_data_runs_to_its_end() -> None:
    world = World(skewed(4, exchange={"preset": "pairs"}), {"x": (0, 1), "y": (2, 2), "z": (0, 2)})
    world.start()
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    accepted = [r for r in world.records if isinstance(r, SamplesAcknowledged)]
    assert (
        sum(end - first for r in accepted for _, first, end in r.accepted) == world.core.state.samples_trained
    )
