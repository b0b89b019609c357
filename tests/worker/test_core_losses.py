"""A worker of the plan is lost and the attempt goes on: what is dropped, sent again, failed, refused."""

from __future__ import annotations

import dataclasses

import pytest

from starlings_protos.messages import (
    Hop,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchHeader,
    Prepared,
    Receipt,
    Refusal,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.effects import ClearGradients, ComputeForward, ForgetMicrobatch, SendMicrobatch
from starlings_worker.core.events import ArrivalAborted, Direction, MicrobatchNotSent, MicrobatchSent
from starlings_worker.core.losses import Fate, fate_of
from starlings_worker.core.microbatches import Held, Phase

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
PRESENT = frozenset(map(WorkerId, ("me", "a", "b")))


def hop(name: str, stage: int) -> Hop:
    return Hop(WorkerId(name), stage, stage)


def held(phase: Phase, before: str, after: str = "", coming: str = "") -> Held:
    """One that was at the worker `before`, went to `after`, and comes back through `coming`."""
    one = Held(train_key(0), 1, (hop(before, 0),) if before else (), 1.0, 1, phase, exit_stage=1)
    one.next_worker = WorkerId(after) if after else None
    if coming:
        one.full_route = (*one.route, hop("me", 1), hop(coming, 2))
    return one


@pytest.mark.parametrize("phase", [Phase.ARRIVING, Phase.QUEUED, Phase.FORWARD, Phase.PLACING, Phase.AWAY])
def test_what_came_through_a_lost_worker_is_dropped_while_it_is_not_accumulated(phase: Phase) -> None:
    assert fate_of(held(phase, "lost"), PRESENT) is Fate.DROPPED
    assert fate_of(held(phase, "lost", "lost too"), PRESENT) is Fate.DROPPED
    assert fate_of(held(phase, "a"), PRESENT) is Fate.STAYS


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.RETURNING])
def test_what_is_being_accumulated_on_a_route_through_a_lost_worker_fails(phase: Phase) -> None:
    assert fate_of(held(phase, "lost", coming="b"), PRESENT) is Fate.FAILED
    assert fate_of(held(phase, "a", "lost", "lost"), PRESENT) is Fate.FAILED
    assert fate_of(held(phase, "a", "b", "b"), PRESENT) is Fate.STAYS


def test_a_gradient_that_comes_back_through_a_lost_worker_fails() -> None:
    assert fate_of(held(Phase.GRADIENT_QUEUED, "a", "b", "lost"), PRESENT) is Fate.FAILED
    assert fate_of(held(Phase.GRADIENT_QUEUED, "lost", "b", "b"), PRESENT) is Fate.DROPPED
    coming = held(Phase.GRADIENT_ARRIVING, "a", "b")
    coming.arriving = MicrobatchHeader(train_key(0), 1, (hop("a", 0), hop("me", 1), hop("lost", 2)), 1.0, 1)
    assert fate_of(coming, PRESENT) is Fate.FAILED


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.AWAY])
def test_what_went_to_a_lost_worker_is_sent_again(phase: Phase) -> None:
    assert fate_of(held(phase, "a", "lost"), PRESENT) is Fate.SENT_AGAIN
    assert fate_of(held(phase, "a", "b"), PRESENT) is Fate.STAYS


# ---------------------------------------------------------------- a first stage whose next hop is lost

TWO = {"b": (1, 1), "c": (1, 1)}


def sender() -> tuple[Driver, SendMicrobatch]:
    """Holds the first of two stages; a microbatch is on its way to one of two holders of the second."""
    driver = Driver("me")
    driver.ready(assignment((0, 0), TWO, stages=2))
    driver.grant(train_key(0))
    driver.compute()
    return driver, driver.one(SendMicrobatch)


def without(
    driver: Driver, span: tuple[int, int], peers: dict[str, tuple[int, int]], lost: str, stages: int
) -> None:
    left = {name: held for name, held in peers.items() if name != lost}
    driver.hear(assignment(span, left, stages=stages, plan_version=2))


def gradient(sent: SendMicrobatch, plan_version: int = 1) -> MicrobatchHeader:
    route = (*sent.header.route, hop(sent.to, 1))
    return dataclasses.replace(
        sent.header, stage=0, route=route, loss_sum=5.0, target_count=9, plan_version=plan_version
    )


def refusal(answer: Admission) -> Refusal:
    assert isinstance(answer, Rejection), answer
    return answer.refusal


@pytest.mark.parametrize("fate", ["received", "under way", "unknown"])
def test_what_a_lost_worker_had_goes_to_another_in_the_same_attempt(fate: str) -> None:
    driver, sent = sender()
    lost, other = sent.to, next(name for name in TWO if name != sent.to)
    if fate == "received":
        driver.handle(MicrobatchSent(FORWARD, train_key(0), lost, Receipt(free_slots=3)))
    elif fate == "unknown":
        driver.handle(MicrobatchNotSent(FORWARD, train_key(0), lost, False, Refusal.UNSPECIFIED, "reset"))
    without(driver, (0, 0), TWO, lost, 2)
    assert not driver.of(ClearGradients)
    again = driver.one(SendMicrobatch)
    assert (again.to, again.header.plan_version) == (other, 2)
    if fate == "under way":
        driver.handle(MicrobatchNotSent(FORWARD, train_key(0), lost, False, Refusal.UNSPECIFIED, "reset"))
        assert not driver.of(SendMicrobatch)
    assert refusal(driver.push(BACKWARD, gradient(sent), lost)) is Refusal.STALE
    driver.handle(MicrobatchSent(FORWARD, train_key(0), WorkerId(other), Receipt(free_slots=3)))
    assert isinstance(driver.push(BACKWARD, gradient(again, 2), other), Receipt)
    driver.compute()
    (done,) = [m for m in driver.said() if isinstance(m, MicrobatchDone)]
    assert [hop.worker_id for hop in done.route] == ["me", other]
    assert driver.core.training.epoch == (0, 0)


@pytest.mark.parametrize("when", ["arriving", "queued", "computing", "done"])
def test_a_gradient_of_a_lost_worker_voids_the_attempt(when: str) -> None:
    driver, sent = sender()
    driver.handle(MicrobatchSent(FORWARD, train_key(0), sent.to, Receipt(free_slots=3)))
    if when == "arriving":
        driver.core.admit(BACKWARD, gradient(sent), sent.to, 0.0)
    else:
        if when == "queued":
            driver.grant(train_key(1))
        driver.push(BACKWARD, gradient(sent), sent.to)
    if when == "done":
        driver.compute()
    without(driver, (0, 0), TWO, sent.to, 2)
    (failed,) = [m for m in driver.said() if isinstance(m, MicrobatchFailed)]
    assert failed.key == train_key(0)
    assert train_key(0) not in driver.core.table.held
    driver.grant(train_key(0))
    assert not driver.core.table.leases


def test_what_was_accumulated_without_the_lost_worker_stays_in_the_gradient() -> None:
    driver, sent = sender()
    driver.handle(MicrobatchSent(FORWARD, train_key(0), sent.to, Receipt(free_slots=3)))
    driver.push(BACKWARD, gradient(sent), sent.to)
    driver.compute()
    lost = next(name for name in TWO if name != sent.to)
    without(driver, (0, 0), TWO, lost, 2)
    assert not [m for m in driver.said() if isinstance(m, MicrobatchFailed | Prepared)]
    assert driver.core.table.accumulated == {0: {0}}


def test_without_anybody_who_could_take_it_on_it_fails_at_once() -> None:
    """Left early, after its first stage, since another could take the second; now only this worker holds that."""
    driver = Driver("me")
    peers = {"b": (1, 2), "c": (2, 2)}
    driver.ready(assignment((0, 1), peers, stages=3, slots=4))
    driver.core.flow.stage_seconds = {0: 0.1, 1: 100.0}
    driver.grant(train_key(0))
    driver.compute()
    assert driver.one(SendMicrobatch).header.stage == 1
    without(driver, (0, 1), peers, "b", 3)
    (failed,) = [m for m in driver.said() if isinstance(m, MicrobatchFailed)]
    assert "nobody is left" in failed.reason


def test_microbatches_may_still_change_workers_where_the_lost_ones_span_began() -> None:
    driver = Driver("me")
    peers = {"b": (1, 2), "c": (0, 2)}
    driver.ready(assignment((0, 2), peers, stages=3, slots=4))
    without(driver, (0, 2), peers, "b", 3)
    place = driver.core.table.place
    assert place is not None
    assert place.boundaries == {1}
    driver.hear(assignment((0, 2), {"c": (0, 2), "d": (0, 2)}, stages=3, plan_version=3, step=0))
    place = driver.core.table.place
    assert place is not None
    assert place.boundaries == frozenset()


# ---------------------------------------------------------------- a second stage whose previous hop is lost

BEFORE = {"a": (0, 0), "g": (0, 0)}


def receiver(slots: int = 4) -> Driver:
    driver = Driver("me")
    driver.ready(assignment((1, 1), BEFORE, stages=2, slots=slots))
    return driver


def from_(name: str, plan_version: int = 1) -> MicrobatchHeader:
    return forward_header(train_key(0), 1, (name, 0, 0), plan_version=plan_version)


def test_a_microbatch_of_a_lost_worker_is_dropped_and_comes_again_from_another() -> None:
    driver = receiver()
    assert isinstance(driver.push(FORWARD, from_("g"), "g"), Receipt)
    without(driver, (1, 1), BEFORE, "g", 2)
    assert not [m for m in driver.said() if isinstance(m, MicrobatchFailed)]
    assert driver.core.table.doomed == {train_key(0)}, "the device works on it"
    assert refusal(driver.push(FORWARD, from_("a", 2), "a")) is Refusal.BUSY
    driver.compute()
    assert driver.one(ForgetMicrobatch).key == train_key(0)
    assert isinstance(driver.push(FORWARD, from_("a", 2), "a"), Receipt)
    driver.compute()
    driver.compute()
    assert driver.core.table.accumulated == {1: {0}}
    assert refusal(driver.push(FORWARD, from_("g"), "g")) is Refusal.STALE


def test_a_transfer_that_was_dropped_must_end_before_the_microbatch_may_come_again() -> None:
    driver = receiver()
    assert isinstance(driver.core.admit(FORWARD, from_("g"), WorkerId("g"), 0.0), Receipt)
    without(driver, (1, 1), BEFORE, "g", 2)
    assert refusal(driver.push(FORWARD, from_("a", 2), "a")) is Refusal.BUSY
    driver.handle(ArrivalAborted(FORWARD, from_("g"), WorkerId("g"), "reset"))
    assert isinstance(driver.push(FORWARD, from_("a", 2), "a"), Receipt)


def test_a_senders_old_route_is_refused_and_a_newer_plan_waited_for() -> None:
    driver = receiver()
    assert refusal(driver.push(FORWARD, from_("a", 2), "a")) is Refusal.BUSY
    without(driver, (1, 1), BEFORE, "g", 2)
    assert refusal(driver.push(FORWARD, from_("g"), "g")) is Refusal.STALE
    assert isinstance(driver.push(FORWARD, from_("a", 1), "a"), Receipt), "an older plan, but all are there"


def test_gradient_on_a_route_through_a_lost_worker_voids_the_attempt_and_is_never_added_to() -> None:
    driver = receiver()
    driver.push(FORWARD, from_("g"), "g")
    driver.compute()
    driver.compute()
    assert driver.core.table.accumulated == {1: {0}}
    without(driver, (1, 1), BEFORE, "g", 2)
    (failed,) = [m for m in driver.said() if isinstance(m, MicrobatchFailed)]
    assert failed.key == train_key(0)
    assert "g, which was lost" in failed.reason
    assert refusal(driver.push(FORWARD, from_("a", 2), "a")) is Refusal.STALE


def test_only_the_same_route_is_a_duplicate() -> None:
    driver = receiver()
    driver.push(FORWARD, from_("g"), "g")
    assert isinstance(driver.push(FORWARD, from_("g"), "g"), Duplicate)
    assert refusal(driver.push(FORWARD, from_("a"), "a")) is Refusal.STALE
    driver.compute()
    driver.compute()
    assert isinstance(driver.push(FORWARD, from_("g"), "g"), Duplicate)
    assert refusal(driver.push(FORWARD, from_("a"), "a")) is Refusal.STALE


def test_what_came_early_for_the_next_step_is_dropped_too() -> None:
    """The others have applied the step, this one is still at it when the loss is told."""
    driver = receiver()
    early = dataclasses.replace(from_("g"), key=train_key(0, step=1))
    assert isinstance(driver.push(FORWARD, early, "g"), Receipt)
    table = driver.core.table
    driver.core.flow.leave_out_absent((1, 0))
    assert early.key in table.held
    assert table.place is not None
    table.place = dataclasses.replace(table.place, workers=table.place.workers - {WorkerId("g")})
    driver.core.flow.leave_out_absent((1, 0))
    assert early.key not in table.held


def test_a_lease_cannot_begin_anew_what_is_still_under_way_on_its_old_route() -> None:
    """This worker holds all stages: it has what the lost one began, and is then granted the same microbatch."""
    driver = Driver("me")
    peers = {"g": (0, 0), "a": (0, 1)}
    driver.ready(assignment((0, 1), peers, stages=2))
    driver.push(FORWARD, from_("g"), "g")
    assert isinstance(driver.core.device.running, ComputeForward)
    without(driver, (0, 1), peers, "g", 2)
    driver.grant(train_key(0))
    (failed,) = [m for m in driver.said() if isinstance(m, MicrobatchFailed)]
    assert failed.key == train_key(0)
    driver.drain_device()
    assert not driver.core.table.accumulated
