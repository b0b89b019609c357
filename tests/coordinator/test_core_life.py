"""The core from the first worker to the last goodbye: events in, records and effects compared."""

from __future__ import annotations

import math
import subprocess
import sys

from starlings_coordinator.core.core import Core
from starlings_coordinator.core.events import (
    CheckpointSaved,
    KeeperStarted,
    StopRequested,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from starlings_coordinator.core.records import (
    CheckpointRecorded,
    EvaluationRecorded,
    JobFinished,
    PlanAdopted,
    StepRecorded,
    TextRecorded,
    record_from_json,
    record_to_json,
)
from starlings_protos.messages import (
    Assignment,
    EngineDown,
    ExchangeOpened,
    Finish,
    Hello,
    Leaving,
    Refusal,
    Standby,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from support.core_world import World, config, received

PIPELINE = {"wa": (0, 1), "wb": (2, 2), "wc": (0, 2), "wd": (2, 2)}


def test_a_job_runs_from_gathering_to_done() -> None:
    world = World(config(), PIPELINE)
    world.start()
    world.run_to_the_end()
    kinds = [type(r) for r in world.records]
    assert kinds.count(StepRecorded) == 4
    order = [PlanAdopted, StepRecorded, CheckpointRecorded, EvaluationRecorded, TextRecorded, JobFinished]
    assert [k for k in dict.fromkeys(kinds) if k in order] == order
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert all(fake.finished == Finish(True, "all 4 steps are trained") for fake in world.fakes.values())
    status = world.core.status(world.now())
    assert (status.phase, status.samples_trained, status.samples_lost, status.samples_leased) == (
        "done",
        32,
        0,
        32,
    )
    assert math.isclose(status.validation_loss, 2.0)
    assert math.isclose(status.loss, 1.0)
    assert status.tokens == status.tokens_total == 4 * 8 * 64


def test_commit_numbers_follow_from_the_groups_norms() -> None:
    world = World(config(), PIPELINE)
    world.start()
    world.run_to_the_end()
    commit = received(world.fakes[WorkerId("wa")], StepCommitted)[0]
    norm = math.sqrt(3 * 4.0)
    assert math.isclose(commit.gradient_norm, norm)
    assert math.isclose(commit.clip_factor, 1.0 / (norm + 1e-6))


def test_tied_ends_get_a_group_of_their_own_whose_norm_counts_once() -> None:
    world = World(config(tied=True), PIPELINE)
    world.start()
    opened = received(world.fakes[WorkerId("wa")], ExchangeOpened)[0]
    tied = next(g for g in opened.groups if g.group == "tied")
    assert [m.worker_id for m in tied.members] == ["wa", "wb", "wc", "wd"]
    assert math.isclose(received(world.fakes[WorkerId("wa")], StepCommitted)[0].gradient_norm, 4.0)
    world.run_to_the_end()


def test_members_without_work_only_receive() -> None:
    world = World(config(), PIPELINE)
    world.start()
    opened = received(world.fakes[WorkerId("wd")], ExchangeOpened)[0]
    weights = {m.worker_id: m.weight for m in opened.groups[0].members}
    # Routes of the fakes go through wb for stage 2, or through wc alone; wd never works.
    assert weights["wd"] == 0.0
    assert weights["wb"] == 1.0
    world.run_to_the_end()


def test_every_wait_has_a_reason_and_nothing_spins() -> None:
    world = World(config(swarm={"min_workers": 2}), {"wa": (0, 1), "wb": (1, 2)})
    assert world.core.waiting_words() == "waiting for 1 more worker to join"
    world.boot()
    world.join("wa")
    world.tick()
    assert world.core.waiting_words() == "waiting for 1 more worker to join"
    # wx holds nothing in the test's plans, so the two cannot cover stage 2.
    world.join("wx")
    for _ in range(50):
        world.tick()
    assert len(world.plan_requests) == 1, "an impossible plan must be asked for once per membership"
    assert world.core.waiting_words() == "waiting for a worker: needs 1.0 GB more for stages [2]"
    world.join("wb")
    world.run_to_the_end()


def test_without_a_keeper_nobody_is_sent_to_load() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.join("wa")
    for _ in range(10):
        world.tick()
    assert "keeper" in world.core.waiting_words()
    world.feed(KeeperStarted(("127.0.0.1:1",), (0,)))
    world.run_to_the_end()


def test_a_lost_replica_costs_an_attempt_and_no_sample() -> None:
    world = World(config(), PIPELINE)
    world.pause_at = 2
    world.start()
    wa = world.fakes[WorkerId("wa")]
    wa.mute = True
    world.feed(WorkerDisconnected(wa.session, wa.worker_id))
    world.go_on()
    for _ in range(6):
        world.tick()
    assert wa.worker_id not in world.core.state.spans
    assert received(world.fakes[WorkerId("wc")], StepRestarted)[-1].step == 2
    world.run_to_the_end()
    assert world.core.state.samples_lost == 0
    assert world.core.state.samples_trained == 32


def test_a_frozen_replica_is_given_up_within_eight_seconds() -> None:
    world = World(config(), PIPELINE)
    world.pause_at = 1
    world.start()
    world.fakes[WorkerId("wd")].mute = True
    world.go_on()
    frozen_at_s = world.now_s
    while WorkerId("wd") in world.core.state.spans:
        world.tick()
    assert 5.0 <= world.now_s - frozen_at_s <= 8.0
    assert world.closed[-1].worker_id == "wd"
    world.run_to_the_end()


def test_a_coordinator_that_was_asleep_accuses_nobody() -> None:
    world = World(config(), PIPELINE)
    world.pause_at = 1
    world.start()
    for fake in world.fakes.values():
        fake.mute = True
    world.tick()
    world.tick(seconds=600.0)
    assert len(world.core.members) == 4


def test_a_stage_without_holder_waits_and_goes_on_from_the_checkpoint() -> None:
    world = World(config(checkpoint={"every": 1}), {"wa": (0, 1), "wb": (2, 2)})
    world.pause_at = 3
    world.start()
    wb = world.fakes[WorkerId("wb")]
    wb.mute = True
    world.feed(WorkerDisconnected(wb.session, wb.worker_id))
    world.go_on()
    for _ in range(10):
        world.tick()
    assert world.core.phase.value == "gathering"
    assert "stage 2 has no holder" in world.core.waiting_words()
    assert received(world.fakes[WorkerId("wa")], Standby)
    world.join("wb")
    world.run_to_the_end()
    assert world.core.state.samples_trained == 32
    assert received(world.fakes[WorkerId("wa")], Assignment)[-1].version == 1


def test_an_engine_restart_is_a_new_incarnation() -> None:
    world = World(config(), PIPELINE)
    world.pause_at = 1
    world.start()
    wd = world.fakes[WorkerId("wd")]
    before = wd.incarnation
    world.feed(WorkerSaid(wd.session, wd.worker_id, EngineDown("signal 9", True)))
    world.go_on()
    assert wd.incarnation == before + 1
    assert WorkerId("wd") not in world.core.state.spans
    world.run_to_the_end()


def test_a_replica_that_leaves_goes_at_the_next_boundary() -> None:
    world = World(config(), PIPELINE)
    world.pause_at = 1
    world.start()
    wd = world.fakes[WorkerId("wd")]
    world.feed(WorkerSaid(wd.session, wd.worker_id, Leaving("SIGTERM", 60)))
    assert wd.finished is None
    world.go_on()
    assert wd.finished is not None
    assert not wd.finished.done
    world.run_to_the_end()


def test_a_last_holder_leaves_only_after_its_state_is_saved() -> None:
    world = World(config(), {"wa": (0, 1), "wb": (2, 2)})
    world.save_at_once = False
    world.pause_at = 1
    world.start()
    wb = world.fakes[WorkerId("wb")]
    world.feed(WorkerSaid(wb.session, wb.worker_id, Leaving("SIGTERM", 60)))
    world.go_on()
    world.tick()
    assert wb.finished is None
    # Not at the end of the step: the version that is there, so that it is quick.
    assert [save.version for save in world.saves] == [1]
    assert "leave without loss" in world.core.waiting_words()
    world.feed(CheckpointSaved(1, "checkpoints/1", 1))
    assert wb.finished is not None
    world.save_at_once = True
    del world.fakes[wb.worker_id]
    world.join("wb")
    world.run_to_the_end()
    assert world.core.state.samples_trained == 32


def test_a_digest_that_differs_voids_the_attempt_and_the_odd_one_is_dropped() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)})
    world.pause_at = 1
    world.start()
    world.fakes[WorkerId("wb")].digest_offset = 1
    world.go_on()
    assert world.closed[-1].worker_id == "wb"
    assert len(received(world.fakes[WorkerId("wa")], StepRestarted)) >= 3
    world.run_to_the_end()


def test_attempts_are_bounded() -> None:
    world = World(config(), {"wa": (0, 2), "wb": (0, 2)})
    world.pause_at = 1
    world.start()
    world.fakes[WorkerId("wb")].digest_offset = 1
    world.go_on()
    assert world.ended is not None
    assert world.ended.exit_code == 1
    assert "disagree" in world.ended.reason


def test_stop_ends_in_order_and_a_larger_job_continues() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.start()
    world.feed(StopRequested("enough"))
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0


def test_state_is_the_fold_of_its_records() -> None:
    world = World(config(), PIPELINE)
    world.start()
    world.run_to_the_end()
    again = Core.restore(
        world.config, None, tuple(record_from_json(record_to_json(r)) for r in world.records)
    )
    assert again.state == world.core.state
    assert Core.restore(world.config, world.core.snapshot()).state == world.core.state


def test_refusals_name_the_field_and_the_fix() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.boot()
    hellos = {
        Refusal.VERSION: Hello(WorkerId("wx"), 7, 9, "9.0"),
        Refusal.JOB_MISMATCH: Hello(WorkerId("wx"), 1, 1, "0.1", job_digest="abc"),
    }
    for number, (refusal, hello) in enumerate(hellos.items()):
        world.feed(WorkerConnected(100 + number, hello))
        assert world.closed[-1].refusal is refusal
        assert len(world.closed[-1].message) > 40
    assert world.core.members == {}


def test_messages_of_an_old_stream_are_dropped_and_counted() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.start()
    before = world.core.dropped_messages
    world.feed(WorkerSaid(4711, WorkerId("wa"), Leaving("forged", 1)))
    assert world.core.dropped_messages == before + 1


def test_assignments_say_who_exchanges_with_whom() -> None:
    world = World(config(), PIPELINE)
    world.start()
    assignment = received(world.fakes[WorkerId("wc")], Assignment)[0]
    assert {(p.worker_id, p.group) for p in assignment.gossip_peers} == {
        ("wa", "stage:0"),
        ("wa", "stage:1"),
        ("wb", "stage:2"),
        ("wd", "stage:2"),
    }
    assert {p.worker_id for p in assignment.peers} == {"wa", "wb", "wd"}


def test_the_core_needs_neither_grpc_nor_torch_nor_numpy() -> None:
    script = (
        "import sys, starlings_coordinator.core.core\n"
        "bad = {'grpc', 'torch', 'numpy', 'scipy', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
