"""A worker's core without a barrier: steps of stages, staleness, stock of leases, losses, copies, the pause."""

from __future__ import annotations

import dataclasses

from starlings_job.exchange_rules import rules_for
from starlings_job.sections import TrainSection
from starlings_protos.messages import (
    Hop,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Receipt,
    Refusal,
    StateReport,
    StateWanted,
    WorkerId,
)
from starlings_protos.pair_messages import SlotClock
from starlings_protos.stream_messages import (
    JobPaused,
    LeasesReturned,
    MicrobatchVoided,
    SwarmProgress,
    TrainingPaused,
)
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_worker.core.admission import Duplicate, Rejection
from starlings_worker.core.effects import (
    ComputeBackward,
    ComputeForward,
    ForgetMicrobatch,
    SendMicrobatch,
    Settle,
    StepStages,
    TakeCopy,
)
from starlings_worker.core.events import (
    ControlReceived,
    Direction,
    DrainRequested,
    MicrobatchSent,
    SpanLoaded,
)
from starlings_worker.core.pairing.slots import StageSlots
from starlings_worker.core.streaming.rules import StreamRules

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def stream_driver(*, inner_batch: int = 2, **train: object) -> Driver:
    section = TrainSection.model_validate(
        {"schedule": "async", "batch": 8, "microbatch": 2, "inner_batch": inner_batch, "warmup": 0, **train}
    )
    return Driver("me", rules=StreamRules(section, inner_batch, 256, 100))


def lone(**settings: object) -> Driver:
    driver = stream_driver(**settings)  # type: ignore[arg-type]
    driver.ready(assignment((0, 1), {}, stages=2))
    return driver


def first_of_two(**settings: object) -> Driver:
    driver = stream_driver(**settings)  # type: ignore[arg-type]
    driver.ready(assignment((0, 0), {"b": (1, 1)}, stages=2))
    return driver


def to_b(driver: Driver, index: int) -> SendMicrobatch:
    driver.grant(train_key(index, attempt=5))
    driver.compute()
    return driver.one(SendMicrobatch)


def come_back(driver: Driver, sent: SendMicrobatch) -> None:
    """The receipt, and the gradient."""
    driver.handle(MicrobatchSent(FORWARD, sent.header.key, sent.to, Receipt()))
    header = dataclasses.replace(
        sent.header,
        stage=0,
        route=(*sent.header.route, Hop(WorkerId("b"), 1, 1)),
        loss_sum=5.0,
        target_count=32,
    )
    assert isinstance(driver.push(BACKWARD, header, "b"), Receipt)


def test_a_stage_steps_when_its_microbatches_are_added_and_before_anything_else() -> None:
    driver = lone()
    driver.grant(*(train_key(index, step=3, attempt=7) for index in range(3)))
    done = [type(driver.compute()) for _ in range(5)]
    assert done == [ComputeForward, ComputeBackward, ComputeForward, ComputeBackward, StepStages]
    stream = driver.core.stream
    assert stream is not None
    assert stream.steps == {0: 1, 1: 1}
    assert stream.added == {0: 0, 1: 0}
    assert isinstance(driver.core.device.running, ComputeForward)


def test_a_newcomer_counts_on_from_its_donors_steps_and_else_from_the_jobs() -> None:
    driver = stream_driver()
    driver.handle(ControlReceived(assignment((0, 1), {}, stages=2, step=90)))
    driver.handle(SpanLoaded(1, 90, {}, {0: 40}))
    driver.grant(*(train_key(index, step=3, attempt=7) for index in range(2)))
    for _ in range(4):
        driver.compute()
    step = driver.one(StepStages)
    assert [(part.stage, part.number) for part in step.stages] == [(0, 41), (1, 91)]


def test_what_is_evaluated_does_not_wait_behind_a_stock_of_leases() -> None:
    driver = lone()
    driver.grant(*(train_key(index, step=3, attempt=7) for index in range(40)))
    stock = len(driver.core.table.leases)
    assert stock > 20
    looked = [MicrobatchKey(kind, 1 << 40, 0, 0) for kind in (LeaseKind.EVALUATE, LeaseKind.EVALUATE_AVERAGE)]
    driver.grant(*looked)
    order: list[MicrobatchKey] = []
    while driver.core.device.running is not None:
        effect = driver.compute()
        if not isinstance(effect, ComputeForward):
            continue
        order.append(effect.key)
        # A graph whose loss is known is gone through first, so that other weights may be looked at.
        if effect.key.kind is LeaseKind.TRAIN:
            assert isinstance(driver.core.device.running, ComputeBackward)
    assert max(map(order.index, looked)) < 20
    # Training goes on, and nothing of it was lost.
    assert len(order) == 42
    stream = driver.core.stream
    assert stream is not None
    assert stream.steps == {0: 20, 1: 20}


def test_one_worker_with_all_stages_clips_by_the_joint_norm_and_others_by_their_share() -> None:
    driver = lone(inner_batch=1)
    driver.grant(train_key(0))
    driver.compute()
    driver.compute()
    step = driver.one(StepStages)
    assert step.joint_clip_limit == 1.0
    other = first_of_two(inner_batch=1)
    other.hear(SwarmProgress(0, 0.0, 4.0))
    come_back(other, to_b(other, 0))
    other.compute()
    # Nothing is known of its own norm yet: an equal share of both stages.
    assert abs(other.one(StepStages).stages[0].clip_limit - 0.5**0.5) < 1e-12
    other.compute()
    come_back(other, to_b(other, 1))
    other.compute()
    assert other.one(StepStages).stages[0].clip_limit == 0.25


def test_palsgd_pulls_between_steps_as_often_as_its_probability_says() -> None:
    probability = 0.4
    section = TrainSection.model_validate(
        {"schedule": "async", "batch": 8, "microbatch": 2, "inner_batch": 1, "warmup": 0}
    )
    rules = StreamRules(section, 1, 256, 10**6, rules_for("palsgd", pull_probability=probability))
    driver = Driver("me", rules=rules)
    driver.ready(assignment((0, 0), {}, stages=1))
    pulls = []
    for index in range(1500):
        driver.grant(train_key(index))
        assert [type(driver.compute()) for _ in range(2)] == [ComputeForward, ComputeBackward]
        pulls.append(driver.one(StepStages).stages[0].pulls)
        driver.compute()
    # Geometric, of mean p / (1 - p) = .667 and variance p / (1 - p)^2 = 1.11: five standard errors are .136.
    assert abs(sum(pulls) / len(pulls) - probability / (1 - probability)) < 0.136
    assert max(pulls) >= 4
    assert StreamRules(section, 1, 256, 100, rules_for("pairs")).pulls(lambda: 0.0) == 0


def test_weights_are_predicted_as_far_ahead_as_microbatches_were_late() -> None:
    for correction, expected in (("none", [0.0] * 4), ("predict", [0.0, 0.1, 0.29, 0.561])):
        driver = first_of_two(inner_batch=1, max_staleness=3, correction=correction)
        sent = [to_b(driver, index) for index in range(4)]
        ahead = []
        for one in sent:
            come_back(driver, one)
            driver.compute()
            step = driver.core.device.running
            assert isinstance(step, StepStages)
            ahead.append(step.stages[0].steps_ahead)
            driver.compute()
        # Running means of 0, 1, 2, 3 steps.
        assert [round(steps, 9) for steps in ahead] == expected


def test_staleness_is_measured_and_what_is_too_old_is_passed_on_and_not_added() -> None:
    driver = first_of_two(inner_batch=1, max_staleness=1)
    # As where others lead microbatches through this worker too.
    driver.core.table.in_flight.limit = 4
    sent = [to_b(driver, index) for index in range(4)]
    unadded = []
    for one in sent:
        come_back(driver, one)
        running = driver.core.device.running
        assert isinstance(running, ComputeBackward)
        unadded.append(running.unadded_stages)
        driver.drain_device()
    assert unadded == [(), (), (0,), (0,)]
    stream = driver.core.stream
    assert stream is not None
    assert list(stream.staleness) == [0, 1, 2, 2]
    assert stream.figures() == {
        "inner_steps": 2,
        "staleness": 1.25,
        "staleness_most": 2,
        "gradients_stale": 2,
    }


def test_the_learning_rate_follows_the_swarms_tokens_also_without_news() -> None:
    driver = lone(inner_batch=1, decay="cosine", lr=1.0, lr_end=0.0)

    def rate(index: int) -> float:
        driver.grant(train_key(index))
        driver.compute()
        driver.compute()
        found = driver.one(StepStages).learning_rate
        driver.compute()
        return found

    driver.hear(SwarmProgress(50 * 256, 256.0, 1.0))
    assert abs(rate(0) - 0.5) < 0.01
    driver.tick(50.0)
    assert rate(1) < 1e-6


def test_leases_are_kept_in_store_for_the_time_of_a_lease() -> None:
    driver = lone()
    driver.grant(*(train_key(index) for index in range(4)))
    for _ in range(4):
        driver.now_s += 0.5
        driver.compute()
        driver.compute()
        if isinstance(driver.core.device.running, StepStages):
            driver.compute()
    driver.tick(0.5)
    stream = driver.core.stream
    assert stream is not None
    assert 900 <= stream._table.stock <= 1200
    wishes = [m.count for m in driver.said() if isinstance(m, LeaseRequest)]
    assert all(count >= 500 for count in wishes)


def test_what_came_through_a_lost_worker_is_dropped_and_what_went_to_it_goes_to_another() -> None:
    driver = stream_driver()
    plan = assignment((1, 1), {"a": (0, 0), "b": (2, 2), "c": (2, 2), "d": (0, 0)}, stages=3)
    driver.ready(plan)
    first, second = train_key(0, attempt=1), train_key(1, attempt=2)
    driver.push(FORWARD, forward_header(first, 1, ("a", 0, 0)), "a")
    driver.compute()
    to_lost = driver.one(SendMicrobatch)
    driver.push(FORWARD, forward_header(second, 1, ("d", 0, 0)), "d")
    driver.compute()
    left = {to_lost.to: None, WorkerId("d"): None}
    peers = {"a": (0, 0), "b": (2, 2), "c": (2, 2), "d": (0, 0)}
    for name in left:
        del peers[name]
    driver.hear(assignment((1, 1), peers, stages=3, plan_version=2, step=9))
    assert [s.to for s in driver.of(SendMicrobatch)] == [WorkerId(name) for name in peers if name != "a"]
    assert second not in driver.core.table.held
    assert first in driver.core.table.held
    assert not any(isinstance(fact, MicrobatchFailed) for fact in driver.core.outbox.facts.values())


def test_a_voided_microbatch_is_dropped_and_refused_from_then_on() -> None:
    driver = stream_driver()
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2))
    key = train_key(0, attempt=1)
    header = forward_header(key, 1, ("a", 0, 0))
    driver.push(FORWARD, header, "a")
    driver.hear(MicrobatchVoided((key,)))
    driver.drain_device()
    assert key not in driver.core.table.held
    answer = driver.push(FORWARD, header, "a")
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.STALE


def test_what_was_added_here_is_a_duplicate_on_the_same_route_and_taken_again_on_another() -> None:
    driver = stream_driver()
    driver.ready(assignment((1, 1), {"a": (0, 0), "b": (0, 0)}, stages=2))
    key = train_key(0, attempt=1)
    driver.push(FORWARD, forward_header(key, 1, ("a", 0, 0)), "a")
    driver.drain_device()
    back = MicrobatchSent(BACKWARD, key, WorkerId("a"), Receipt())
    driver.handle(back)
    assert isinstance(driver.push(FORWARD, forward_header(key, 1, ("a", 0, 0)), "a"), Duplicate)
    assert isinstance(driver.push(FORWARD, forward_header(key, 1, ("b", 0, 0)), "b"), Receipt)
    driver.drain_device()
    assert driver.core.counters["added_again"] == 1


def test_a_copy_is_taken_while_training_goes_on() -> None:
    driver = lone()
    driver.grant(train_key(0))
    driver.hear(StateWanted(4, snapshot=True))
    driver.compute()
    assert driver.core.device.running == TakeCopy(4)
    driver.compute()
    assert [m for m in driver.said() if isinstance(m, StateReport)] == [StateReport(4, {"embed": "v4"})]
    assert isinstance(driver.core.device.running, ComputeBackward)


def test_the_pause_drops_training_and_everything_goes_on_as_after_a_commit() -> None:
    driver = lone()
    driver.grant(train_key(0), train_key(1))
    driver.hear(TrainingPaused(6, 2))
    assert [f.key for f in driver.of(ForgetMicrobatch)] == [train_key(1)]
    driver.compute()
    assert driver.core.device.running == Settle(6)
    driver.compute()
    assert (driver.core.version, driver.core.training.epoch) == (6, (6, 2))
    driver.hear(StateWanted(6, snapshot=True))
    driver.compute()
    reports = [m for m in driver.said() if isinstance(m, StateReport)]
    assert reports == [StateReport(6, {"embed": "v6"}, 2)]


def test_who_leaves_gives_back_what_it_has_not_begun() -> None:
    driver = stream_driver()
    driver.ready(assignment((0, 1), {"b": (0, 1)}, stages=2, slots=1))
    keys = [train_key(index, attempt=3) for index in range(3)]
    driver.grant(*keys)
    driver.handle(DrainRequested("ctrl-c", 60.0))
    assert [m for m in driver.said() if isinstance(m, LeasesReturned)] == [LeasesReturned(tuple(keys[1:]))]
    driver.compute()
    driver.compute()
    assert [m.key for m in driver.said() if isinstance(m, MicrobatchDone)] == [keys[0]]


def test_another_plan_with_the_same_base_loads_nothing() -> None:
    driver = lone()
    driver.grant(train_key(0))
    driver.hear(assignment((0, 1), {"b": (0, 1)}, stages=2, plan_version=2, step=50, attempt=0))
    driver.compute()
    assert isinstance(driver.core.device.running, ComputeBackward)
    newer = assignment((0, 1), {}, stages=2, plan_version=3, step=40)
    driver.hear(dataclasses.replace(newer, base_plan_version=3))
    assert not driver.core.loaded


# ------------------------------------------------------------------ a pause by the owner


def test_in_a_pause_nothing_begins_what_is_under_way_ends_and_the_rest_is_given_back() -> None:
    driver = first_of_two()
    sent = to_b(driver, 0)
    driver.grant(*(train_key(index, attempt=5) for index in range(1, 40)))
    waiting, begun = set(driver.core.table.leases), driver.core.table.own_count
    assert waiting
    driver.hear(JobPaused(True, "lunch"))
    assert [set(m.keys) for m in driver.said() if isinstance(m, LeasesReturned)] == [waiting]
    assert not driver.core.table.leases
    assert driver.core.table.wish() == 0
    # What was on its way here when it began is given back, too.
    driver.grant(*(train_key(index, attempt=6) for index in range(3)))
    assert [len(m.keys) for m in driver.said() if isinstance(m, LeasesReturned)] == [3]
    assert driver.core.table.own_count == begun
    come_back(driver, sent)
    said = driver.said()
    while driver.core.device.running is not None:
        driver.compute()
        said += driver.said()
    assert [m.key.index for m in said if isinstance(m, MicrobatchDone)] == [0]
    driver.hear(JobPaused(False))
    assert any(isinstance(m, LeaseRequest) for m in driver.said())
    begun = driver.core.table.own_count
    driver.grant(train_key(0, attempt=7))
    assert driver.core.table.own_count == begun + 1


def test_a_pause_is_nobodys_pace() -> None:
    driver = lone(inner_batch=1)
    stream = driver.core.stream
    assert stream is not None
    for index in range(6):
        driver.now_s += 1.0
        driver.grant(train_key(index, attempt=5))
        for _ in range(3):
            driver.compute()
    stock = driver.core.table.stock  # type: ignore[attr-defined]
    driver.hear(JobPaused(True))
    driver.now_s += 7200.0
    driver.hear(JobPaused(False))
    for index in range(2):
        driver.now_s += 1.0
        driver.grant(train_key(index, attempt=6))
        for _ in range(3):
            driver.compute()
    assert driver.core.table.stock > stock / 2  # type: ignore[attr-defined]


def test_no_slot_is_taken_in_a_pause_and_those_that_were_missed_never() -> None:
    slots = StageSlots()
    assert slots.told(SlotClock(0, 5, 1.0, 10.0, 1, False), 100.0)
    assert slots.due(101.5) == 5
    slots.taken = 5
    slots.hold(True, 102.0)
    assert slots.due(150.0) is None
    slots.hold(True, 150.0)
    slots.hold(False, 152.0)
    assert slots.due(152.0) is None
    assert slots.next_slot(152.0) == 11
    assert slots.due(161.5) == 11
