"""Microbatches that fail whoever tries them: quarantined with their ids, counted, and never leased again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_coordinator.core.quarantine import stand_ins
from starlings_coordinator.core.records import SamplesQuarantined
from starlings_job.sampling import samples_of_step
from starlings_protos.messages import EngineDown, Lease, LeaseGrant, LeaseRequest, MicrobatchFailed, WorkerId
from support.core_world import World, config, received
from support.streaming_world import lazy_world

SPANS = {"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)}
# A microbatch of step 3.
WHOLE = samples_of_step(7, 1000, 3, 8)[2:4]


# ------------------------------------------------------------------ who stands in

ids = st.lists(st.integers(0, 39), min_size=1, max_size=8, unique=True).map(tuple)


@given(ids, st.sets(st.integers(0, 39), max_size=20))
def test_stand_ins_are_well_and_as_many_and_others_stay(samples: tuple[int, ...], bad: set[int]) -> None:
    found = stand_ins(samples, bad, 40)
    assert len(found) == len(samples)
    assert not set(found) & bad
    assert len(set(found)) == len(found)
    assert all(a == b for a, b in zip(samples, found, strict=True) if a not in bad)
    assert stand_ins(samples, bad, 40) == found


def test_with_nobody_well_nobody_stands_in() -> None:
    assert stand_ins((0, 1), {0, 1}, 2) == (0, 1)


# ------------------------------------------------------------------ sync


class Poisoned(World):
    """Whoever computes one of the bad samples fails, or dies of it."""

    bad: frozenset[int] = frozenset()
    dies = False
    # Only this one does.
    broken: WorkerId | None = None

    def _work(self, fake, lease: Lease) -> None:  # type: ignore[no-untyped-def]
        if not self.bad & set(lease.samples) or fake.worker_id != (self.broken or fake.worker_id):
            super()._work(fake, lease)
        elif self.dies:
            self.say(fake, EngineDown("signal 11", restarting=True, at=lease.key))
        else:
            self.say(fake, MicrobatchFailed(lease.key, "RuntimeError: index out of range"))
            self.say(fake, LeaseRequest(1))


def poisoned(*, dies: bool, steps: int = 8) -> Poisoned:
    world = Poisoned(config(job={"name": "t", "tokens": steps * 8 * 64, "seed": 7}), SPANS)
    world.pause_at = 1
    world.start()
    world.bad, world.dies = frozenset(WHOLE[:1]), dies
    return world


@pytest.mark.parametrize("dies", [False, True])
def test_in_sync_a_microbatch_that_fails_at_two_workers_is_left_to_stand_ins(dies: bool) -> None:
    world = poisoned(dies=dies)
    world.go_on()
    world.run_to_the_end()
    (record,) = [r for r in world.records if isinstance(r, SamplesQuarantined)]
    assert record.samples == WHOLE
    assert len(record.workers) == 2
    state = world.core.state
    assert (state.samples_trained, state.samples_lost) == (8 * 8, 0)
    status = world.core.status(world.now())
    assert [q.samples for q in status.quarantined] == [WHOLE]
    assert any(e.kind == "quarantined" and str(WHOLE[0]) in e.text for e in world.core.events)
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_what_is_quarantined_stays_so_through_a_restart() -> None:
    world = poisoned(dies=False)
    world.pause_at = 4
    world.settle()
    assert world.core.state.quarantined
    before = set(world.core.state.quarantined)
    for fake in world.fakes.values():
        fake.inbox.clear()
    world.restart()
    assert world.core.state.quarantined == before
    world.pause_at = None
    for name in SPANS:
        world.reconnect(name)
    world.run_to_the_end()
    leased = {
        sample
        for fake in world.fakes.values()
        for grant in received(fake, LeaseGrant)
        for lease in grant.leases
        if lease.key.kind.name == "TRAIN"
        for sample in lease.samples
    }
    assert leased
    assert not leased & before


def test_a_swarm_whose_every_microbatch_fails_fails_and_blames_no_samples_for_it() -> None:
    world = poisoned(dies=False)
    world.bad = frozenset(range(1000))
    world.go_on()
    for _ in range(400):
        if world.ended is not None:
            break
        world.tick()
        for name in SPANS:
            if WorkerId(name) not in world.core.members:
                world.reconnect(name, incarnation=0)
    assert world.ended is not None
    assert world.ended.exit_code == 1
    assert "index out of range" in world.ended.reason
    assert len(world.core.state.quarantines) <= 1


def test_a_worker_that_fails_at_everything_goes_and_no_samples_with_it() -> None:
    world = poisoned(dies=False)
    world.bad, world.broken = frozenset(range(1000)), WorkerId("wb")
    world.go_on()
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert WorkerId("wb") not in world.core.state.spans
    assert not world.core.state.quarantined


# ------------------------------------------------------------------ async


def fail(world: World, name: str, samples: tuple[int, ...], *, dies: bool = False) -> None:
    """The worker gets these samples sooner or later, and fails."""
    fake = world.fakes[WorkerId(name)]
    for _ in range(200):
        lease = next((x for x in fake.leases if x.samples == samples), None)
        if lease is not None:
            fake.leases.remove(lease)
            if dies:
                world.say(fake, EngineDown("signal 11", restarting=True, at=lease.key))
            else:
                world.say(fake, MicrobatchFailed(lease.key, "RuntimeError: boom"))
            world.settle()
            return
        for other in ("wa", "wb"):
            if WorkerId(other) in world.core.members:
                held = world.fakes[WorkerId(other)].leases
                world.train(other, sum(x.samples != samples for x in held[:4]) if held else 0)
        world.tick(1.1)
        world.say(fake, LeaseRequest(8))
        world.settle()
    raise AssertionError("nobody leased them again")


def test_in_async_two_workers_that_fail_quarantine_a_microbatch_and_others_stand_in() -> None:
    world = lazy_world(steps=200, spans={"wa": (0, 2), "wb": (0, 2)})
    wa = world.fakes[WorkerId("wa")]
    samples = wa.leases[0].samples
    fail(world, "wa", samples)
    # The only one who may try it next is the other.
    wa.leases.clear()
    member = world.core.members[WorkerId("wa")]
    world.core.membership.lose(member, "a test")
    fail(world, "wb", samples)
    (record,) = world.core.state.quarantines
    assert record.samples == samples
    assert record.workers == ("wa", "wb")
    wb = world.fakes[WorkerId("wb")]
    for _ in range(30):
        world.train("wb", len(wb.leases))
        world.tick(1.1)
        world.say(wb, LeaseRequest(8))
        world.settle()
        assert not any(set(lease.samples) & set(samples) for lease in wb.leases)
    assert world.ended is None or world.ended.exit_code == 0


def test_the_only_worker_tries_three_times() -> None:
    world = lazy_world(steps=200, spans={"wa": (0, 2)})
    samples = world.fakes[WorkerId("wa")].leases[0].samples
    for count in range(3):
        assert len(world.core.state.quarantines) == 0
        world.core.members[WorkerId("wa")].strikes = 0
        fail_alone(world, samples)
        assert world.ended is None, count
    assert [r.samples for r in world.core.state.quarantines] == [samples]
    # Another that fails so, before anything has succeeded, is not at fault.
    other = world.fakes[WorkerId("wa")].leases[0].samples
    for _ in range(3):
        world.core.members[WorkerId("wa")].strikes = 0
        if world.ended is None:
            fail_alone(world, other, trains=False)
    assert world.ended is not None
    assert "fail wherever they are tried, as others do" in world.ended.reason


def fail_alone(world: World, samples: tuple[int, ...], *, trains: bool = True) -> None:
    wa = world.fakes[WorkerId("wa")]
    for _ in range(40):
        lease = next((x for x in wa.leases if x.samples == samples), None)
        if lease is not None:
            break
        if trains:
            world.train("wa", len(wa.leases))
        else:
            # What is given back is leased again without anything being done.
            for other in wa.leases:
                world.core.schedule.leasing.give_up(other.key, begun=False)  # type: ignore[attr-defined]
            wa.leases.clear()
        world.tick(1.1)
        world.say(wa, LeaseRequest(8))
        world.settle()
    assert lease is not None
    wa.leases.remove(lease)
    world.say(wa, MicrobatchFailed(lease.key, "the loss is nan"))
    world.settle()
