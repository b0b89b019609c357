"""Workers that fail again and again: they wait, longer each time, and status says why."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starlings_coordinator.core.events import WorkerDisconnected, WorkerSaid
from starlings_coordinator.core.failures import FORGIVEN_AFTER_S, PATIENCE, Failures
from starlings_coordinator.core.members import MemberState
from starlings_coordinator.core.reasons import why
from starlings_protos.messages import EngineDown, WorkerId
from support.core_world import World
from support.streaming_world import lazy_world

WD = WorkerId("wd")


def test_harm_waits_at_once_and_other_failures_from_the_fifth_time_on() -> None:
    failures = Failures(30.0, 900.0)
    failures.note(WD, "it failed the others", 0.0, harmful=True)
    pause = failures.pause(WD, 10.0)
    assert pause is not None
    assert pause.until_s == 30.0
    assert pause.words == "set aside for 20 s: it failed the others"
    other = WorkerId("wx")
    waits = []
    for number in range(12):
        now_s = 1000.0 * number
        failures.note(other, "its engine ended", now_s, harmful=False)
        found = failures.pause(other, now_s)
        waits.append(found.until_s - now_s if found is not None else 0.0)
    assert waits == [0.0] * 4 + [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0]
    assert "it has failed 12 times of late" in (failures.pause(other, 11_000.0) or found).words  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=30))
def test_pauses_are_bounded_grow_while_failures_go_on_and_an_hour_forgives(
    failed: list[tuple[int, bool]],
) -> None:
    failures, now_s, before = Failures(30.0, 900.0), 0.0, 0.0
    for after_s, harmful in failed:
        forgiven = after_s > FORGIVEN_AFTER_S
        now_s += after_s
        failures.note(WD, "x", now_s, harmful=harmful)
        pause = failures.pause(WD, now_s)
        wait_s = pause.until_s - now_s if pause is not None else 0.0
        assert wait_s <= 900.0
        if not forgiven:
            assert wait_s >= min(before, 900.0) - 1e-6
        assert not harmful or wait_s >= 30.0
        before = wait_s
    assert failures.count(WD, now_s + FORGIVEN_AFTER_S + 1) == 0


def end_engine(world: World) -> None:
    fake = world.fakes[WD]
    world.say(fake, EngineDown("signal 9 (out of memory)", restarting=True))
    world.settle()


def test_an_engine_that_ends_five_times_is_not_measured_before_its_pause_is_over() -> None:
    world = lazy_world()
    for number in range(PATIENCE):
        member = world.core.members[WD]
        assert member.set_aside_until_s is None, number
        end_engine(world)
        world.tick(1.0)
    member = world.core.members[WD]
    assert (member.state, member.probe) == (MemberState.JOINING, None)
    status = {w.worker_id: w for w in world.core.status(world.now()).workers}[WD]
    assert "it has failed 5 times of late, the last time because: its engine ended: signal 9" in status.reason
    topics = {because.topic: because.text for because in why(world.core, WD, world.now()).because}
    assert "failed 5 times" in topics["failures"]
    assert world.core.phase.value == "training", "the others go on"
    assert not world.core.membership.is_measuring
    for _ in range(35):
        world.tick(1.0)
    member = world.core.members[WD]
    assert member.set_aside_until_s is None
    assert member.probe is not None
    end_engine(world)
    assert world.core.members[WD].set_aside_until_s == world.now_s + 60.0


def test_a_connection_that_ends_again_and_again_is_a_failure_where_others_count_on_it() -> None:
    world = lazy_world()
    for _ in range(PATIENCE):
        for _ in range(40):
            if WD in world.core.state.spans:
                break
            world.tick(1.0)
            for name in ("wa", "wc"):
                world.train(name)
        fake = world.fakes[WD]
        world.feed(WorkerDisconnected(fake.session, WD))
        for _ in range(4):
            world.tick(1.0)
        assert WD not in world.core.members
        world.reconnect("wd", incarnation=0)
        world.tick(1.0)
    assert "failed 5 times" in world.core.members[WD].reason
    world.feed(WorkerSaid(0, WD, EngineDown("late", True)))
    assert "failed 5 times" in world.core.members[WD].reason
