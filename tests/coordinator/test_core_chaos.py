"""The core against whatever the world can send: any interleaving, nonsense, silence, restarts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starlings_coordinator.core.core import Core
from starlings_coordinator.core.events import (
    Booted,
    CheckpointFailed,
    CheckpointSaved,
    KeeperLost,
    KeeperStarted,
    PlanComputed,
    PlannerFailed,
    StopRequested,
    Ticked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerRevoked,
    WorkerSaid,
)
from starlings_coordinator.core.records import (
    StepRecorded,
    record_from_json,
    record_to_json,
)
from starlings_protos.messages import (
    Assignment,
    EngineDown,
    ExchangeFailed,
    ExchangeOpened,
    Finish,
    Heartbeat,
    Hello,
    Hop,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    PeerUnreachable,
    PlannedWorker,
    PlanReply,
    Prepared,
    PreparedGroup,
    ProbeReport,
    Ready,
    Span,
    Stage,
    StateReport,
    StepCommitted,
    ToCoordinator,
    WorkerId,
)
from starlings_protos.telemetry import Telemetry, TelemetrySample
from support.core_world import World, attempts_begun, config, received

NAMES = ("wa", "wb", "wc", "wd")
PIPELINE = {"wa": (0, 1), "wb": (2, 2), "wc": (0, 2), "wd": (1, 2)}


def numbers(draw: random.Random) -> int:
    return draw.choice([0, 1, 2, 3, 7, 2**31, 2**63])


def floats(draw: random.Random) -> float:
    return draw.choice([0.0, 1.0, 64.0, -1.0, float("nan"), float("inf"), 1e300])


def nonsense(draw: random.Random) -> ToCoordinator:
    """A well-typed message with arbitrary contents: all that the wire's types let through."""
    who = WorkerId(draw.choice([*NAMES, "nobody", "keeper"]))
    key = MicrobatchKey(draw.choice(list(LeaseKind)), numbers(draw), numbers(draw), numbers(draw))
    route = tuple(Hop(who, numbers(draw), numbers(draw)) for _ in range(draw.randrange(3)))
    groups = tuple(
        PreparedGroup(
            draw.choice(["stage:0", "stage:9", "tied", "", "stage:x"]), (numbers(draw),) * 2, 1, floats(draw)
        )
        for _ in range(draw.randrange(3))
    )
    kinds: list[ToCoordinator] = [
        Hello(who, 1, 1, "0"),
        Heartbeat(numbers(draw), numbers(draw)),
        Telemetry(who, numbers(draw), (TelemetrySample(floats(draw), numbers(draw)),) * draw.randrange(3)),
        ProbeReport({"layer": floats(draw)}, {"layer": floats(draw)}, numbers(draw), ("x:1",), floats(draw)),
        Ready(numbers(draw), numbers(draw), {"embed": "x"}),
        LeaseRequest(numbers(draw)),
        MicrobatchDone(key, route, floats(draw), numbers(draw), numbers(draw)),
        MicrobatchFailed(key, "reason"),
        Prepared(numbers(draw), numbers(draw), groups),
        StateReport(numbers(draw), {"embed": "x"}),
        EngineDown("reason", draw.random() < 0.8),
        Leaving("reason", floats(draw)),
        PeerUnreachable(who, "reason"),
        ExchangeFailed(numbers(draw), numbers(draw), "stage:0", "reason"),
    ]
    return draw.choice(kinds)


def disturb(world: World, draw: random.Random) -> None:
    """One thing that happens to a running swarm."""
    fakes = list(world.fakes.values())
    fake = draw.choice(fakes) if fakes else None
    kind = draw.randrange(14)
    if kind == 0:
        name = draw.choice(NAMES)
        if WorkerId(name) not in world.core.members:
            world.join(name)
    elif kind == 1 and fake is not None:
        world.feed(WorkerDisconnected(fake.session, fake.worker_id))
    elif kind == 2 and fake is not None:
        rejoin(world, fake)
    elif kind == 3 and fake is not None:
        fake.mute = not fake.mute
    elif kind == 4 and fake is not None:
        world.feed(WorkerSaid(fake.session, fake.worker_id, EngineDown("crash", True)))
    elif kind == 5 and fake is not None and draw.random() < 0.3:
        world.feed(WorkerSaid(fake.session, fake.worker_id, Leaving("bored", 60)))
    elif kind == 6:
        world.feed(draw.choice([KeeperLost("crash"), KeeperStarted(("127.0.0.1:1",), (0,))]))
    elif kind == 7:
        world.feed(CheckpointFailed(numbers(draw), "disk", 9))
    elif kind == 8:
        world.feed(CheckpointSaved(numbers(draw), "somewhere", 1))
    elif kind == 9:
        span = Span(numbers(draw), numbers(draw))
        stages = draw.choice([(), (Stage(0, 5),), (Stage(3, 1), Stage(0, 9))])
        world.feed(PlanComputed(PlanReply(numbers(draw), stages, (PlannedWorker(WorkerId("wa"), span),))))
    elif kind == 10:
        world.feed(PlannerFailed(numbers(draw), "crash"))
    elif fake is not None:
        world.feed(WorkerSaid(draw.choice([fake.session, 999]), fake.worker_id, nonsense(draw)))


def rejoin(world: World, fake: Any) -> None:
    """The same supervisor opens another stream."""
    nonce = (
        world.core.members[fake.worker_id].hello.session_nonce if fake.worker_id in world.core.members else 77
    )
    world._sessions += 1
    fake.session = world._sessions
    hello = Hello(
        fake.worker_id, 1, 1, "0.1.0", numeric_class="cpu", host_id=fake.worker_id, session_nonce=nonce
    )
    world.feed(WorkerConnected(fake.session, hello))


def hear_out(world: World) -> None:
    """While the world is paused: what was said before is heard all the same, answers to it are not."""
    world._queue, queued = [], world._queue
    for event in queued:
        world.feed(event)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(5, 120))
def test_any_interleaving_keeps_the_invariants_and_folds_to_the_same_state(seed: int, length: int) -> None:
    draw = random.Random(seed)
    world = World(config(checkpoint={"every": draw.choice([0, 1, 2])}), PIPELINE)
    world.boot()
    for name in NAMES:
        world.join(name)
    for _ in range(length):
        if draw.random() < 0.5:
            world.tick(draw.choice([0.1, 0.5, 2.0, 9.0]))
        else:
            disturb(world, draw)
            world.settle()
        world.core.status(world.now())
        assert world.core.has_ended or world.core.phase.value == "training" or world.core.waiting_words()
    again = [record_from_json(record_to_json(record)) for record in world.records]
    assert again == world.records
    half = len(again) // 2
    early = Core.restore(world.config, None, tuple(again[:half]))
    restored = Core.restore(world.config, early.snapshot(), tuple(again[half:]))
    assert restored.state == world.core.state
    begun = attempts_begun(world)
    assert len(begun) == len(set(begun)), "an attempt began twice"
    committed = [(r.step, r.attempt) for r in again if isinstance(r, StepRecorded)]
    assert len(committed) == len(set(committed))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_after_any_trouble_a_healthy_swarm_finishes_or_the_job_said_why_not(seed: int) -> None:
    draw = random.Random(seed)
    world = World(config(), PIPELINE)
    world.boot()
    for name in NAMES:
        world.join(name)
    for _ in range(40):
        disturb(world, draw)
        world.tick(draw.choice([0.1, 0.5, 2.0]))
    world.feed(KeeperStarted(("127.0.0.1:1",), tuple(world.core.state.checkpoints) or (0,)))
    for name in NAMES:
        if world.ended is None:
            world.fakes.pop(WorkerId(name), None)
            world.join(name)
    for _ in range(800):
        if world.ended is not None:
            break
        world.tick(2.0)
    assert world.ended is not None, world.core.waiting_words()
    assert world.ended.exit_code == 0 or world.ended.reason
    assert world.core.state.samples_lost == 0


def test_a_worker_that_missed_a_commit_hears_it_before_its_assignment() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2)})
    world.pause_at = 1
    world.start()
    wb = world.fakes[WorkerId("wb")]
    world.feed(WorkerDisconnected(wb.session, wb.worker_id))
    wb.inbox.clear()
    rejoin(world, wb)
    kinds = [type(m) for m in wb.inbox]
    assert kinds.index(StepCommitted) < kinds.index(Assignment)
    (commit,) = received(wb, StepCommitted)
    (assignment,) = received(wb, Assignment)
    assert commit.step + 1 == assignment.version == assignment.step == 1
    assert world.core.state.attempt == assignment.attempt + 1
    world.go_on()
    world.run_to_the_end()


def test_attempts_are_not_used_again_when_steps_are_done_again() -> None:
    world = World(config(), {"wa": (0, 1), "wb": (2, 2)})
    world.pause_at = 2
    world.start()
    wb = world.fakes.pop(WorkerId("wb"))
    world.feed(WorkerDisconnected(wb.session, wb.worker_id))
    world._queue.clear()
    for _ in range(8):
        world.tick(1.0)
    assert world.core.phase.value == "gathering"
    assert "stage 2 has no holder" in world.core.waiting_words()
    world.join("wb")
    world.pause_at = None
    world.run_to_the_end()
    steps = [(r.step, r.attempt) for r in world.records if isinstance(r, StepRecorded)]
    assert [step for step, _ in steps] == [0, 1, 0, 1, 2, 3]
    assert len(steps) == len(set(steps))
    leases = [
        lease.key for fake in world.fakes.values() for g in received(fake, LeaseGrant) for lease in g.leases
    ]
    trained = [key for key in leases if key.kind is LeaseKind.TRAIN]
    assert len(trained) == len(set(trained))
    status = world.core.status(world.now())
    assert status.samples_leased == status.samples_trained == 32


def test_stopping_without_a_plan_ends_at_once() -> None:
    world = World(config(swarm={"min_workers": 3}), {"wa": (0, 2)})
    world.boot()
    wa = world.join("wa")
    world.feed(StopRequested("enough"))
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert wa.finished == Finish(True, "enough")


def test_a_worker_that_fails_the_others_is_set_aside_and_comes_back_later() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2)})
    world.pause_at = 1
    world.start()
    wb = world.fakes[WorkerId("wb")]
    for _ in range(3):
        state = world.core.state
        world.feed(
            WorkerSaid(wb.session, wb.worker_id, ExchangeFailed(state.step, state.attempt, "stage:0", "full"))
        )
    assert world.closed[-1].worker_id == "wb"
    assert world.closed[-1].refusal is None
    world.join("wb")
    hear_out(world)
    member = world.core.members[WorkerId("wb")]
    assert "set aside" in member.reason
    assert not member.usable
    world.tick(1.0)
    for _ in range(40):
        world.now_s += 1.0
        for other in world.core.members.values():
            other.detector.heard(world.now_s)
        world.feed(Ticked())
    assert member.usable
    world.go_on()
    world.run_to_the_end()


def test_two_that_cannot_reach_each_other_cost_one_of_them_only() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)})
    world.pause_at = 1
    world.start()
    wa, wb = world.fakes[WorkerId("wa")], world.fakes[WorkerId("wb")]
    for _ in range(3):
        state = world.core.state
        world.feed(WorkerSaid(wa.session, wa.worker_id, PeerUnreachable(wb.worker_id, "timeout")))
        world.feed(WorkerSaid(wb.session, wb.worker_id, PeerUnreachable(wa.worker_id, "timeout")))
        failed = ExchangeFailed(state.step, state.attempt, "stage:0", "late")
        world.feed(WorkerSaid(wa.session, wa.worker_id, failed))
        world.feed(WorkerSaid(wb.session, wb.worker_id, failed))
    assert set(world.core.members) == {"wa", "wc"}
    world.go_on()
    world.run_to_the_end()


def test_a_failed_evaluation_does_not_cost_the_model() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.save_at_once = True
    world.pause_at = 3
    world.start()
    fake = world.fakes[WorkerId("wa")]
    work = world._work

    def refuse(worker: Any, lease: Any) -> None:
        if lease.key.kind is LeaseKind.TRAIN:
            work(worker, lease)
            return
        world.say(worker, MicrobatchFailed(lease.key, "out of memory"))
        world.say(worker, LeaseRequest(4))

    world._work = refuse  # type: ignore[method-assign]
    world.go_on()
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.core.state.checkpoints.keys() == {4}
    assert world.core.state.validation_loss is None
    assert fake.finished is not None
    assert fake.finished.done


def test_late_joiners_stand_by_and_hear_why() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.pause_at = 1
    world.start()
    late = world.join("wb")
    hear_out(world)
    member = world.core.members[WorkerId("wb")]
    assert "training is under way" in member.reason
    assert any("training is under way" in m.reason for m in late.inbox if hasattr(m, "reason"))


@pytest.mark.parametrize("refused", ["nan", "count"])
def test_a_senseless_acknowledgement_voids_the_attempt_at_once(refused: str) -> None:
    world = World(config(), {"wa": (0, 2)})
    world.pause_at = 0
    world.start()
    fake = world.fakes[WorkerId("wa")]
    fake.mute = True
    world.pause_at = None
    world.feed(WorkerSaid(fake.session, fake.worker_id, LeaseRequest(1)))
    lease = received(fake, LeaseGrant)[-1].leases[0]
    loss, count = (float("nan"), 128) if refused == "nan" else (1.0, 127)
    attempt = world.core.state.attempt
    route = (Hop(fake.worker_id, 0, 2),)
    world.feed(WorkerSaid(fake.session, fake.worker_id, MicrobatchDone(lease.key, route, loss, count)))
    assert world.core.state.attempt == attempt + 1


def test_after_everybody_died_training_goes_on_from_the_newest_checkpoint() -> None:
    world = World(config(checkpoint={"every": 1}), {"wa": (0, 2)})
    world.pause_at = 2
    world.start()
    hear_out(world)
    assert world.core.state.checkpoints
    snapshot = world.core.snapshot()
    again = World(config(checkpoint={"every": 1}), {"wa": (0, 2)})
    again.core = Core.restore(again.config, snapshot)
    again.now_s = 5000.0
    saved = sorted(again.core.state.checkpoints)
    again.feed(Booted())
    again.feed(KeeperStarted(("127.0.0.1:1",), (0, *saved)))
    # Another supervisor process of the same id: a new life, and the old one's state is gone.
    again._sessions = 7
    again.join("wa")
    again.run_to_the_end()
    assert [r.step for r in again.records if isinstance(r, StepRecorded)] == list(range(saved[-1], 4))
    assert again.fakes[WorkerId("wa")].incarnation == 2
    opened = received(again.fakes[WorkerId("wa")], ExchangeOpened)
    assert opened
    world.feed(WorkerRevoked(WorkerId("wa")))
