"""Exchanges that sum up twice: what comes of the first pass decides what is contributed to the second."""

from __future__ import annotations

import pytest

from starlings_protos.messages import (
    ExchangeFailed,
    ExchangeGroup,
    ExchangeHeader,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    Prepared,
    PreparedGroup,
    Receipt,
    Refusal,
    StepRestarted,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment, train_key
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.device import belongs
from starlings_worker.core.effects import Assemble, OpenExchange, ReducePart, SendPart
from starlings_worker.core.events import (
    ExchangePrepared,
    ExchangeRefused,
    Leg,
    PartArrived,
    PartNotSent,
    PartReduced,
    PartSent,
)

A, ME = WorkerId("a"), WorkerId("me")
PAIR = ExchangeGroup("stage:0", (ExchangeMember(A, 1.0, 0.5), ExchangeMember(ME, 1.0, 0.5)))


def member() -> Driver:
    """One of two replicas of a whole model, whose codec has two passes."""
    driver = Driver("me")
    driver.passes = 2
    driver.ready(assignment((0, 0), {"a": (0, 0)}, stages=1))
    driver.grant(train_key(0))
    driver.drain_device()
    return driver


def opened(
    group: ExchangeGroup = PAIR, purpose: ExchangePurpose = ExchangePurpose.GRADIENT
) -> ExchangeOpened:
    return ExchangeOpened(0, 0, (group,), 10.0, purpose)


def part(number: int, pass_number: int, attempt: int = 0) -> ExchangeHeader:
    return ExchangeHeader(0, attempt, "stage:0", number, 1, pass_number)


def offer(driver: Driver, leg: Leg, pass_number: int) -> Admission:
    """The peer's contribution to our part, or the aggregate of its own."""
    header = part(1 if leg is Leg.CONTRIBUTION else 0, pass_number)
    answer = driver.core.admit_part(leg, header, A, driver.now_s)
    if isinstance(answer, Receipt):
        driver.handle(PartArrived(leg, header, A))
    return answer


def after_the_first_pass() -> Driver:
    """A member that has all of the first pass's parts, its own too."""
    driver = member()
    driver.hear(opened())
    driver.drain_device()
    for leg in Leg:
        offer(driver, leg, 0)
        driver.drain_device()
    return driver


def test_two_passes_step_by_step() -> None:
    driver = member()
    driver.hear(opened())
    driver.compute()
    for number in range(2):
        assert driver.one(SendPart) == SendPart(Leg.CONTRIBUTION, part(0, number), A)
        offer(driver, Leg.CONTRIBUTION, number)
        assert driver.one(ReducePart) == ReducePart(0, 0, "stage:0", number)
        driver.compute()
        assert driver.one(SendPart) == SendPart(Leg.AGGREGATE, part(1, number), A)
        offer(driver, Leg.AGGREGATE, number)
        assert driver.one(Assemble) == Assemble(0, 0, "stage:0", number)
        assert driver.said() == []
        driver.compute()
    assert driver.said() == [Prepared(0, 0, (PreparedGroup("stage:0", (0,), 99, 2.5),))]


def test_a_peer_may_be_a_pass_ahead() -> None:
    """It has our aggregate, and we do not have its yet: what it sends of the second pass is kept until we are there."""
    driver = member()
    driver.hear(opened())
    driver.drain_device()
    offer(driver, Leg.CONTRIBUTION, 0)
    driver.drain_device()
    assert isinstance(offer(driver, Leg.CONTRIBUTION, 1), Receipt)
    assert isinstance(offer(driver, Leg.CONTRIBUTION, 1), Duplicate)
    assert driver.core.device.running is None
    offer(driver, Leg.AGGREGATE, 0)
    assert driver.one(Assemble).pass_number == 0
    driver.compute()
    assert driver.one(ReducePart).pass_number == 1


def test_what_a_peer_still_needs_of_the_first_pass_is_sent_again_in_the_second() -> None:
    driver = member()
    driver.hear(opened())
    driver.drain_device()
    driver.handle(PartSent(Leg.CONTRIBUTION, part(0, 0), A))
    offer(driver, Leg.CONTRIBUTION, 0)
    driver.compute()
    aggregate = driver.one(SendPart)
    offer(driver, Leg.AGGREGATE, 0)
    driver.compute()
    driver.handle(PartNotSent(aggregate.leg, aggregate.header, A, reason="reset"))
    driver.tick(0.2)
    assert driver.one(SendPart) == aggregate
    assert aggregate.header.pass_number == 0


def test_who_adds_nothing_and_owns_nothing_may_come_last() -> None:
    """Nobody waited for it: both sums are there before it hears of the round."""
    driver = member()
    for number in range(2):
        assert isinstance(offer(driver, Leg.AGGREGATE, number), Receipt)
    driver.hear(opened(ExchangeGroup("stage:0", (ExchangeMember(A, 1.0, 1.0), ExchangeMember(ME, 0.0, 0.0)))))
    effects = driver.drain_device()
    assert not [effect for effect in effects if isinstance(effect, SendPart | ReducePart)]
    assert driver.core.training.round is not None
    assert driver.core.training.round.assembled


@pytest.mark.parametrize("early", [True, False])
def test_there_is_no_third_pass(early: bool) -> None:
    driver = member()
    if not early:
        driver.hear(opened())
    answer = driver.core.admit_part(Leg.CONTRIBUTION, part(1, 2), A, 0.0)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.MALFORMED


def test_state_is_summed_up_once() -> None:
    driver = member()
    driver.hear(opened(purpose=ExchangePurpose.STATE))
    answer = offer(driver, Leg.CONTRIBUTION, 1)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.MALFORMED


def test_a_new_attempt_begins_with_the_first_pass() -> None:
    driver = after_the_first_pass()
    offer(driver, Leg.CONTRIBUTION, 1)
    driver.hear(StepRestarted(0, 1, "somebody left"))
    driver.drain_device()
    assert len(driver.core.parts) == 0
    driver.hear(ExchangeOpened(0, 1, (PAIR,), 10.0, ExchangePurpose.GRADIENT))
    driver.compute()
    assert driver.one(SendPart) == SendPart(Leg.CONTRIBUTION, part(0, 0, attempt=1), A)
    late = driver.core.admit_part(Leg.AGGREGATE, part(0, 1), A, 0.0)
    assert isinstance(late, Rejection)
    assert late.refusal is Refusal.STALE


def test_a_peer_that_goes_silent_between_the_passes_fails_the_round_in_time() -> None:
    driver = after_the_first_pass()
    for leg, header in ((Leg.CONTRIBUTION, part(0, 0)), (Leg.AGGREGATE, part(1, 0))):
        driver.handle(PartSent(leg, header, A))
    driver.tick(10.1)
    (failed,) = (said for said in driver.said() if isinstance(said, ExchangeFailed))
    assert "the contribution of a in pass 2" in failed.reason


def test_an_outcome_of_another_pass_is_not_taken() -> None:
    assemble, reduce = Assemble(0, 0, "stage:0", 0), ReducePart(0, 0, "stage:0", 1)
    assert belongs(assemble, ExchangePrepared(0, 0, "stage:0", 1))
    assert not belongs(assemble, ExchangePrepared(0, 0, "stage:0", 0))
    assert belongs(reduce, PartReduced(0, 0, "stage:0", 1))
    assert not belongs(reduce, PartReduced(0, 0, "stage:0", 0))
    open_exchange = OpenExchange(0, 0, PAIR, ExchangePurpose.GRADIENT, 1)
    assert not belongs(open_exchange, ExchangePrepared(0, 0, "stage:0", 1))
    for effect in (assemble, reduce, open_exchange):
        assert belongs(effect, ExchangeRefused(0, 0, "stage:0", ME, "not finite"))
