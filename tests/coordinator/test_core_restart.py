"""A coordinator that was killed and started on the same log: who held what still holds it, and the step goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from starlings_coordinator.core.config import CoreConfig
from starlings_coordinator.core.events import WorkerConnected, WorkerDisconnected, WorkerSaid
from starlings_coordinator.core.records import PlanAdopted, StepRecorded, StepRetried, WorkerGone
from starlings_protos.messages import (
    Assignment,
    EngineDown,
    PeerUnreachable,
    Refusal,
    Standby,
    StepCommitted,
    StepRestarted,
    Welcome,
    WorkerId,
)
from support.core_world import Fake, World, config, received

PIPELINE = {"wa": (0, 1), "wb": (2, 2), "wc": (0, 2), "wd": (2, 2)}
WB, WD = WorkerId("wb"), WorkerId("wd")


def training(core_config: CoreConfig | None = None, *, step: int = 2) -> World:
    world = World(core_config or config(), PIPELINE)
    world.pause_at = step
    world.start()
    assert world.core.state.step == step
    return world


def steps_of(world: World) -> list[int]:
    return [record.step for record in world.records if isinstance(record, StepRecorded)]


def come_back(world: World, *names: str) -> list[Fake]:
    return [world.reconnect(name) for name in names or PIPELINE]


def test_the_step_it_was_in_begins_again_and_nobody_loads_or_is_measured() -> None:
    world = training()
    plan_version, attempt = world.core.state.plan_version, world.core.state.attempt
    for fake in world.fakes.values():
        fake.inbox.clear()
    world.restart()
    assert world.core.phase.value == "training"
    assert (world.core.state.step, world.core.state.attempt) == (2, attempt + 1)
    world.pause_at = None
    for fake in come_back(world):
        (welcome,) = received(fake, Welcome)
        assert (welcome.probe_now, welcome.incarnation) == (False, fake.incarnation)
        first = received(fake, Assignment)[0]
        assert (first.plan_version, first.version, first.slots) == (plan_version, 2, 4)
    world.run_to_the_end()
    assert steps_of(world) == [0, 1, 2, 3], "a step was lost, or done twice"
    assert sum(isinstance(record, PlanAdopted) for record in world.records) == 1
    assert world.core.status(world.now()).samples_lost == 0


def test_a_commit_that_was_recorded_but_not_heard_is_said_again_with_its_numbers() -> None:
    world = training()
    heard = received(world.fakes[WB], StepCommitted)[-1]
    for fake in world.fakes.values():
        fake.inbox.clear()
    world.restart()
    fake = world.reconnect("wb")
    kinds = [type(message) for message in fake.inbox]
    assert kinds.index(StepCommitted) < kinds.index(Assignment), "the commit comes before the new attempt"
    assert received(fake, StepCommitted) == [heard]
    assert heard.step == 1


def test_the_record_of_a_commit_is_the_last_thing_before_the_kill() -> None:
    world = training()
    last = max(i for i, record in enumerate(world.records) if isinstance(record, StepRecorded))
    del world.records[last + 1 :]
    world.restart()
    assert world.core.state.step == 2
    world.pause_at = None
    come_back(world)
    world.run_to_the_end()
    assert steps_of(world) == [0, 1, 2, 3]


def test_a_holder_that_does_not_come_back_is_lost_after_its_grace_and_the_others_go_on() -> None:
    world = training()
    world.restart()
    world.pause_at = None
    come_back(world, "wa", "wb", "wc")
    grace_s = world.config.timings.restart_grace_s
    back_at_s = world.now_s
    while world.ended is None and world.now_s < back_at_s + grace_s + 10:
        world.tick()
    assert world.ended is not None
    assert WD not in world.core.state.spans
    gone = [record for record in world.records if isinstance(record, WorkerGone)]
    assert [record.worker_id for record in gone] == [WD]
    assert steps_of(world) == [0, 1, 2, 3]


def test_a_peer_that_cannot_reach_it_either_shortens_the_grace() -> None:
    """The report may be older than the restart, and its stream ended with everybody's."""
    world = training()
    world.restart()
    (wa, _, _) = come_back(world, "wa", "wb", "wc")
    world.feed(WorkerSaid(wa.session, wa.worker_id, PeerUnreachable(WD, "connection refused")))
    assert WD in world.core.state.spans
    patience_s = world.core.config.timings.silence_least_s
    assert patience_s < world.core.config.timings.restart_grace_s
    for _ in range(int(patience_s / 0.5) + 1):
        world.tick(0.5)
    assert WD not in world.core.state.spans
    assert world.core.phase.value == "training"


def test_a_stream_that_broke_and_a_peer_that_cannot_reach_it_are_two_witnesses() -> None:
    world = training()
    wa, wd = world.fakes[WorkerId("wa")], world.fakes[WD]
    world.feed(WorkerSaid(wa.session, wa.worker_id, PeerUnreachable(WD, "connection refused")))
    assert WD in world.core.state.spans, "a report alone proves nothing"
    world.feed(WorkerDisconnected(wd.session, WD))
    assert WD in world.core.state.spans
    world.feed(WorkerSaid(wa.session, wa.worker_id, PeerUnreachable(WD, "connection refused")))
    assert WD not in world.core.state.spans


def test_an_engine_that_ended_meanwhile_is_a_new_life() -> None:
    world = training()
    before = world.fakes[WD].incarnation
    world.restart()
    come_back(world, "wa", "wb", "wc")
    fake = world.reconnect("wd", incarnation=0)
    world.feed(WorkerSaid(fake.session, WD, EngineDown("out of memory", restarting=True)))
    assert fake.incarnation == before + 1
    assert WD not in world.core.state.spans


def test_another_incarnation_than_the_log_knows_is_a_new_life_above_both() -> None:
    world = training()
    world.restart()
    come_back(world, "wa", "wb", "wc")
    fake = world.reconnect("wd", incarnation=9)
    assert fake.incarnation == 10
    assert WD not in world.core.state.spans


def test_a_life_that_was_given_up_before_the_restart_stays_given_up() -> None:
    world = training()
    before = world.fakes[WD].incarnation
    world.fakes[WD].mute = True
    while WD in world.core.members:
        world.tick()
    world.restart()
    world.fakes[WD].mute = False
    come_back(world, "wa", "wb", "wc")
    fake = world.reconnect("wd")
    assert fake.incarnation == before + 1, "late messages of the old life must be told from the new one's"


def test_a_worker_on_standby_is_known_again_without_being_measured() -> None:
    world = World(config(), PIPELINE)
    world.pause_at = 1
    world.boot()
    for name in (*PIPELINE, "wx"):
        world.join(name)
    while not world.paused:
        world.tick()
    world.restart()
    fake = world.reconnect("wx")
    assert received(fake, Welcome)[-1].probe_now is False
    assert received(fake, Standby)
    assert world.core.members[WorkerId("wx")].probe is not None


def test_while_spans_were_loading_a_new_plan_is_made() -> None:
    world = World(config(), PIPELINE)
    world.boot()
    for name in PIPELINE:
        world.join(name)
    for fake in world.fakes.values():
        fake.mute = True
    while not world.plan_requests:
        world.tick()
    for fake in world.fakes.values():
        fake.mute = False
    assert world.core.phase.value == "loading"
    world.restart()
    assert world.core.phase.value == "gathering"
    come_back(world)
    world.run_to_the_end()
    assert steps_of(world) == [0, 1, 2, 3]


def test_the_end_of_a_job_goes_on_too() -> None:
    world = World(config(), PIPELINE)
    world.save_at_once = False
    world.start()
    for _ in range(20):
        world.tick()
    assert world.core.phase.value == "finishing"
    world.restart()
    assert world.core.phase.value == "finishing"
    world.save_at_once = True
    come_back(world)
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert steps_of(world) == [0, 1, 2, 3]


def test_two_restarts_in_a_row_use_no_attempt_twice() -> None:
    world = training()
    world.restart()
    come_back(world, "wa", "wb")
    world.restart()
    world.pause_at = None
    come_back(world)
    world.run_to_the_end()
    attempts = [(r.step, r.attempt) for r in world.records if isinstance(r, StepRetried)]
    assert len(attempts) == len(set(attempts))
    assert steps_of(world) == [0, 1, 2, 3]
    restarted = received(world.fakes[WorkerId("wa")], StepRestarted)
    assert [message.step for message in restarted] == sorted(message.step for message in restarted)


@pytest.mark.parametrize("silent", [False, True])
def test_a_copied_directory_on_another_machine_is_refused_while_the_first_one_lives(silent: bool) -> None:
    world = training()
    first = world.fakes[WD]
    session = first.session
    if silent:
        first.mute = True
        for _ in range(12):
            world.tick()
    copy = 900
    second = replace(first.hello, session_nonce=77, host_id="elsewhere")
    world.fakes[WD].session = copy
    world.feed(WorkerConnected(copy, second))
    refused = [close for close in world.closed if close.session == copy]
    if silent:
        assert not refused, "the first one is as good as gone"
        return
    first.session = session
    (close,) = refused
    assert close.refusal is Refusal.IN_USE
    assert "is in use by" in close.message
    assert "since 2023-11-" in close.message
    assert world.core.members[WD].session == session, "the first one is untouched"
