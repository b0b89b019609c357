"""A late joiner's core: load, replay, say so, be admitted; and everything that can go wrong on the way."""

from __future__ import annotations

import dataclasses

import pytest

from starlings_protos.messages import (
    KEEPER,
    Assignment,
    CatchUpFailed,
    ExchangeGroup,
    ExchangeHeader,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    Peer,
    Prepared,
    Ready,
    Receipt,
    Refusal,
    Retain,
    Standby,
    StateWanted,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_worker.core.admission import Rejection
from starlings_worker.core.effects import (
    ApplyStep,
    ComputeForward,
    DigestState,
    KeepHistory,
    Load,
    OpenExchange,
    ReplayStep,
    Stop,
    UpdatePeers,
)
from starlings_worker.core.events import (
    Direction,
    DrainRequested,
    Leg,
    LoadFailed,
    ReplayFailed,
    SpanLoaded,
    StepReplayed,
)
from starlings_worker.core.observing import STEPS_BEHIND_AT_MOST

A, Z = WorkerId("a"), WorkerId("z")


def observing(version: int = 5, **changes: object) -> Assignment:
    plan = assignment(
        (1, 1), {"a": (0, 1), "z": (1, 1)}, stages=2, step=version, plan_version=3, observer=True
    )
    return dataclasses.replace(plan, **{"donors": (Peer(A), Peer(Z)), **changes})


def holding(version: int, attempt: int = 0) -> Assignment:
    plan = assignment(
        (1, 1), {"a": (0, 1), "z": (1, 1)}, stages=2, step=version, attempt=attempt, plan_version=4
    )
    return dataclasses.replace(plan, donors=(Peer(KEEPER),))


def commit(step: int, attempt: int = 0) -> StepCommitted:
    return StepCommitted(step, attempt, 0.1 + step, 0.5, 2.0, snapshot=False)


def observer(version: int = 5) -> Driver:
    driver = Driver("me")
    driver.ready(observing(version))
    return driver


def caught_up(version: int) -> Ready:
    """After the replay of step `version` - 1 by the driver's obedient device."""
    return Ready(3, version, {}, {"stage:0": 98 + version})


def test_an_observer_loads_and_says_that_nothing_is_left_to_replay() -> None:
    driver = Driver("me")
    driver.hear(observing())
    assert driver.one(Load).assignment.version == 5
    driver.compute()
    assert driver.said() == [Ready(3, 5, {}, {})]
    assert driver.core.version == 5


def test_commits_are_replayed_in_order_and_reported_when_the_queue_is_empty() -> None:
    driver = Driver("me")
    driver.hear(observing())
    for step in (5, 6, 7):
        assert driver.hear(commit(step)) == []
    driver.compute()
    assert driver.said() == []
    for step in (5, 6, 7):
        assert driver.one(ReplayStep) == ReplayStep(step, 0.1 + step, 0.5)
        driver.compute()
        assert driver.core.version == step + 1
    assert driver.said() == [caught_up(8)]
    driver.hear(commit(8))
    driver.compute()
    assert driver.said() == [caught_up(9)]


def test_an_observer_takes_no_part() -> None:
    driver = observer()
    driver.hear(StateWanted(5, snapshot=True))
    driver.hear(StepRestarted(5, 1, ""))
    pair = ExchangeGroup("stage:1", (ExchangeMember(A, 1.0, 0.5), ExchangeMember(WorkerId("me"), 1.0, 0.5)))
    driver.hear(ExchangeOpened(5, 0, (pair,), 9.0, ExchangePurpose.GRADIENT))
    assert not driver.of(OpenExchange)
    assert not driver.of(DigestState)
    answer = driver.push(Direction.FORWARD, forward_header(train_key(0, step=5), 1, ("a", 0, 0)), "a")
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.NOT_HELD
    driver.tick(10)
    assert not [m for m in driver.said() if isinstance(m, LeaseRequest)]


def test_one_that_has_replayed_everything_becomes_a_holder_without_a_load() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.compute()
    driver.hear(holding(6))
    assert driver.of(UpdatePeers)
    assert not driver.of(Load)
    assert driver.core.training.epoch == (6, 0)
    assert not driver.core.observing.active
    answer = driver.push(
        Direction.FORWARD, forward_header(train_key(0, step=6), 1, ("a", 0, 0), plan_version=4), "a"
    )
    assert isinstance(answer, Receipt)
    assert driver.one(ComputeForward).first_stage == 1


def test_one_that_is_a_replay_behind_waits_like_a_holder_whose_optimizer_has_not_run() -> None:
    driver = observer()
    driver.hear(commit(5, attempt=2))
    assert driver.one(ReplayStep).step == 5
    driver.hear(holding(6))
    assert not driver.of(Load)
    assert driver.core.version == 5
    header = forward_header(train_key(0, step=6), 1, ("a", 0, 0), plan_version=4)
    assert isinstance(driver.push(Direction.FORWARD, header, "a"), Receipt)
    assert not driver.of(ComputeForward)
    members = (ExchangeMember(A, 1.0, 0.5), ExchangeMember(WorkerId("me"), 1.0, 0.5))
    driver.hear(ExchangeOpened(6, 0, (ExchangeGroup("stage:1", members),), 9.0, ExchangePurpose.GRADIENT))
    assert not driver.of(OpenExchange)
    driver.compute()  # The replay.
    assert driver.core.version == 6
    assert driver.core.training.epoch == (6, 0)
    assert not [m for m in driver.said() if isinstance(m, Ready)]
    # What had come early goes on at once: first the exchange, then the microbatch.
    assert driver.one(OpenExchange).step == 6
    driver.compute()
    assert driver.one(ComputeForward).key == train_key(0, step=6)


def test_a_new_attempt_while_the_last_replay_runs_is_remembered() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.hear(holding(6))
    driver.hear(StepRestarted(6, 1, "a worker was lost"))
    again = dataclasses.replace(holding(6, attempt=2), plan_version=5)
    driver.hear(again)
    assert not driver.of(Load)
    driver.compute()
    assert driver.core.training.epoch == (6, 2)
    assert driver.core.version == 6


def test_a_holder_of_other_weights_than_the_observer_has_loads() -> None:
    driver = observer()
    driver.hear(holding(7))
    assert driver.one(Load).assignment.version == 7


@pytest.mark.parametrize("loaded", [False, True])
def test_other_donors_for_the_same_base_are_only_noted(loaded: bool) -> None:
    driver = Driver("me")
    driver.hear(observing())
    if loaded:
        driver.compute()
    driver.hear(commit(5))
    driver.hear(observing(donors=(Peer(Z),), plan_version=4))
    assert not driver.of(Load)
    assert driver.one(UpdatePeers).assignment.donors == (Peer(Z),)
    driver.drain_device()
    assert driver.core.version == 6


def test_a_newer_base_is_loaded_and_the_old_one_forgotten() -> None:
    driver = Driver("me")
    first = observing()
    driver.hear(first)
    driver.hear(commit(5))
    driver.hear(observing(9))
    driver.handle(SpanLoaded(3, 5, {}))
    assert driver.one(Load).assignment.version == 9
    assert driver.said() == []
    driver.compute()
    assert driver.said() == [Ready(3, 9, {}, {})]


def test_a_replay_of_an_earlier_base_does_not_count() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.hear(observing(5, plan_version=4, span=assignment((0, 1), {}, stages=2).span))
    driver.handle(StepReplayed(5, {}))
    assert driver.one(Load)
    assert driver.core.version == 5


def test_a_gap_in_the_commits_is_a_failure_and_the_place_is_left() -> None:
    driver = observer()
    driver.hear(commit(7))
    (said,) = driver.said()
    assert isinstance(said, CatchUpFailed)
    assert (said.version, "5 to 6" in said.reason) == (5, True)
    assert driver.core.assignment is None
    # The coordinator had not heard of it when it named other donors.
    assert driver.hear(observing(donors=(Peer(Z),))) == []
    driver.hear(observing(8))
    assert driver.one(Load).assignment.version == 8


def test_commits_heard_twice_count_once() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.hear(commit(5))
    driver.hear(commit(4))
    driver.drain_device()
    assert driver.core.version == 6


def test_a_lost_update_is_a_failure() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.hear(commit(6))
    driver.handle(ReplayFailed(5, "the donors keep 9 to 30"))
    assert driver.said() == [CatchUpFailed(5, "the donors keep 9 to 30")]
    assert driver.core.device.running is None


def test_a_load_that_fails_is_not_tried_again_at_that_version() -> None:
    driver = Driver("me")
    driver.hear(observing())
    driver.handle(LoadFailed(3, "no donor answers"))
    assert driver.said() == [CatchUpFailed(5, "no donor answers")]
    driver.tick(60)
    assert driver.core.device.running is None


def test_further_behind_than_donors_keep_is_hopeless_also_while_loading() -> None:
    driver = Driver("me")
    driver.hear(observing())
    for step in range(5, 5 + STEPS_BEHIND_AT_MOST):
        assert driver.hear(commit(step)) == []
    driver.hear(commit(5 + STEPS_BEHIND_AT_MOST))
    assert isinstance(driver.said()[0], CatchUpFailed)


def test_a_replay_that_fails_after_the_admission_is_said_too() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.hear(holding(6))
    driver.handle(ReplayFailed(5, "no donor answers"))
    assert driver.said() == [CatchUpFailed(5, "no donor answers")]
    assert not driver.core.loaded


def test_what_comes_under_a_newer_plan_is_asked_for_again() -> None:
    """A newcomer may know of its admission before its peers do."""
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 1)}, stages=2, step=5, plan_version=3))
    header = forward_header(train_key(0, step=5), 1, ("new", 0, 0), plan_version=4)
    answer = driver.push(Direction.FORWARD, header, "new")
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.BUSY
    part = driver.core.admit_part(Leg.AGGREGATE, ExchangeHeader(5, 0, "stage:1", 2, 4), WorkerId("new"), 0.0)
    assert isinstance(part, Rejection)
    assert part.refusal is Refusal.BUSY


def test_standby_ends_it() -> None:
    driver = observer()
    driver.hear(commit(5))
    driver.hear(Standby("the job is finishing"))
    driver.handle(StepReplayed(5, {}))
    assert driver.core.assignment is None
    assert driver.said() == []


def test_an_observer_leaves_at_once() -> None:
    driver = observer()
    driver.handle(DrainRequested("SIGTERM received", 60.0))
    assert [m for m in driver.said() if isinstance(m, Leaving)]
    assert driver.one(Stop).drained


def test_a_donor_keeps_what_it_is_told_to() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {}, stages=1))
    assert driver.hear(Retain((4,), True, 4)) == [KeepHistory((4,), 4)]
    assert driver.hear(Retain()) == [KeepHistory((), None)]


def test_the_newcomer_trains_like_anyone() -> None:
    """From its first step on: forward, backward, exchange, prepared, applied."""
    driver = observer()
    driver.hear(commit(5))
    driver.hear(holding(6))
    driver.compute()
    header = forward_header(train_key(0, step=6), 1, ("a", 0, 0), plan_version=4)
    assert isinstance(driver.push(Direction.FORWARD, header, "a"), Receipt)
    driver.drain_device()
    alone = ExchangeGroup("stage:1", (ExchangeMember(WorkerId("me"), 1.0, 1.0),))
    driver.hear(ExchangeOpened(6, 0, (alone,), 9.0, ExchangePurpose.GRADIENT))
    driver.drain_device()
    (prepared,) = [m for m in driver.said() if isinstance(m, Prepared)]
    assert prepared.groups[0].microbatches == (0,)
    assert not [m for m in driver.said() if isinstance(m, MicrobatchDone)]
    driver.hear(commit(6))
    assert driver.one(ApplyStep).step == 6
    driver.compute()
    assert driver.core.version == 7
