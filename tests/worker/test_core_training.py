"""The step transaction: exchange rounds, early parts, new attempts, commit and apply, the average at the end."""

from __future__ import annotations

import pytest

from starlings_protos.messages import (
    ExchangeFailed,
    ExchangeGroup,
    ExchangeHeader,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    MicrobatchDone,
    Prepared,
    PreparedGroup,
    Receipt,
    Refusal,
    StateReport,
    StateWanted,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    ComputeForward,
    DigestState,
    ForgetMicrobatch,
    ForgetPart,
    OpenExchange,
    ReducePart,
    SendPart,
)
from starlings_worker.core.events import (
    Direction,
    ExchangeRefused,
    Leg,
    PartAborted,
    PartArrived,
    PartNotSent,
    PartSent,
)


def group(name: str, *members: tuple[str, float, float]) -> ExchangeGroup:
    return ExchangeGroup(
        name, tuple(ExchangeMember(WorkerId(who), weight, share) for who, weight, share in members)
    )


def opened(
    *groups: ExchangeGroup,
    step: int = 0,
    attempt: int = 0,
    purpose: ExchangePurpose = ExchangePurpose.GRADIENT,
    deadline_s: float = 10.0,
) -> ExchangeOpened:
    return ExchangeOpened(step, attempt, groups, deadline_s, purpose)


PAIR = group("stage:0", ("a", 1.0, 0.5), ("me", 1.0, 0.5))


def member(slots: int = 4) -> Driver:
    """One of two replicas of a whole model, with microbatch 0 in its gradient."""
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"a": (0, 0), "z": (0, 0)}, stages=1, slots=slots))
    driver.grant(train_key(0))
    driver.drain_device()
    return driver


def offer(
    driver: Driver,
    leg: Leg,
    part: int,
    sender: str,
    *,
    name: str = "stage:0",
    step: int = 0,
    attempt: int = 0,
) -> Admission:
    header = ExchangeHeader(step, attempt, name, part, 1)
    answer = driver.core.admit_part(leg, header, WorkerId(sender), driver.now_s)
    if isinstance(answer, Receipt):
        driver.handle(PartArrived(leg, header, WorkerId(sender)))
    return answer


def finish_pair(driver: Driver) -> None:
    """Bring a member through a whole round with "a" up to Prepared."""
    driver.hear(opened(PAIR))
    driver.drain_device()
    offer(driver, Leg.CONTRIBUTION, 1, "a")
    driver.drain_device()
    offer(driver, Leg.AGGREGATE, 0, "a")
    driver.drain_device()


COMMIT = StepCommitted(0, 0, 0.1, 0.5, 2.0, True)


def test_a_round_of_two_step_by_step() -> None:
    driver = member()
    driver.hear(opened(PAIR))
    assert driver.one(OpenExchange) == OpenExchange(0, 0, PAIR, ExchangePurpose.GRADIENT, 1)
    driver.compute()
    assert driver.one(SendPart) == SendPart(
        Leg.CONTRIBUTION, ExchangeHeader(0, 0, "stage:0", 0, 1), WorkerId("a")
    )
    offer(driver, Leg.CONTRIBUTION, 1, "a")
    assert driver.one(ReducePart) == ReducePart(0, 0, "stage:0")
    driver.compute()
    assert driver.one(SendPart) == SendPart(
        Leg.AGGREGATE, ExchangeHeader(0, 0, "stage:0", 1, 1), WorkerId("a")
    )
    offer(driver, Leg.AGGREGATE, 0, "a")
    assert driver.one(Assemble) == Assemble(0, 0, "stage:0")
    driver.compute()
    assert driver.said() == [Prepared(0, 0, (PreparedGroup("stage:0", (0,), 99, 2.5),))]
    assert driver.core.device.running is None
    driver.hear(COMMIT)
    assert driver.one(ApplyStep) == ApplyStep(0, 0.1, 0.5, True)
    driver.compute()
    assert driver.core.version == 1
    assert driver.core.training.epoch == (1, 0)


def test_alone_no_bytes_are_made() -> None:
    driver = member()
    driver.hear(opened(group("stage:0", ("me", 1.0, 1.0))))
    effects = driver.drain_device()
    assert not [effect for effect in effects if isinstance(effect, SendPart | ReducePart)]
    assert any(isinstance(effect, Assemble) for effect in effects)
    assert driver.core.training.round is not None
    assert driver.core.training.round.assembled


def test_who_contributed_nothing_only_receives_and_aggregates() -> None:
    driver = member()
    driver.hear(opened(group("stage:0", ("a", 1.0, 0.5), ("me", 0.0, 0.5))))
    driver.compute()
    assert driver.of(SendPart) == []
    offer(driver, Leg.CONTRIBUTION, 1, "a")
    driver.compute()
    assert driver.one(SendPart).leg is Leg.AGGREGATE


def test_nobody_waits_for_a_member_of_weight_zero_or_a_part_of_share_zero() -> None:
    driver = member()
    driver.hear(opened(group("stage:0", ("a", 0.0, 0.0), ("me", 1.0, 1.0))))
    effects = driver.drain_device()
    sent = [effect for effect in effects if isinstance(effect, SendPart)]
    assert [(effect.leg, effect.to) for effect in sent] == [(Leg.AGGREGATE, "a")]
    assert any(isinstance(effect, Assemble) for effect in effects)


def test_whose_own_part_is_empty_sends_no_aggregate() -> None:
    driver = member()
    driver.hear(opened(group("stage:0", ("a", 1.0, 1.0), ("me", 1.0, 0.0))))
    driver.drain_device()
    answer = offer(driver, Leg.CONTRIBUTION, 1, "a")
    assert isinstance(answer, Rejection)
    offer(driver, Leg.AGGREGATE, 0, "a")
    effects = driver.drain_device()
    assert not [effect for effect in effects if isinstance(effect, SendPart)]
    assert driver.core.training.round is not None
    assert driver.core.training.round.assembled


def test_the_tied_group_reports_no_microbatches_of_its_own() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 1), {}, stages=2))
    driver.grant(train_key(0))
    driver.drain_device()
    alone = [group(name, ("me", 1.0, 1.0)) for name in ("stage:0", "stage:1", "tied")]
    driver.hear(opened(*alone))
    driver.compute()
    while driver.core.device.running is not None:
        driver.compute()
        prepared = [message for message in driver.said() if isinstance(message, Prepared)]
    assert [(one.group, one.microbatches) for one in prepared[0].groups] == [
        ("stage:0", (0,)),
        ("stage:1", (0,)),
        ("tied", ()),
    ]


def test_parts_that_come_before_the_round_opens_are_kept() -> None:
    driver = member()
    assert isinstance(offer(driver, Leg.CONTRIBUTION, 1, "a"), Receipt)
    assert isinstance(offer(driver, Leg.AGGREGATE, 0, "a"), Receipt)
    assert isinstance(offer(driver, Leg.AGGREGATE, 0, "a"), Duplicate)
    driver.hear(opened(PAIR))
    driver.drain_device()
    assert driver.core.training.round is not None
    assert driver.core.training.round.assembled


def test_early_parts_that_have_no_place_in_the_round_are_freed() -> None:
    driver = member()
    offer(driver, Leg.CONTRIBUTION, 0, "z")
    driver.hear(opened(PAIR))
    assert driver.one(ForgetPart).sender == "z"


def test_early_parts_are_bounded() -> None:
    driver = member()
    answers = [
        offer(driver, Leg.CONTRIBUTION, 1, "a", step=step, attempt=attempt)
        for step in (0, 1)
        for attempt in range(1, 200)
    ]
    refused = [answer for answer in answers if isinstance(answer, Rejection)]
    assert refused[-1].refusal is Refusal.BUSY
    assert len(driver.core.parts) <= 24


@pytest.mark.parametrize(
    ("name", "part", "step", "refusal"),
    [
        ("stage:1", 0, 0, Refusal.NOT_HELD),
        ("stage:-0", 0, 0, Refusal.NOT_HELD),
        ("stage:99999999999999999999", 0, 0, Refusal.NOT_HELD),
        ("elsewhere", 0, 0, Refusal.NOT_HELD),
        ("stage:0", 99, 0, Refusal.MALFORMED),
        ("stage:0", 0, 5, Refusal.BUSY),
    ],
)
def test_parts_that_make_no_sense_are_refused(name: str, part: int, step: int, refusal: Refusal) -> None:
    answer = offer(member(), Leg.CONTRIBUTION, part, "a", name=name, step=step)
    assert isinstance(answer, Rejection)
    assert answer.refusal is refusal


def test_a_part_is_sent_again_until_it_is_there() -> None:
    driver = member()
    driver.hear(opened(PAIR))
    driver.compute()
    sent = driver.one(SendPart)
    driver.handle(PartNotSent(sent.leg, sent.header, sent.to, reason="reset"))
    assert driver.of(SendPart) == []
    driver.tick(0.2)
    assert driver.one(SendPart) == sent
    driver.handle(PartSent(sent.leg, sent.header, sent.to))
    driver.tick(5.0)
    assert driver.of(SendPart) == []


def test_a_part_that_broke_off_may_come_again() -> None:
    driver = member()
    header = ExchangeHeader(0, 0, "stage:0", 1, 1)
    assert isinstance(driver.core.admit_part(Leg.CONTRIBUTION, header, WorkerId("a"), 0.0), Receipt)
    busy = driver.core.admit_part(Leg.CONTRIBUTION, header, WorkerId("a"), 0.0)
    assert isinstance(busy, Rejection)
    assert busy.refusal is Refusal.BUSY
    driver.handle(PartAborted(Leg.CONTRIBUTION, header, WorkerId("a"), "reset"))
    assert isinstance(offer(driver, Leg.CONTRIBUTION, 1, "a"), Receipt)


def test_a_round_that_does_not_end_is_reported_once_with_what_is_missing() -> None:
    driver = member()
    driver.hear(opened(PAIR, deadline_s=3.0))
    driver.compute()
    said = []
    for _ in range(40):
        driver.tick(0.25)
        said += [message for message in driver.said() if isinstance(message, ExchangeFailed)]
    (failed,) = said
    assert (failed.step, failed.attempt, failed.group) == (0, 0, "stage:0")
    assert "a" in failed.reason


def test_a_refused_aggregate_voids_the_attempt() -> None:
    driver = member()
    driver.hear(opened(PAIR))
    driver.compute()
    offer(driver, Leg.CONTRIBUTION, 1, "a")
    driver.handle(ExchangeRefused(0, 0, "stage:0", WorkerId("a"), "not finite"))
    (failed,) = [message for message in driver.said() if isinstance(message, ExchangeFailed)]
    assert "not finite" in failed.reason


def test_a_new_attempt_clears_everything_before_anything_of_it_is_computed() -> None:
    driver = member()
    driver.hear(opened(PAIR))
    driver.compute()
    driver.grant(train_key(1))
    driver.hear(StepRestarted(0, 1, "z was lost"))
    assert isinstance(driver.core.device.running, ComputeForward | ClearGradients)
    driver.grant(train_key(0, attempt=1))
    order = []
    while driver.core.device.running is not None:
        order.append(driver.compute())
    kinds = [type(effect) for effect in order]
    clear = kinds.index(ClearGradients)
    assert all(getattr(effect, "key").attempt == 0 for effect in order[:clear])  # noqa: B009
    assert all(getattr(effect, "key").attempt == 1 for effect in order[clear + 1 :])  # noqa: B009
    assert driver.core.table.accumulated == {0: {0}}
    driver.hear(opened(PAIR))
    assert driver.core.training.round is None
    stale = offer(driver, Leg.CONTRIBUTION, 1, "a")
    assert isinstance(stale, Rejection)
    assert stale.refusal is Refusal.STALE


def test_a_restart_that_is_news_of_the_past_changes_nothing() -> None:
    driver = member()
    driver.hear(StepRestarted(0, 0, "again"))
    assert driver.core.table.accumulated == {0: {0}}
    assert driver.of(ClearGradients) == []


def test_a_lease_of_a_higher_attempt_is_as_good_as_the_restart_itself() -> None:
    driver = member()
    driver.grant(train_key(2, attempt=3))
    assert driver.one(ClearGradients) == ClearGradients(0, 3)
    driver.compute()
    assert driver.one(ComputeForward).key == train_key(2, attempt=3)


def test_the_commit_waits_for_the_aggregate_and_comes_once() -> None:
    driver = member()
    driver.hear(opened(PAIR))
    driver.hear(COMMIT)
    driver.drain_device()
    assert driver.of(ApplyStep) == []
    offer(driver, Leg.CONTRIBUTION, 1, "a")
    offer(driver, Leg.AGGREGATE, 0, "a")
    effects = driver.drain_device()
    assert sum(isinstance(effect, ApplyStep) for effect in effects) == 1
    driver.hear(COMMIT)
    assert driver.of(ApplyStep) == []
    assert driver.core.counters["stale_messages"] == 1


def test_a_commit_of_another_attempt_is_not_applied() -> None:
    driver = member()
    finish_pair(driver)
    driver.hear(StepCommitted(0, 1, 0.1, 1.0, 1.0))
    assert driver.of(ApplyStep) == []


def test_microbatches_of_the_next_step_wait_for_the_optimizer() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2))
    driver.push(Direction.FORWARD, forward_header(train_key(0), 1, ("a", 0, 0)), "a")
    driver.drain_device()
    driver.hear(opened(group("stage:1", ("me", 1.0, 1.0))))
    driver.drain_device()
    early = forward_header(train_key(0, step=1), 1, ("a", 0, 0))
    assert isinstance(driver.push(Direction.FORWARD, early, "a"), Receipt)
    assert driver.core.device.running is None
    driver.hear(COMMIT)
    assert driver.one(ApplyStep).step == 0
    driver.compute()
    assert driver.one(ComputeForward).key == train_key(0, step=1)


def test_the_next_steps_round_and_attempt_may_be_known_before_this_step_is_applied() -> None:
    driver = member()
    finish_pair(driver)
    driver.hear(COMMIT)
    driver.hear(StepRestarted(1, 2, "somebody else was lost"))
    driver.hear(opened(group("stage:0", ("me", 1.0, 1.0)), step=1, attempt=2))
    driver.compute()
    assert driver.core.training.epoch == (1, 2)
    assert driver.one(OpenExchange).attempt == 2


def test_early_parts_of_an_attempt_that_never_was_are_freed() -> None:
    driver = member()
    finish_pair(driver)
    offer(driver, Leg.CONTRIBUTION, 1, "a", step=1, attempt=0)
    driver.hear(COMMIT)
    driver.hear(StepRestarted(1, 1, "a was lost"))
    driver.compute()
    assert driver.one(ForgetPart).header.step == 1


def test_a_restart_after_the_commit_is_for_the_next_step() -> None:
    driver = member()
    finish_pair(driver)
    driver.hear(COMMIT)
    driver.hear(StepRestarted(0, 1, "too late"))
    driver.compute()
    assert driver.core.version == 1
    assert driver.core.counters["restarts_after_commit"] == 1


def committed(driver: Driver) -> None:
    finish_pair(driver)
    driver.hear(COMMIT)
    driver.compute()


def test_the_average_at_the_end_is_adopted_only_when_the_others_have_their_parts() -> None:
    driver = member()
    committed(driver)
    driver.hear(StateWanted(1, True))
    assert driver.one(DigestState) == DigestState(1, True)
    driver.compute()
    assert driver.said() == [StateReport(1, {"embed": "v1"}, 0)]
    driver.hear(opened(PAIR, step=1, purpose=ExchangePurpose.STATE))
    driver.compute()
    contribution = driver.one(SendPart)
    offer(driver, Leg.CONTRIBUTION, 1, "a", step=1)
    driver.compute()
    aggregate = driver.one(SendPart)
    offer(driver, Leg.AGGREGATE, 0, "a", step=1)
    driver.compute()
    assert driver.of(AdoptState) == []
    driver.handle(PartSent(contribution.leg, contribution.header, contribution.to))
    driver.handle(PartSent(aggregate.leg, aggregate.header, aggregate.to))
    assert driver.one(AdoptState) == AdoptState(1, True)
    driver.compute()
    assert driver.said() == [StateReport(1, {"embed": "v1"}, 0)]


def test_a_report_names_the_attempt_that_asked_for_it() -> None:
    driver = member()
    committed(driver)
    driver.hear(StateWanted(1, False))
    driver.hear(StepRestarted(1, 1, "averaging failed"))
    driver.hear(StateWanted(1, False))
    reports = []
    while driver.core.device.running is not None:
        driver.compute()
        reports += [message.attempt for message in driver.said() if isinstance(message, StateReport)]
    assert reports == [0, 1]


def test_a_state_that_is_not_there_yet_is_reported_when_it_is() -> None:
    driver = member()
    finish_pair(driver)
    driver.hear(StateWanted(1, False))
    assert driver.of(DigestState) == []
    driver.hear(COMMIT)
    driver.compute()
    assert driver.one(DigestState) == DigestState(1, False)


def test_microbatches_and_leases_of_a_void_attempt_are_forgotten() -> None:
    driver = member(slots=1)
    driver.grant(train_key(1), train_key(2))
    driver.hear(StepRestarted(0, 1, "z was lost"))
    assert [effect.key for effect in driver.of(ForgetMicrobatch)] == [train_key(2)]
    driver.compute()
    assert [effect.key for effect in driver.of(ForgetMicrobatch)] == [train_key(1)]
    assert not [message for message in driver.said() if isinstance(message, MicrobatchDone)]
