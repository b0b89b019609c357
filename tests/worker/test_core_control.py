"""Plans, loading, leaving, and a control stream that comes and goes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from starlings_protos.messages import (
    Finish,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    PeerUnreachable,
    Ready,
    Refusal,
    Refused,
    Standby,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_worker.core.admission import Rejection
from starlings_worker.core.effects import (
    ClearGradients,
    ComputeForward,
    ForgetMicrobatch,
    Load,
    SendControl,
    SendMicrobatch,
    Stop,
    UpdatePeers,
)
from starlings_worker.core.events import (
    ControlLost,
    ControlRestored,
    Direction,
    DrainRequested,
    LoadFailed,
    MicrobatchNotSent,
    SpanLoaded,
)
from starlings_worker.core.outbox import ADVICE_AT_MOST, FACTS_AT_MOST, Outbox


def test_a_plan_is_loaded_and_reported() -> None:
    driver = Driver("me")
    plan = assignment((0, 0), {}, stages=1)
    driver.hear(plan)
    assert driver.one(Load).assignment == plan
    driver.compute()
    assert driver.said()[0] == Ready(1, 0, {"embed": "d"})


def test_a_newer_plan_of_the_same_place_only_changes_peers() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (1, 1), "c": (1, 1)}, stages=2))
    driver.grant(train_key(0))
    driver.drain_device()
    newer = assignment((0, 0), {"b": (1, 1)}, stages=2, plan_version=2, attempt=1)
    driver.hear(newer)
    assert driver.one(UpdatePeers).assignment == newer
    assert driver.one(ClearGradients).attempt == 1
    assert driver.of(Load) == []
    assert set(driver.core.peers.states) == {"b"}


@pytest.mark.parametrize("change", ["span", "version", "attempt"])
def test_anything_else_is_loaded_afresh(change: str) -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (1, 1)}, stages=2, attempt=2))
    driver.grant(train_key(0, attempt=2))
    newer = {
        "span": assignment((0, 1), {"b": (1, 1)}, stages=2, plan_version=2, attempt=3),
        "version": assignment((0, 0), {"b": (1, 1)}, stages=2, plan_version=2, step=4),
        "attempt": assignment((0, 0), {"b": (1, 1)}, stages=2, plan_version=2, attempt=1),
    }[change]
    driver.hear(newer)
    driver.compute()
    assert isinstance(driver.core.device.running, Load)
    assert not driver.core.table.held
    old = driver.core.admit(
        Direction.FORWARD, forward_header(train_key(1), 1, ("a", 0, 0)), WorkerId("a"), 0.0
    )
    assert isinstance(old, Rejection)


def test_pushes_under_an_older_plan_than_the_loaded_one_belong_to_an_earlier_life() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2, plan_version=3))
    header = forward_header(train_key(0), 1, ("a", 0, 0), plan_version=2)
    answer = driver.core.admit(Direction.FORWARD, header, WorkerId("a"), 0.0)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.STALE


def test_an_older_plan_is_ignored_and_a_repeated_one_answered() -> None:
    driver = Driver("me")
    plan = assignment((0, 0), {}, stages=1, plan_version=2)
    driver.ready(plan)
    driver.hear(assignment((0, 0), {}, stages=1, plan_version=1))
    assert driver.effects == []
    driver.hear(plan)
    assert Ready(2, 0, {"embed": "d"}) in driver.said()


def test_a_plan_that_comes_while_another_loads_is_loaded_next() -> None:
    driver = Driver("me")
    driver.hear(assignment((0, 0), {}, stages=1, plan_version=1))
    driver.hear(assignment((0, 0), {}, stages=1, plan_version=2))
    assert driver.of(Load) == []
    driver.handle(SpanLoaded(1, 0, {}))
    assert driver.one(Load).assignment.plan_version == 2
    assert driver.said() == []


def test_loading_is_tried_again_later_and_later_then_given_up() -> None:
    driver = Driver("me")
    driver.hear(assignment((0, 0), {}, stages=1))
    waits = []
    while not driver.core.stopped:
        driver.handle(LoadFailed(1, "the keeper does not answer"))
        began_s = driver.now_s
        while not driver.core.stopped and driver.core.device.running is None:
            driver.tick(0.25)
        waits.append(driver.now_s - began_s)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    stop = driver.one(Stop)
    assert not stop.done
    assert "the keeper does not answer" in stop.reason


def test_loading_is_not_given_up_while_the_coordinator_and_its_keeper_are_away() -> None:
    driver = Driver("me")
    driver.hear(assignment((0, 0), {}, stages=1))
    driver.handle(ControlLost())
    for _ in range(3 * driver.core.timings.load_tries):
        driver.handle(LoadFailed(1, "the keeper does not answer"))
        began_s = driver.now_s
        while driver.core.device.running is None:
            driver.tick(0.25)
        assert driver.now_s - began_s <= driver.core.timings.load_retry_most_s
    assert not driver.core.stopped
    driver.handle(ControlRestored())
    driver.compute()
    assert driver.core.loaded


def test_a_worker_without_a_place_in_the_plan_drops_everything() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (1, 1)}, stages=2))
    driver.grant(train_key(0))
    driver.hear(Standby("the model is held by others"))
    driver.compute()
    assert driver.one(ForgetMicrobatch).key == train_key(0)
    assert driver.core.placement.standby_reason == "the model is held by others"
    driver.tick(10.0)
    assert driver.effects == []
    driver.hear(StepCommitted(0, 0, 0.1, 1.0, 1.0))
    driver.hear(StepRestarted(0, 1, ""))
    assert driver.core.counters["stale_messages"] == 2


def test_a_stream_that_was_down_hears_again_what_still_matters() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {}, stages=1, slots=2))
    driver.grant(train_key(0), train_key(1))
    driver.compute()
    driver.compute()
    driver.handle(ControlLost())
    driver.drain_device()
    assert not [effect for effect in driver.effects if isinstance(effect, SendControl)]
    driver.handle(ControlRestored())
    said = driver.said()
    assert [message.key.index for message in said if isinstance(message, MicrobatchDone)] == [0, 1]
    assert any(isinstance(message, Ready) for message in said)
    assert LeaseRequest(2) in said


def test_work_goes_on_while_the_stream_is_down() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (1, 1)}, stages=2))
    driver.grant(train_key(0))
    driver.handle(ControlLost())
    driver.compute()
    assert driver.one(SendMicrobatch).to == "b"
    driver.tick(5.0)
    assert not driver.of(SendControl)


def test_what_a_new_attempt_made_void_is_not_said_again() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {}, stages=1))
    driver.grant(train_key(0))
    driver.drain_device()
    driver.hear(StepRestarted(0, 1, "somebody was lost"))
    driver.handle(ControlLost())
    driver.handle(ControlRestored())
    assert not [message for message in driver.said() if isinstance(message, MicrobatchDone)]


def test_held_back_messages_are_bounded() -> None:
    said: list[object] = []
    outbox = Outbox(said.append)
    outbox.lost()
    for number in range(2 * ADVICE_AT_MOST):
        outbox.say(PeerUnreachable(WorkerId(str(number)), ""))
    for number in range(FACTS_AT_MOST + 10):
        outbox.say(MicrobatchDone(train_key(number), (), 0.0, 0))
    assert len(outbox.advice) == ADVICE_AT_MOST
    assert len(outbox.facts) == FACTS_AT_MOST
    outbox.restored()
    assert len(said) == ADVICE_AT_MOST + FACTS_AT_MOST


def test_leaving_asks_for_no_more_work_finishes_what_is_there_and_goes_when_told() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (0, 0)}, stages=1))
    driver.grant(train_key(0))
    driver.handle(DrainRequested("the user wants it back", 30.0))
    assert Leaving("the user wants it back", 30.0) in driver.said()
    said = [effect.message for effect in driver.drain_device() if isinstance(effect, SendControl)]
    assert any(isinstance(message, MicrobatchDone) for message in said)
    assert not any(isinstance(message, LeaseRequest) for message in said)
    driver.hear(Finish(False, "you may go"))
    assert driver.one(Stop) == Stop(False, "you may go", drained=True)
    assert driver.tick(1.0) == []


def test_the_only_holder_of_the_first_stage_works_on_until_the_step_can_end_without_it() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (1, 1)}, stages=2, slots=1))
    driver.handle(DrainRequested("the user wants it back", 30.0))
    driver.tick(3.0)
    assert any(isinstance(message, LeaseRequest) for message in driver.said())


def test_a_leaving_worker_still_serves_microbatches_of_others() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2))
    driver.handle(DrainRequested("the user wants it back", 30.0))
    driver.push(Direction.FORWARD, forward_header(train_key(0), 1, ("a", 0, 0)), "a")
    assert isinstance(driver.core.device.running, ComputeForward)


def test_time_for_leaving_ends() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (0, 0)}, stages=1))
    driver.handle(DrainRequested("the user wants it back", 30.0))
    assert driver.core.wake_at_s == 30.0
    driver.tick(29.0)
    assert not driver.core.stopped
    driver.tick(1.0)
    assert driver.one(Stop).drained


def test_a_worker_that_holds_nothing_leaves_at_once() -> None:
    driver = Driver("me")
    driver.handle(DrainRequested("the user wants it back", 30.0))
    assert driver.one(Stop).drained


def test_a_refusal_ends_the_worker() -> None:
    driver = Driver("me")
    driver.hear(Refused(Refusal.REVOKED, "revoked by the owner"))
    assert driver.one(Stop) == Stop(False, "revoked by the owner")


def test_progress_rises_with_what_gets_done_and_not_with_time() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {"b": (1, 1)}, stages=2))
    before = driver.core.progress
    driver.tick(1.0)
    assert driver.core.progress == before
    driver.grant(train_key(0))
    driver.compute()
    assert driver.core.progress == before + 1
    driver.handle(MicrobatchNotSent(Direction.FORWARD, train_key(0), WorkerId("b"), True))
    assert driver.core.progress == before + 1


def test_the_core_needs_neither_torch_nor_grpc() -> None:
    program = (
        "import sys, starlings_worker.core.core, starlings_simulator.simulation, starlings_simulator.replay\n"
        "print(sorted({'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
