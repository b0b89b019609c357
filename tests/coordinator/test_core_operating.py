"""The owner's commands: a pause that lasts through restarts, and workers that are sent away and come back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator.core.events import (
    DrainAsked,
    EvictionRequested,
    OwnerCommand,
    PauseRequested,
    ReadmissionRequested,
    ResumeRequested,
    StopRequested,
    WorkerSaid,
)
from starlings_coordinator.core.records import (
    LeaseBlockGranted,
    PauseRecorded,
    PlanDropped,
    ResumeRecorded,
    StepRecorded,
    WorkerEvicted,
    WorkerReadmitted,
)
from starlings_coordinator.core.state import snapshot_from_json, snapshot_to_json
from starlings_coordinator.core.stepping import Stepping
from starlings_protos.messages import LeaseGrant, LeaseRequest, Leaving, Refusal, Welcome, WorkerId
from starlings_protos.status import CommandReply
from starlings_protos.stream_messages import DrainOrder, JobPaused
from support.core_world import World, config, received
from support.streaming_world import PIPELINE, lazy_world, trained

WD = WorkerId("wd")


def ask(world: World, command: OwnerCommand, *, refused: bool = False) -> CommandReply:
    world.feed(command)
    world.settle()
    answer = world.answers[-1]
    assert answer.request == command.request
    assert answer.refused is refused, answer.reply.text
    return answer.reply


def kept(world: World, kind: type) -> int:
    return sum(isinstance(record, kind) for record in world.records)


def training(steps: int = 6, step: int = 2, **overrides: object) -> World:
    """`sync`, at the beginning of a step of which nobody knows yet."""
    job = {"name": "test", "tokens": steps * 8 * 64, "seed": 7}
    world = World(config(job=job, **overrides), PIPELINE)
    world.pause_at = step
    world.start()
    assert world.core.state.step == step
    return world


# ------------------------------------------------------------------ pause


def test_in_a_pause_a_step_that_has_begun_is_finished_and_no_other_begins() -> None:
    world = training()
    assert ask(world, PauseRequested(1, "lunch")).changed
    world.go_on()
    for _ in range(40):
        world.tick()
    assert world.core.state.step == 3
    assert world.core.ledger is not None
    assert not world.core.ledger.leases
    status = world.core.status(world.now())
    assert status.pause is not None
    assert not status.pause.settling
    assert "paused by the owner" in status.waiting_for
    assert "lunch" in status.waiting_for
    assert not ask(world, PauseRequested(2, "again")).changed
    assert kept(world, PauseRecorded) == 1
    assert ask(world, ResumeRequested(3)).changed
    assert not ask(world, ResumeRequested(4)).changed
    assert kept(world, ResumeRecorded) == 1
    world.run_to_the_end()
    assert [r.step for r in world.records if isinstance(r, StepRecorded)] == list(range(6))


def test_a_step_that_begins_anew_in_a_pause_waits() -> None:
    world = training()
    for fake in world.fakes.values():
        fake.mute = True
    world.go_on()
    ask(world, PauseRequested(1, "lunch"))
    assert world.core.operating.settling
    assert world.core.status(world.now()).waiting_for.endswith("(what is under way is being finished)")
    assert isinstance(world.core.schedule, Stepping)
    world.core.schedule.retry("a test")
    world.tick()
    assert not world.core.operating.settling
    assert world.core.ledger is not None
    assert len(world.core.ledger.pool) == world.core.ledger.count


def test_a_pause_lasts_through_a_restart_and_is_told_to_who_comes_back() -> None:
    world = training()
    ask(world, PauseRequested(1, "moving house"))
    world.go_on()
    step = world.core.state.step
    world.restart()
    for name in PIPELINE:
        fake = world.fakes[WorkerId(name)]
        fake.inbox.clear()
        world.reconnect(name)
        (welcome,) = received(fake, Welcome)
        assert (welcome.paused, welcome.pause_reason) == (True, "moving house")
    for _ in range(20):
        world.tick()
    assert world.core.paused
    assert world.core.state.step == step
    assert all(not received(fake, LeaseGrant) for fake in world.fakes.values())
    ask(world, ResumeRequested(2))
    assert all(received(fake, JobPaused)[-1] == JobPaused(False) for fake in world.fakes.values())
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_in_async_what_has_not_begun_is_given_back_and_leased_again_later() -> None:
    world = lazy_world()
    world.train("wa")
    before = world.core.state.leased.samples_acknowledged
    ask(world, PauseRequested(1, "lunch"))
    for _ in range(20):
        world.tick()
    state = world.core.state
    assert not state.leased.blocks
    assert state.leased.samples_acknowledged == before + 2
    assert state.samples_repeated == 0
    granted = kept(world, LeaseBlockGranted)
    for fake in world.fakes.values():
        world.feed(WorkerSaid(fake.session, fake.worker_id, LeaseRequest(4)))
    world.tick()
    assert kept(world, LeaseBlockGranted) == granted
    ask(world, ResumeRequested(2))
    world.tick()
    assert kept(world, LeaseBlockGranted) > granted
    while world.fakes[WorkerId("wa")].leases or world.fakes[WorkerId("wc")].leases:
        world.train("wa")
        world.train("wc")
        world.tick()
        if len(trained(world)) > 100:
            break
    assert len(trained(world)) == len(set(trained(world))), "a sample was trained twice"


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_job_that_is_stopped_in_a_pause_ends_in_order(schedule: str) -> None:
    world = training() if schedule == "sync" else lazy_world()
    ask(world, PauseRequested(1, "lunch"))
    world.go_on()
    for _ in range(10):
        world.tick()
    for fake in world.fakes.values():
        fake.lazy = False
    world.feed(StopRequested("enough"))
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert not world.core.paused
    ask(world, PauseRequested(2, "too late"), refused=True)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_who_leaves_in_a_pause_may_go(schedule: str) -> None:
    world = training() if schedule == "sync" else lazy_world()
    ask(world, PauseRequested(1, "lunch"))
    world.go_on()
    fake = world.fakes[WD]
    world.feed(WorkerSaid(fake.session, WD, Leaving("reboot", 60.0)))
    for _ in range(4):
        world.tick()
    assert fake.finished is not None
    assert WD not in world.core.members
    assert world.core.phase.value == "training"


def test_the_only_holder_of_a_stage_leaves_in_a_pause_when_its_state_is_saved() -> None:
    world = World(config(job={"name": "t", "tokens": 6 * 8 * 64, "seed": 7}), {"wa": (0, 1), "wb": (2, 2)})
    world.pause_at = 2
    world.start()
    ask(world, PauseRequested(1, "lunch"))
    world.go_on()
    step, fake = world.core.state.step, world.fakes[WorkerId("wb")]
    world.feed(WorkerSaid(fake.session, fake.worker_id, Leaving("reboot", 60.0)))
    world.settle()
    for _ in range(4):
        world.tick()
    assert fake.finished is not None
    assert world.core.planning.restart_version == step
    assert world.core.waiting_words().startswith("paused")


def test_a_job_that_gathers_can_be_paused_and_loads_all_the_same() -> None:
    world = World(config(), PIPELINE)
    world.boot()
    ask(world, PauseRequested(1, "not yet"))
    for name in PIPELINE:
        world.join(name)
    for _ in range(10):
        world.tick()
    assert world.core.phase.value == "training"
    assert world.core.state.step == 0
    assert world.core.waiting_words().startswith("paused by the owner")
    ask(world, ResumeRequested(2))
    world.run_to_the_end()


# ------------------------------------------------------------------ eviction


def evict(request: int, name: str, for_s: float = 3600.0, *, force: bool = False) -> EvictionRequested:
    return EvictionRequested(request, WorkerId(name), "it is too loud", for_s, force)


def test_an_evicted_worker_is_told_why_and_comes_back_when_its_time_is_over() -> None:
    world = training()
    incarnation = world.fakes[WD].incarnation
    reply = ask(world, evict(1, "wd"))
    assert "for 1 h," in reply.text
    (closed,) = [c for c in world.closed if c.worker_id == WD]
    assert closed.refusal is Refusal.EVICTED
    assert "it is too loud" in closed.message
    assert WD not in world.core.state.spans
    shown = {w.worker_id: w for w in world.core.status(world.now()).workers}[WD]
    assert shown.state == "evicted"
    assert "it is too loud" in shown.reason
    # A word of its old life counts for nothing, and a new one is not let in: not by a new coordinator either.
    world.closed.clear()
    world.reconnect("wd")
    assert [c.refusal for c in world.closed] == [Refusal.EVICTED]
    assert WD not in world.core.members
    world.restart()
    world.closed.clear()
    world.reconnect("wd")
    assert [c.refusal for c in world.closed] == [Refusal.EVICTED]
    world.now_s += 3601
    world.feed(WorkerSaid(0, WD, LeaseRequest(1)))
    world.reconnect("wd")
    assert WD in world.core.members
    assert world.fakes[WD].incarnation > incarnation
    world.tick()
    assert kept(world, WorkerReadmitted) == 1
    assert not world.core.state.evicted


def test_what_an_evicted_worker_leased_is_leased_again() -> None:
    world = lazy_world()
    held = {lease.key for lease in world.fakes[WorkerId("wc")].leases}
    assert held
    ask(world, evict(1, "wc"))
    assert not any(b.worker_id == "wc" for b in world.core.state.leased.blocks.values())
    assert world.core.phase.value == "training"


def test_the_last_holder_of_a_stage_is_evicted_by_force_only() -> None:
    world = World(config(job={"name": "t", "tokens": 40 * 8 * 64, "seed": 7}), {"wa": (0, 1), "wb": (2, 2)})
    world.pause_at = 3
    world.start()
    step = world.core.state.step
    why = ask(world, evict(1, "wb"), refused=True).text
    assert "the only one that holds stage 2" in why
    assert f"{step} steps ({step * 512:,} tokens) would be lost" in why
    assert "--force" in why
    assert kept(world, WorkerEvicted) == 0
    assert WorkerId("wb") in world.core.members
    assert ask(world, evict(2, "wb", force=True)).changed
    assert kept(world, PlanDropped) == 1
    assert world.core.phase.value == "gathering"


def test_one_that_is_not_here_can_be_evicted_and_let_back() -> None:
    world = training()
    world.core.membership.lose(world.core.members[WD], "a test")
    reply = ask(world, evict(1, "wd", for_s=0.0))
    assert "until the owner lets it back" in reply.text
    world.now_s += 1e7
    world.feed(WorkerSaid(0, WD, LeaseRequest(1)))
    world.closed.clear()
    world.reconnect("wd")
    assert [c.refusal for c in world.closed] == [Refusal.EVICTED]
    assert ask(world, ReadmissionRequested(2, WD)).changed
    assert not ask(world, ReadmissionRequested(3, WD)).changed
    world.reconnect("wd")
    assert WD in world.core.members


# ------------------------------------------------------------------ leaving in order


def test_a_worker_is_asked_to_leave_once_and_only_if_it_is_here() -> None:
    world = training()
    assert ask(world, DrainAsked(1, WD, "we move the machine")).changed
    fake = world.fakes[WD]
    assert received(fake, DrainOrder) == [DrainOrder("we move the machine")]
    world.feed(WorkerSaid(fake.session, WD, Leaving("asked to", 60.0)))
    assert not ask(world, DrainAsked(2, WD, "again")).changed
    assert len(received(fake, DrainOrder)) == 1
    world.core.membership.lose(world.core.members[WD], "a test")
    assert "not connected" in ask(world, DrainAsked(3, WD, "again"), refused=True).text


# ------------------------------------------------------------------ whatever comes, in any order

STEPS = st.lists(
    st.sampled_from(
        ["pause", "resume", "evict wc", "evict wd", "readmit wd", "train", "tick", "restart", "join wd"]
    ),
    max_size=14,
)


@given(STEPS)
@settings(max_examples=40)
def test_nothing_is_leased_in_a_pause_or_to_one_that_was_sent_away(steps: list[str]) -> None:
    world = lazy_world()
    for number, step in enumerate(steps):
        granted = kept(world, LeaseBlockGranted)
        paused = world.core.paused
        match step.split():
            case ["pause"]:
                world.feed(PauseRequested(number, "why not"))
            case ["resume"]:
                world.feed(ResumeRequested(number))
                paused = False
            case ["evict", name]:
                world.feed(EvictionRequested(number, WorkerId(name), "so", 5.0))
            case ["readmit", name]:
                world.feed(ReadmissionRequested(number, WorkerId(name)))
            case ["train"]:
                for name in ("wa", "wc"):
                    if WorkerId(name) in world.core.members:
                        world.train(name)
            case ["restart"]:
                world.restart()
                for name in sorted(world.spans):
                    if name not in world.core.state.evicted:
                        world.reconnect(name)
            case ["join", name]:
                if WorkerId(name) not in world.core.members:
                    world.reconnect(name)
        world.settle()
        world.tick()
        if paused and world.core.paused:
            assert kept(world, LeaseBlockGranted) == granted
        state = world.core.state
        for block in state.leased.blocks.values():
            assert block.worker_id not in state.evicted
        assert not state.evicted.keys() & world.core.members.keys()
        assert snapshot_from_json(snapshot_to_json(state)) == state
