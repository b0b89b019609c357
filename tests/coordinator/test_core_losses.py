"""A holder is lost in the middle of a step: when that costs its leases only, and when it costs the attempt."""

from __future__ import annotations

import pytest

from starlings_coordinator.core.events import WorkerSaid
from starlings_coordinator.core.ledger import StepLedger
from starlings_coordinator.core.records import PlanAdopted, StepRetried
from starlings_protos.messages import (
    Assignment,
    EngineDown,
    Hop,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    StepRestarted,
    WorkerId,
)
from support.core_world import Fake, World, attempts_begun, config, received

WA, WB, WC = map(WorkerId, ("wa", "wb", "wc"))
REPLICAS = {"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)}


def leased_out(spans: dict[str, tuple[int, int]] = REPLICAS) -> World:
    """Step 1 has begun: each of its four microbatches is leased, and none is done."""
    world = World(config(), spans)
    world.pause_at = 1
    world.start()
    world._queue.clear()
    for fake in world.fakes.values():
        fake.mute = True
    for _ in range(2):
        for fake in world.fakes.values():
            if world.core.state.spans[fake.worker_id].first_stage == 0:
                world.feed(WorkerSaid(fake.session, fake.worker_id, LeaseRequest(2)))
    assert world.core.ledger is not None
    assert not world.core.ledger.pool
    for fake in world.fakes.values():
        fake.mute = False
        fake.inbox.clear()
    return world


def leases_of(world: World, worker_id: WorkerId) -> list[int]:
    assert world.core.ledger is not None
    return [index for index, lease in world.core.ledger.leases.items() if lease.worker_id == worker_id]


def lose(world: World, worker_id: WorkerId) -> None:
    fake = world.fakes[worker_id]
    fake.mute = True
    world.feed(WorkerSaid(fake.session, worker_id, EngineDown("signal 9", False)))


def finish(world: World, index: int, *route: tuple[WorkerId, int, int]) -> None:
    """The first of the route says that it is done."""
    fake = world.fakes[route[0][0]]
    state = world.core.state
    key = MicrobatchKey(LeaseKind.TRAIN, state.step, state.attempt, index)
    hops = tuple(Hop(*hop) for hop in route)
    for hop in hops:
        world.fakes[hop.worker_id].routes[index] = hops
        for stage in range(hop.first_stage, hop.last_stage + 1):
            world.fakes[hop.worker_id].accumulated.setdefault(stage, set()).add(index)
    world.feed(WorkerSaid(fake.session, fake.worker_id, MicrobatchDone(key, hops, 128.0, 128)))


def work_on(world: World) -> None:
    """Everybody does what it holds leases of, and asks for more."""
    for fake in list(world.fakes.values()):
        for index in leases_of(world, fake.worker_id):
            finish(world, index, (fake.worker_id, 0, 2))
        if fake.worker_id in world.core.state.spans:
            world.say(fake, LeaseRequest(4))
    world.pause_at = None
    world.settle()
    world.run_to_the_end()


def struck(world: World) -> dict[WorkerId, int]:
    return {w: member.strikes for w, member in world.core.members.items() if member.strikes}


def test_a_worker_lost_before_it_accumulated_costs_only_its_leases() -> None:
    world = leased_out()
    returned = leases_of(world, WB)
    finish(world, leases_of(world, WA)[0], (WA, 0, 2))
    plan = world.core.state.plan_version
    assert returned
    lose(world, WB)
    state, ledger = world.core.state, world.core.ledger
    assert ledger is not None
    assert (state.step, state.attempt, state.plan_version) == (1, 0, plan + 1)
    assert not leases_of(world, WB)
    assert set(returned) <= {*ledger.pool, *leases_of(world, WA), *leases_of(world, WC)}
    assert len(ledger.done) == 1
    adopted = [r for r in world.records if isinstance(r, PlanAdopted)][-1]
    assert (adopted.attempt, adopted.loads, [w for w, _ in adopted.spans]) == (0, False, [WA, WC])
    for fake in (world.fakes[WA], world.fakes[WC]):
        (assignment,) = received(fake, Assignment)
        assert WB not in {peer.worker_id for peer in assignment.peers}
        assert (assignment.step, assignment.attempt) == (1, 0)
        assert not received(fake, StepRestarted)
    assert "goes on, " in world.core.events[-1].text
    work_on(world)
    granted = [lease.key.index for g in received(world.fakes[WA], LeaseGrant) for lease in g.leases]
    granted += [lease.key.index for g in received(world.fakes[WC], LeaseGrant) for lease in g.leases]
    assert set(returned) <= set(granted)
    assert not [r for r in world.records if isinstance(r, StepRetried)]
    assert world.core.state.samples_trained == 32
    assert world.core.state.samples_lost == 0


def test_two_lost_one_after_the_other_cost_only_their_leases() -> None:
    world = leased_out()
    lose(world, WB)
    lose(world, WC)
    assert world.core.state.attempt == 0
    assert set(world.core.state.spans) == {WA}
    work_on(world)
    assert not [r for r in world.records if isinstance(r, StepRetried)]
    begun = attempts_begun(world)
    assert len(begun) == len(set(begun))


def test_a_worker_on_a_route_that_is_done_costs_the_attempt() -> None:
    world = leased_out()
    finish(world, leases_of(world, WB)[0], (WB, 0, 2))
    lose(world, WB)
    assert (world.core.state.step, world.core.state.attempt) == (1, 1)
    assert received(world.fakes[WA], StepRestarted)[-1].attempt == 1
    world.go_on()
    world.run_to_the_end()


def test_a_worker_in_the_exchange_costs_the_attempt_whether_or_not_it_contributed() -> None:
    world = leased_out({"wa": (0, 2), "wd": (2, 2)})
    ledger = world.core.ledger
    assert ledger is not None
    for index in leases_of(world, WA):
        finish(world, index, (WA, 0, 2))
    assert ledger.opened_at_s is not None
    assert not ledger.passed(WorkerId("wd"))
    lose(world, WorkerId("wd"))
    assert (world.core.state.step, world.core.state.attempt) == (1, 1)


def test_a_last_holder_is_no_such_case() -> None:
    world = leased_out({"wa": (0, 2), "wb": (0, 0)})
    lose(world, WA)
    assert world.core.phase.value == "gathering"


@pytest.mark.parametrize("kind", ["failed", "done"])
def test_gradient_on_a_route_through_the_lost_worker_voids_the_attempt_and_is_nobodys_fault(
    kind: str,
) -> None:
    """Who accumulated what came through the lost worker says so; or what is done crossed the news of the loss."""
    world = leased_out({"wa": (0, 1), "wb": (0, 2), "wc": (2, 2), "wd": (2, 2)})
    index = leases_of(world, WA)[0]
    lose(world, WorkerId("wd"))
    assert world.core.state.attempt == 0
    if kind == "done":
        finish(world, index, (WA, 0, 1), (WorkerId("wd"), 2, 2))
    else:
        key = MicrobatchKey(LeaseKind.TRAIN, 1, 0, index)
        for name in ("wa", "wb"):
            fake = world.fakes[WorkerId(name)]
            world.feed(
                WorkerSaid(fake.session, fake.worker_id, MicrobatchFailed(key, "through a lost worker"))
            )
    assert (world.core.state.step, world.core.state.attempt) == (1, 1)
    assert not struck(world)
    assert world.core.refused_reports == 0


def test_the_same_microbatch_that_fails_at_two_after_two_losses_fails_no_job() -> None:
    world = leased_out()
    for lost, fails in ((WC, WA), (WB, WA)):
        lose(world, lost)
        fake, state = world.fakes[fails], world.core.state
        key = MicrobatchKey(LeaseKind.TRAIN, state.step, state.attempt, 0)
        world.feed(WorkerSaid(fake.session, fails, MicrobatchFailed(key, "through a lost worker")))
    assert world.core.phase.value == "training"
    assert world.core.state.attempt == 2
    assert not struck(world)


def test_who_leaves_in_order_between_two_steps_costs_no_attempt() -> None:
    world = World(config(), REPLICAS)
    world.pause_at = 1
    world.start()
    fake: Fake = world.fakes[WB]
    world.feed(WorkerSaid(fake.session, WB, Leaving("bored", 60)))
    world.go_on()
    world.run_to_the_end()
    assert not [r for r in world.records if isinstance(r, StepRetried)]
    assert {r.attempt for r in world.records if isinstance(r, PlanAdopted)} == {0}
    assert world.core.state.samples_trained == 32


def test_returned_leases_are_the_next_to_be_granted() -> None:
    ledger = StepLedger.begin(0, 0, tuple(range(12)), 2, 1.0)
    assert [ledger.grant(w, 0.0) for w in (WA, WB, WA, WB)] == [0, 1, 2, 3]
    assert ledger.leave_out(WB) == [1, 3]
    assert [ledger.grant(WA, 0.0) for _ in range(4)] == [1, 3, 4, 5]
    assert ledger.grant(WA, 0.0) is None
    assert ledger.gone == {WB}
