"""Late joining as the coordinator sees it: places, observers, donors, admission, and how each of them goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from starlings_coordinator.core.events import (
    CheckpointSaved,
    PlanComputed,
    PlannerFailed,
    StopRequested,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from starlings_coordinator.core.records import PlanAdopted, StepRecorded, StepRetried
from starlings_protos.messages import (
    KEEPER,
    Assignment,
    CatchUpFailed,
    EngineDown,
    Finish,
    Leaving,
    PlannedWorker,
    PlanReply,
    Ready,
    Retain,
    Span,
    Standby,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from support.core_world import Fake, World, config, received

PIPELINE = {"wa": (0, 1), "wb": (2, 2), "wc": (0, 2)}
LATE = WorkerId("we")


def running(spans: dict[str, tuple[int, int]] = PIPELINE, steps: int = 60, **overrides: Any) -> World:
    """A swarm that trains, paused after its first step."""
    world = World(config(job={"tokens": steps * 8 * 64}, **overrides), spans)
    world.pause_at = 1
    world.start()
    assert world.core.phase.value == "training"
    return world


def hear_out(world: World) -> None:
    """While the world is paused: what was said before is heard, answers to it are not."""
    world._queue, queued = [], world._queue
    for event in queued:
        world.feed(event)


def run_until(world: World, condition: Any, what: str) -> None:
    """Event by event, so that nothing goes on after `condition`. A step takes about half a second."""
    world.pause_at = 0
    for _ in range(600):
        for _ in range(12):
            if condition():
                return
            if not world._queue:
                break
            world.feed(world._queue.pop(0))
        world.tick(0.25)
    raise AssertionError(f"never: {what}; {world.core.state.step} steps, {world.core.waiting_words()}")


def late(world: World, span: tuple[int, int] = (1, 2), name: str = LATE, **settings: Any) -> Fake:
    """Comes while the others train, and is an observer when this returns."""
    world.spans[WorkerId(name)] = Span(*span)
    world.pause_at = 0
    fake = world.join(name, **settings)
    observers = world.core.joining.observers
    run_until(world, lambda: WorkerId(name) in observers, f"{name} observes")
    return fake


def kinds(fake: Fake) -> list[type]:
    return [type(message) for message in fake.inbox]


def retained(world: World, name: str) -> Retain:
    said = received(world.fakes[WorkerId(name)], Retain)
    return said[-1] if said else Retain()


def steps_done(world: World, count: int) -> None:
    end = world.core.state.step + count
    run_until(world, lambda: world.core.state.step >= end, f"step {end}")


def test_a_late_joiner_observes_catches_up_and_holds_while_nobody_stops() -> None:
    world = running()
    attempts = len([r for r in world.records if isinstance(r, StepRetried)])
    fake = late(world, pace="slow")
    observer = world.core.joining.observers[LATE]
    base = observer.base
    assert world.core.members[LATE].reason == f"joins stages 1-2: loading version {base}"
    (assignment,) = received(fake, Assignment)
    assert assignment.observer
    assert (assignment.version, assignment.step, assignment.attempt) == (base, base, 0)
    assert assignment.span == Span(1, 2)
    assert {p.worker_id for p in assignment.donors} == {"wa", "wb", "wc"}
    assert all(p.addresses and p.span for p in assignment.donors)
    steps_done(world, 3)
    assert LATE not in world.core.state.spans
    assert [m.step for m in received(fake, StepCommitted)] == [base, base + 1, base + 2]
    assert not any(m.snapshot for m in received(fake, StepCommitted))
    world.catch_up(fake)
    run_until(world, lambda: LATE in world.core.state.spans, "admitted")
    adopted = [r for r in world.records if isinstance(r, PlanAdopted)][-1]
    step = world.core.state.step
    assert (adopted.step, adopted.attempt, adopted.reason) == (step, 0, "we joined")
    assert dict(adopted.spans)[LATE] == Span(1, 2)
    for holder in (*world.fakes.values(),):
        last = received(holder, Assignment)[-1]
        assert (last.plan_version, last.version, last.observer) == (adopted.plan_version, step, False)
        # The commit before the plan that builds on it.
        assert kinds(holder)[::-1].index(Assignment) < kinds(holder)[::-1].index(StepCommitted)
        assert not received(holder, StepRestarted)
    assert len([r for r in world.records if isinstance(r, StepRetried)]) == attempts
    world.pause_at = None
    world.run_to_the_end()
    assert world.core.state.samples_lost == 0
    steps = [(r.step, r.attempt) for r in world.records if isinstance(r, StepRecorded)]
    assert steps == [(s, 0) for s in range(60)]
    assert fake.finished == Finish(True, "all 60 steps are trained")
    said = [e.kind for e in world.core.events]
    assert said.count("observing") == said.count("joined") == 1


def test_donors_keep_what_observers_need_and_nothing_longer() -> None:
    world = running({"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)})
    fake = late(world, pace="slow")
    base = world.core.joining.observers[LATE].base
    # The two lowest ids: told what to keep before the commit that makes the version.
    for name in ("wa", "wb"):
        donor = world.fakes[WorkerId(name)]
        assert retained(world, name) == Retain((base,), True, base)
        at = donor.inbox.index(Retain((base,), True, base))
        after = next(m for m in donor.inbox[at:] if isinstance(m, StepCommitted))
        assert (after.step, after.snapshot) == (base - 1, True)
    wc = world.fakes[WorkerId("wc")]
    assert retained(world, "wc") == Retain()
    assert not any(m.snapshot for m in received(wc, StepCommitted))
    steps_done(world, 2)
    fake.unheard, unheard = [], fake.unheard
    world.catch_up(fake)
    run_until(world, lambda: world.core.joining.observers[LATE].version == base, "loaded")
    assert retained(world, "wa") == Retain((), True, base)
    fake.unheard = [*unheard, *fake.unheard]
    fake.pace = "fast"
    world.catch_up(fake)
    run_until(world, lambda: LATE in world.core.state.spans, "admitted")
    # It may still be replaying the step before the one in which it holds.
    assert retained(world, "wa") == Retain((), True, world.core.state.step - 1)
    steps_done(world, 1)
    assert retained(world, "wa") == retained(world, "wb") == Retain()


def test_nobody_is_asked_to_join_for_the_last_steps() -> None:
    world = running(steps=3)
    world.spans[LATE] = Span(0, 2)
    fake = world.join(LATE)
    for _ in range(10):
        hear_out(world)
        world.tick()
    world.pause_at = None
    world.run_to_the_end()
    assert not received(fake, Assignment)
    assert fake.finished is not None


def test_an_observer_that_never_catches_up_ends_with_the_job() -> None:
    world = running(steps=12)
    fake = late(world, pace="slow")
    world.pause_at = None
    world.run_to_the_end()
    assert received(fake, Standby)[-1].reason.startswith("the job is ending")
    assert fake.finished == Finish(True, "all 12 steps are trained")
    assert LATE not in world.core.state.spans
    assert retained(world, "wa") == Retain()


def test_the_planner_is_asked_with_what_is_held_and_once_per_membership() -> None:
    world = running()
    asked = len(world.plan_requests)
    world.pause_at = 0
    fake = world.join(LATE)  # The planner of the test has no span for it.
    run_until(world, lambda: len(world.plan_requests) > asked, "asked")
    request = world.plan_requests[-1].request
    assert {w.worker_id: w.held for w in request.workers} == {
        **{WorkerId(w): Span(*s) for w, s in PIPELINE.items()},
        LATE: None,
    }
    assert request.stages == world.core.state.stages
    steps_done(world, 2)
    for _ in range(20):
        world.tick()
    assert len(world.plan_requests) == asked + 1
    assert received(fake, Standby)[-1].reason == "no span fits"
    assert world.core.members[LATE].reason == "no span fits"


def test_who_wants_to_leave_is_not_counted_on_if_others_hold_its_stages() -> None:
    world = running({"wa": (0, 2), "wb": (0, 2)})
    wb = world.fakes[WorkerId("wb")]
    world.pause_at = 0
    world.feed(WorkerSaid(wb.session, wb.worker_id, Leaving("SIGTERM", 60)))
    held = world.core.joining.placing._held()
    assert held == {"wa": Span(0, 2)}


@pytest.mark.parametrize("trouble", ["impossible", "other cut", "no such stage", "failed", "late"])
def test_a_planner_that_errs_costs_the_joiner_only_time(trouble: str) -> None:
    world = running()
    answers: list[Any] = []
    plan = world.plan

    def err(effect: Any) -> PlanReply:
        if answers:
            return plan(effect)
        answers.append(effect)
        number, here = effect.request.request_id, world.core.state.stages
        match trouble:
            case "impossible":
                return PlanReply(number, impossible="needs 3.1 GB more")
            case "other cut":
                return PlanReply(number, here[:1], (PlannedWorker(LATE, Span(0, 0), 2),))
            case "no such stage":
                return PlanReply(number, here, (PlannedWorker(LATE, Span(2, 9), 2),))
        return PlanReply(0)  # Nobody asked that.

    world.plan = err  # type: ignore[method-assign]
    world.spans[LATE] = Span(0, 2)
    world.pause_at = 0
    fake = world.join(LATE)
    run_until(world, lambda: answers, "asked")
    world.feed(world._queue.pop(0)) if isinstance(world._queue[0], PlanComputed) else None
    if trouble == "failed":
        world.feed(PlannerFailed(answers[0].request.request_id, "it crashed"))
    hear_out(world)
    assert LATE not in world.core.joining.observers
    if trouble == "impossible":
        assert world.core.members[LATE].reason == "needs 3.1 GB more"
    if trouble in ("failed", "late"):
        world.now_s += 130.0 if trouble == "late" else 0.0
        for member in world.core.members.values():
            member.detector.heard(world.now_s)
        run_until(world, lambda: LATE in world.core.state.spans, "asked again and joined")
    else:
        # Another try when the membership changes.
        world.join("wf")
        run_until(world, lambda: LATE in world.core.state.spans, "joined")
    assert received(fake, Assignment)


def test_a_place_among_holders_that_have_changed_is_asked_for_again() -> None:
    world = running({"wa": (0, 2), "wb": (0, 2)})
    world.spans[LATE] = Span(0, 2)
    asked = len(world.plan_requests)
    world.pause_at = 0
    world.join(LATE)
    plan, held_back = world.plan, []
    world.plan = lambda effect: held_back.append(effect) or PlanReply(0)  # type: ignore[method-assign, func-returns-value]
    run_until(world, lambda: held_back, "asked")
    wb = world.fakes[WorkerId("wb")]
    world.feed(WorkerSaid(wb.session, wb.worker_id, EngineDown("signal 9", False)))
    del world.spans[wb.worker_id]
    world.plan = plan  # type: ignore[method-assign]
    world.feed(PlanComputed(plan(held_back[0])))
    assert not world.core.joining.placing.placed
    run_until(world, lambda: LATE in world.core.state.spans, "joined")
    assert len(world.plan_requests) == asked + 2


def test_several_join_together_and_one_after_another() -> None:
    world = running()
    world.pause_at = 0
    for name in ("we", "wf"):
        world.spans[WorkerId(name)] = Span(0, 2)
        world.join(name, pace="slow")
    observers = world.core.joining.observers
    run_until(world, lambda: len(observers) == 2, "both observe")
    assert len({o.base for o in observers.values()}) == 1
    third = late(world, (2, 2), "wg")
    assert observers.keys() == {"we", "wf", "wg"}
    assert len({o.base for o in observers.values()}) == 2
    run_until(world, lambda: "wg" in world.core.state.spans, "the third holds")
    for name in ("we", "wf"):
        world.catch_up(world.fakes[WorkerId(name)])
        world.fakes[WorkerId(name)].pace = "fast"
    run_until(world, lambda: not observers, "all hold")
    assert received(third, Assignment)[-1].plan_version == world.core.state.plan_version
    world.pause_at = None
    world.run_to_the_end()
    assert world.core.state.samples_trained == 60 * 8


def test_an_observer_that_is_lost_or_leaves_is_forgotten() -> None:
    world = running()
    fake = late(world, pace="slow")
    assert retained(world, "wa") != Retain()
    world.feed(WorkerSaid(fake.session, LATE, Leaving("bored", 60)))
    assert fake.finished is not None
    assert not world.core.joining.observers
    assert retained(world, "wa") == retained(world, "wb") == retained(world, "wc") == Retain()
    again = late(world, name="wf", pace="slow")
    again.mute = True
    world.feed(WorkerDisconnected(again.session, again.worker_id))
    assert not world.core.joining.observers
    steps_done(world, 1)
    world.tick(3.0)
    assert again.worker_id not in world.core.members
    assert not world.core.joining.placing.placed


def test_an_observer_whose_stream_broke_starts_again() -> None:
    world = running()
    fake = late(world, pace="slow")
    first = world.core.joining.observers[LATE].base
    hello = world.core.members[LATE].hello
    world.feed(WorkerDisconnected(fake.session, LATE))
    steps_done(world, 1)
    world._sessions += 1
    fake.session, fake.pace = world._sessions, "fast"
    world.feed(WorkerConnected(fake.session, hello))
    assert "joins stages 1-2 from the next step on" in received(fake, Standby)[-1].reason
    run_until(world, lambda: LATE in world.core.state.spans, "joined")
    versions = [m.version for m in received(fake, Assignment) if m.observer]
    assert versions[0] == first
    assert versions[1] > first


def test_a_lost_donor_leaves_the_other_and_without_any_it_starts_again() -> None:
    world = running({"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)})
    fake = late(world, pace="slow")
    base = world.core.joining.observers[LATE].base
    wa, wb = world.fakes[WorkerId("wa")], world.fakes[WorkerId("wb")]
    world.feed(WorkerSaid(wa.session, wa.worker_id, EngineDown("signal 9", False)))
    told = received(fake, Assignment)[-1]
    assert told.observer
    assert (told.version, [p.worker_id for p in told.donors]) == (base, ["wb"])
    assert told.plan_version == world.core.state.plan_version
    assert [p.worker_id for p in told.peers] == ["wb", "wc"]
    world.feed(WorkerSaid(wb.session, wb.worker_id, EngineDown("signal 9", False)))
    assert not world.core.joining.observers
    assert "nobody keeps version" in received(fake, Standby)[-1].reason
    fake.pace = "fast"
    run_until(world, lambda: LATE in world.core.state.spans, "joined")
    assert received(fake, Assignment)[-1].version > base


def test_the_keeper_is_a_donor_of_what_it_has() -> None:
    world = running()
    fake = late(world, pace="slow")
    base = world.core.joining.observers[LATE].base
    assert KEEPER not in {p.worker_id for p in received(fake, Assignment)[-1].donors}
    world.feed(CheckpointSaved(base, f"checkpoints/{base}", 1))
    world.core.planning.reissue("for the test")
    world.tick()
    assert received(fake, Assignment)[-1].donors[-1].worker_id == KEEPER


def test_one_that_fails_to_catch_up_gets_newer_versions_and_is_then_set_aside() -> None:
    world = running()
    fake = late(world, pace="never")
    run_until(world, lambda: world.core.members[LATE].set_aside_until_s is not None, "set aside")
    versions = [m.version for m in received(fake, Assignment)]
    assert len(versions) == 3
    assert versions == sorted(set(versions))
    assert "set aside for 30 s: it could not go on from version" in received(fake, Standby)[-1].reason
    assert [e.kind for e in world.core.events].count("catch_up_failed") == 3
    assert retained(world, "wa") == Retain()
    fake.pace = "fast"
    world.now_s += 31.0
    for member in world.core.members.values():
        member.detector.heard(world.now_s)
    run_until(world, lambda: LATE in world.core.state.spans, "joined after all")


def test_a_holder_that_does_not_catch_up_after_all_holds_no_more() -> None:
    world = running()
    fake = late(world)
    run_until(world, lambda: LATE in world.core.state.spans, "admitted")
    attempt, step = world.core.state.attempt, world.core.state.step
    world.feed(WorkerSaid(fake.session, LATE, CatchUpFailed(step - 1, "the donor is gone")))
    assert LATE not in world.core.state.spans
    assert (world.core.state.step, world.core.state.attempt) == (step, attempt), "it had computed nothing yet"
    fake.observing = False
    run_until(world, lambda: LATE in world.core.state.spans, "joined in the second try")
    world.pause_at = None
    world.run_to_the_end()


def test_an_observer_with_another_update_is_dismissed_and_named() -> None:
    world = running()
    fake = late(world, pace="slow", digest_offset=1)
    steps_done(world, 2)
    world.catch_up(fake)
    run_until(world, lambda: LATE not in world.core.members, "dismissed")
    assert "its update of stage:1 in step" in world.closed[-1].message
    assert LATE not in world.core.state.spans


def test_digests_of_another_numeric_class_or_of_long_ago_accuse_nobody() -> None:
    world = running()
    fake = late(world, pace="slow", digest_offset=1, numeric_class="gpu")
    steps_done(world, 2)
    world.catch_up(fake)
    run_until(world, lambda: LATE in world.core.state.spans, "joined")


def test_donors_of_its_own_numeric_class_come_first() -> None:
    """The first bits of a joiner are its donor's, and replicas of one class are compared bit for bit."""
    world = World(config(job={"tokens": 60 * 8 * 64}), {"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)})
    world.pause_at = 1
    world.boot()
    for name, numeric_class in (("wa", "cpu"), ("wb", "cpu"), ("wc", "gpu")):
        world.join(name, numeric_class=numeric_class)
    while world.core.phase.value != "training":
        world.tick()
    late(world, (0, 2), pace="slow", numeric_class="gpu")
    assert sorted(world.core.joining.observers[LATE].donors) == ["wa", "wc"]


@pytest.mark.parametrize("version", ["ahead", "behind"])
def test_versions_that_cannot_be(version: str) -> None:
    world = running()
    fake = late(world, pace="slow")
    base = world.core.joining.observers[LATE].base
    claimed = world.core.state.step + 1 if version == "ahead" else base - 1
    world.feed(WorkerSaid(fake.session, LATE, Ready(world.core.state.plan_version, claimed, {})))
    assert (LATE in world.core.joining.observers) == (version == "behind")
    assert not received(fake, Finish)
    if version == "ahead":
        assert "does not exist yet" in world.closed[-1].message


def test_observers_stand_by_when_the_plan_ends() -> None:
    world = running({"wa": (0, 1), "wb": (2, 2)})
    fake = late(world, (1, 2), pace="slow")
    wb = world.fakes[WorkerId("wb")]
    world.feed(WorkerSaid(wb.session, wb.worker_id, EngineDown("signal 9", False)))
    assert world.core.phase.value == "gathering"
    assert "this worker is planned with" in received(fake, Standby)[-1].reason
    assert retained(world, "wa") == Retain()
    fake.pace = "fast"
    world.pause_at = None
    del world.spans[wb.worker_id]
    world.run_to_the_end()
    assert LATE in world.core.state.spans
    assert world.core.state.samples_trained == 60 * 8


def test_stopping_sends_observers_home_with_the_others() -> None:
    world = running()
    fake = late(world, pace="slow")
    world.feed(StopRequested("enough"))
    world.pause_at = None
    world.run_to_the_end()
    assert fake.finished == Finish(True, "enough")


def test_a_donor_on_a_new_stream_hears_again_what_to_keep() -> None:
    world = running()
    late(world, pace="slow")
    wa = world.fakes[WorkerId("wa")]
    want = retained(world, "wa")
    hello = world.core.members[wa.worker_id].hello
    world.feed(WorkerDisconnected(wa.session, wa.worker_id))
    wa.inbox.clear()
    world._sessions += 1
    wa.session = world._sessions
    world.feed(WorkerConnected(wa.session, hello))
    order = kinds(wa)
    assert received(wa, Retain) == [want]
    assert order.index(Retain) < order.index(StepCommitted) < order.index(Assignment)
    world.feed(WorkerSaid(world.fakes[LATE].session, LATE, Leaving("bored", 60)))
    assert received(wa, Retain)[-1] == Retain()


def test_checkpoints_are_pulled_from_who_has_copied_though_a_lower_id_joined() -> None:
    world = running({"wb": (0, 2), "wc": (0, 2)}, checkpoint={"every": 1})
    late(world, (0, 2), "wa")
    run_until(world, lambda: "wa" in world.core.state.spans, "joined")
    step, known = world.core.state.step, len(world.saves)
    run_until(world, lambda: len(world.saves) > known, "saved")
    save = next(s for s in world.saves if s.version == step)
    assert {peer.worker_id for _, peers, _ in save.donors for peer in peers} == {"wb"}
