"""Microbatches through one worker: priorities, routing, re-sends, failures, telemetry."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from starlings_protos.messages import (
    Hop,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchHeader,
    MicrobatchKey,
    PeerUnreachable,
    Receipt,
    Refusal,
    StepRestarted,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_worker.core.admission import Duplicate, Rejection
from starlings_worker.core.effects import (
    ComputeBackward,
    ComputeForward,
    ForgetMicrobatch,
    SendMicrobatch,
)
from starlings_worker.core.events import (
    BackwardComputed,
    ComputeFailed,
    Direction,
    MicrobatchArrived,
    MicrobatchNotSent,
    MicrobatchSent,
)

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def first_of_two(slots: int = 4, peers: dict[str, tuple[int, int]] | None = None) -> Driver:
    driver = Driver("me")
    driver.ready(assignment((0, 0), peers or {"b": (1, 1)}, stages=2, slots=slots))
    return driver


def send_one(driver: Driver, index: int = 0) -> SendMicrobatch:
    """A lease up to the moment its output goes out."""
    driver.grant(train_key(index))
    if not isinstance(driver.core.device.running, ComputeForward):
        raise AssertionError("no forward runs")
    driver.compute()
    return driver.one(SendMicrobatch)


def back_header(sent: SendMicrobatch, *more: tuple[str, int, int]) -> MicrobatchHeader:
    hops = tuple(Hop(WorkerId(name), first, last) for name, first, last in more)
    return dataclasses.replace(
        sent.header,
        stage=sent.header.stage - 1,
        route=(*sent.header.route, *hops),
        loss_sum=5.0,
        target_count=9,
    )


def test_a_whole_model_runs_forward_and_backward_and_is_reported() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 1), {}, stages=2))
    driver.grant(train_key(0))
    assert driver.one(ComputeForward) == ComputeForward(train_key(0), 0, 1, 64.0)
    driver.compute(loss_sum=3.5)
    assert driver.one(ComputeBackward).key == train_key(0)
    driver.compute()
    done = [message for message in driver.said() if isinstance(message, MicrobatchDone)]
    assert done == [MicrobatchDone(train_key(0), (Hop(WorkerId("me"), 0, 1),), 3.5, 32)]
    assert driver.one(ForgetMicrobatch).key == train_key(0)
    assert driver.core.table.accumulated == {0: {0}, 1: {0}}


def test_a_lease_goes_out_comes_back_and_is_done() -> None:
    driver = first_of_two()
    sent = send_one(driver)
    assert sent.header == MicrobatchHeader(train_key(0), 1, (Hop(WorkerId("me"), 0, 0),), 64.0, 1)
    driver.handle(MicrobatchSent(FORWARD, train_key(0), WorkerId("b"), Receipt()))
    assert isinstance(driver.push(BACKWARD, back_header(sent, ("b", 1, 1)), "b"), Receipt)
    assert driver.compute() == ComputeBackward(train_key(0))
    (done,) = [message for message in driver.said() if isinstance(message, MicrobatchDone)]
    assert (done.loss_sum, done.target_count) == (5.0, 9)
    assert [hop.worker_id for hop in done.route] == ["me", "b"]


def test_in_the_middle_the_gradient_goes_back_to_the_hop_before() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0), "c": (2, 2)}, stages=3))
    driver.push(FORWARD, forward_header(train_key(3), 1, ("a", 0, 0)), "a")
    driver.compute()
    sent = driver.one(SendMicrobatch)
    assert sent.to == "c"
    driver.handle(MicrobatchSent(FORWARD, train_key(3), WorkerId("c"), Receipt()))
    driver.push(BACKWARD, back_header(sent, ("c", 2, 2)), "c")
    driver.compute()
    back = driver.one(SendMicrobatch)
    assert (back.direction, back.to, back.header.stage) == (BACKWARD, "a", 0)
    assert back.header.loss_sum == 5.0
    driver.handle(MicrobatchSent(BACKWARD, train_key(3), WorkerId("a"), Receipt()))
    assert driver.one(ForgetMicrobatch).key == train_key(3)


def test_the_gradient_may_overtake_the_receipt() -> None:
    driver = first_of_two()
    sent = send_one(driver)
    assert isinstance(driver.push(BACKWARD, back_header(sent, ("b", 1, 1)), "b"), Receipt)
    driver.compute()
    driver.handle(MicrobatchNotSent(FORWARD, train_key(0), WorkerId("b"), False, reason="reset"))
    assert driver.effects == []
    assert driver.core.table.accumulated == {0: {0}}


def test_backward_goes_before_forward_and_deeper_before_shallower() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 1), {"a": (0, 0), "c": (2, 2)}, stages=3, slots=8))
    driver.grant(train_key(0))
    driver.compute()
    sent = driver.one(SendMicrobatch)
    driver.handle(MicrobatchSent(FORWARD, train_key(0), WorkerId("c"), Receipt()))
    driver.grant(train_key(1), train_key(2))
    driver.push(FORWARD, forward_header(train_key(3), 1, ("a", 0, 0)), "a")
    driver.push(BACKWARD, back_header(sent, ("c", 2, 2)), "c")
    order = []
    while driver.core.device.running is not None:
        order.append(driver.compute())
    assert order == [
        ComputeForward(train_key(1), 0, 1, 64.0),
        ComputeBackward(train_key(0)),
        ComputeForward(train_key(3), 1, 1, 64.0),
        ComputeForward(train_key(2), 0, 1, 64.0),
    ]


def test_refused_for_lack_of_room_another_holder_gets_it_at_once() -> None:
    driver = first_of_two(peers={"b": (1, 1), "c": (1, 1)})
    sent = send_one(driver)
    driver.handle(MicrobatchNotSent(FORWARD, train_key(0), sent.to, True, Refusal.BUSY))
    again = driver.one(SendMicrobatch)
    assert {sent.to, again.to} == {"b", "c"}
    assert again.header == sent.header
    driver.handle(MicrobatchNotSent(FORWARD, train_key(0), again.to, True, Refusal.BUSY))
    assert driver.of(SendMicrobatch) == []


@pytest.mark.parametrize(("leases", "to"), [(1, "leader"), (3, "helper")])
def test_who_is_slow_hands_on_to_the_fastest_and_with_work_waiting_to_a_helper(leases: int, to: str) -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 1), {"helper": (1, 1), "leader": (0, 1)}, stages=2))
    driver.core.flow.stage_seconds.update({0: 0.01, 1: 10.0})
    helper = driver.core.peers.states[WorkerId("helper")]
    helper.backlog_s, helper.heard_at_s = 5.0, driver.now_s
    for index in range(leases):
        driver.grant(train_key(index))
    # The first began before anything waited.
    for _ in range(min(leases, 2)):
        driver.compute()
    assert driver.of(SendMicrobatch)[-1].to == to


def test_with_everybody_full_the_tries_get_rarer_and_a_returned_gradient_allows_one_at_once() -> None:
    driver = first_of_two()
    first = send_one(driver, 0)
    driver.handle(MicrobatchSent(FORWARD, train_key(0), WorkerId("b"), Receipt()))
    send_one(driver, 1)
    tries = []
    for _ in range(400):
        for sent in driver.of(SendMicrobatch):
            tries.append(driver.now_s)
            driver.handle(MicrobatchNotSent(FORWARD, sent.header.key, sent.to, True, Refusal.BUSY))
        driver.tick(0.01)
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert len(tries) < 20
    driver.push(BACKWARD, back_header(first, ("b", 1, 1)), "b")
    assert driver.one(SendMicrobatch).header.key == train_key(1)


def test_wake_at_names_the_next_retry() -> None:
    driver = first_of_two()
    sent = send_one(driver)
    driver.now_s = 1.0
    driver.handle(MicrobatchNotSent(FORWARD, train_key(0), sent.to, True, Refusal.BUSY))
    wake_at_s = driver.core.wake_at_s
    assert wake_at_s is not None
    assert 1.0 < wake_at_s < 1.1
    driver.tick(wake_at_s - 1.0)
    assert driver.one(SendMicrobatch).to == "b"


def test_a_transfer_of_unknown_fate_is_repeated_to_the_same_peer_only() -> None:
    driver = first_of_two(peers={"b": (1, 1), "c": (1, 1)})
    sent = send_one(driver)
    driver.handle(MicrobatchNotSent(FORWARD, train_key(0), sent.to, False, reason="reset"))
    assert driver.of(SendMicrobatch) == []
    driver.tick(0.2)
    assert driver.one(SendMicrobatch).to == sent.to
    driver.handle(MicrobatchNotSent(FORWARD, train_key(0), sent.to, True, Refusal.BUSY))
    driver.tick(0.2)
    assert driver.one(SendMicrobatch).to == sent.to


def test_a_fate_that_stays_unknown_is_for_the_coordinator_to_settle() -> None:
    driver = first_of_two()
    sent = send_one(driver)
    said: list[object] = []
    for _ in range(driver.core.timings.ambiguous_tries):
        driver.handle(MicrobatchNotSent(FORWARD, train_key(0), sent.to, False, reason="reset"))
        said += driver.said()
        driver.tick(5.0)
        said += driver.said()
    assert any(isinstance(message, PeerUnreachable) and message.worker_id == "b" for message in said)
    assert any(isinstance(message, MicrobatchFailed) and message.key == train_key(0) for message in said)
    assert not driver.core.table.held


def test_an_unreachable_stage_is_given_up_after_a_while_and_said_once() -> None:
    driver = first_of_two()
    sent = send_one(driver)
    said: list[object] = []
    for _ in range(100):
        driver.handle(MicrobatchNotSent(FORWARD, train_key(0), sent.to, True, reason="no route"))
        said += driver.said()
        for _ in range(20):
            driver.tick(0.25)
            said += driver.said()
            if driver.of(SendMicrobatch):
                break
        if not driver.core.table.held:
            break
    assert 20.0 <= driver.now_s < 40.0
    assert sum(isinstance(message, MicrobatchFailed) for message in said) == 1
    assert sum(isinstance(message, PeerUnreachable) for message in said) <= 2
    told = [type(message) for message in said if not isinstance(message, LeaseRequest)]
    assert told[-2:] == [PeerUnreachable, MicrobatchFailed]


def test_a_failed_computation_is_reported_and_its_slot_freed() -> None:
    driver = first_of_two()
    driver.grant(train_key(0))
    driver.handle(ComputeFailed(train_key(0), "out of memory"))
    (failed,) = [message for message in driver.said() if isinstance(message, MicrobatchFailed)]
    assert failed == MicrobatchFailed(train_key(0), "out of memory")
    assert not driver.core.table.held
    driver.grant(train_key(0))
    assert not driver.core.table.held


def test_a_gradient_that_comes_another_way_is_refused() -> None:
    driver = first_of_two(peers={"b": (1, 1), "c": (1, 1)})
    sent = send_one(driver)
    other = "c" if sent.to == "b" else "b"
    answer = driver.push(BACKWARD, back_header(sent, (other, 1, 1)), other)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.MALFORMED
    assert isinstance(driver.push(BACKWARD, back_header(sent, (sent.to, 1, 1)), sent.to), Receipt)
    driver.drain_device()
    assert isinstance(driver.push(BACKWARD, back_header(sent, (sent.to, 1, 1)), sent.to), Duplicate)
    answer = driver.push(BACKWARD, back_header(sent, (other, 1, 1)), other)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.STALE


def test_forward_only_kinds_leave_a_hop_as_soon_as_they_are_sent_on() -> None:
    key = MicrobatchKey(LeaseKind.EVALUATE, 1, 0, 5)
    driver = first_of_two()
    driver.grant(key)
    driver.compute()
    assert driver.one(SendMicrobatch).header.key == key
    driver.handle(MicrobatchSent(FORWARD, key, WorkerId("b"), Receipt()))
    assert driver.one(ForgetMicrobatch).key == key
    assert not driver.core.table.held


def test_the_last_holder_reports_forward_only_kinds_itself() -> None:
    key = MicrobatchKey(LeaseKind.GENERATE, 1, 0, 0)
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2))
    driver.push(FORWARD, forward_header(key, 1, ("a", 0, 0)), "a")
    driver.compute()
    (done,) = [message for message in driver.said() if isinstance(message, MicrobatchDone)]
    assert done.next_token == 7
    assert [hop.worker_id for hop in done.route] == ["a", "me"]
    assert driver.core.device.running is None


def test_the_wish_is_what_could_be_begun_and_is_repeated_when_nothing_comes() -> None:
    driver = Driver("me")
    driver.hear(assignment((0, 1), {"b": (1, 1)}, stages=2, slots=5))
    driver.compute()
    assert [message for message in driver.said() if isinstance(message, LeaseRequest)] == [LeaseRequest(4)]
    driver.grant(train_key(0), train_key(1), train_key(2), train_key(3))
    assert not [message for message in driver.said() if isinstance(message, LeaseRequest)]
    quiet = Driver("me")
    quiet.ready(assignment((0, 1), {"b": (1, 1)}, stages=2, slots=5))
    quiet.tick(0.5)
    assert quiet.said() == []
    quiet.tick(2.0)
    assert quiet.said() == [LeaseRequest(4)]


def test_a_single_slot_asks_for_one_lease_ahead() -> None:
    driver = Driver("me")
    driver.hear(assignment((0, 1), {}, stages=2, slots=1))
    driver.compute()
    assert LeaseRequest(2) in driver.said()
    driver.grant(train_key(0), train_key(1))
    assert len(driver.core.table.held) == 1
    assert len(driver.core.table.leases) == 1


def test_what_was_dropped_while_the_device_worked_on_it_is_forgotten_afterwards() -> None:
    driver = first_of_two()
    driver.grant(train_key(0))
    driver.hear(assignment((0, 0), {"b": (1, 1)}, stages=2, plan_version=2, step=3))
    assert not [effect for effect in driver.of(ForgetMicrobatch) if effect.key == train_key(0)]
    driver.compute()
    assert driver.one(ForgetMicrobatch).key == train_key(0)


def test_an_arrival_after_its_attempt_is_over_is_forgotten() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2))
    header = forward_header(train_key(0), 1, ("a", 0, 0))
    driver.core.admit(FORWARD, header, WorkerId("a"), 0.0)
    driver.hear(StepRestarted(0, 1, "somebody was lost"))
    driver.handle(MicrobatchArrived(FORWARD, header, WorkerId("a")))
    assert driver.one(ForgetMicrobatch).key == train_key(0)
    assert driver.core.counters["late_arrivals"] == 1


def test_outcomes_that_belong_to_nothing_are_counted_and_ignored() -> None:
    driver = first_of_two()
    driver.handle(BackwardComputed(train_key(9), 0.1))
    driver.handle(MicrobatchSent(FORWARD, train_key(9), WorkerId("b"), Receipt()))
    assert driver.core.counters["unexpected_outcomes"] == 2


@pytest.mark.parametrize("queued", [0, 3])
def test_receipts_tell_what_waits(queued: int) -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2, slots=6))
    for index in range(queued + 1):
        driver.push(FORWARD, forward_header(train_key(index), 1, ("a", 0, 0)), "a")
    receipt = driver.core.admit(FORWARD, forward_header(train_key(20), 1, ("a", 0, 0)), WorkerId("a"), 0.0)
    assert isinstance(receipt, Receipt)
    assert receipt.queued == queued
    assert receipt.free_slots == 6 - queued - 1
    assert receipt.backlog_seconds == pytest.approx(0.03 * queued)
