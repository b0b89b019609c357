"""The core of an `async` job: leases, progress, losses, copies, newcomers, restarts, the end. Fakes train at once."""

from __future__ import annotations

import math
import sys

from starlings_coordinator.core.events import StopRequested, WorkerDisconnected, WorkerSaid
from starlings_coordinator.core.records import (
    CheckpointRecorded,
    StreamAdvanced,
    record_from_json,
    record_to_json,
)
from starlings_protos.messages import (
    Assignment,
    ExchangeOpened,
    ExchangePurpose,
    Hop,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Retain,
    StateWanted,
    StepRestarted,
    WorkerId,
)
from starlings_protos.stream_messages import (
    LeasesReturned,
    MicrobatchVoided,
    StageReport,
    StageSteps,
    SwarmProgress,
    TrainingPaused,
)
from support.core_world import World, received
from support.streaming_world import PIPELINE, lazy_world, streaming, trained


def test_a_job_runs_from_gathering_to_done() -> None:
    world = World(streaming(), PIPELINE)
    world.start()
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    state = world.core.state
    assert state.step == 4
    assert 32 <= state.samples_trained < 32 + 2 * 4 * 2
    assert len(set(trained(world))) == len(trained(world)) == state.samples_trained
    assert (state.leased.blocks, state.samples_unmerged) == ({}, 0)
    status = world.core.status(world.now())
    assert math.isclose(status.loss, 1.0)
    assert math.isclose(status.validation_loss, 2.0)
    assert status.samples_lost == 0
    credited = {worker.worker_id: worker.tokens for worker in status.workers}
    assert sum(credited.values()) >= state.samples_trained * 64
    assert not received(world.fakes[WorkerId("wa")], StepRestarted)


def test_replicas_are_averaged_once_before_evaluation() -> None:
    world = World(streaming(), PIPELINE)
    world.start()
    world.run_to_the_end()
    for fake in world.fakes.values():
        (paused,) = received(fake, TrainingPaused)
        (opened,) = received(fake, ExchangeOpened)
        assert (opened.purpose, opened.step) == (ExchangePurpose.STATE, paused.version)
        groups = {group.group: [m.weight for m in group.members] for group in opened.groups}
        assert all(math.isclose(sum(weights), 1.0) for weights in groups.values())
    assert [save.version for save in world.saves] == [4]


def test_a_block_is_cut_into_microbatches_whose_denominator_is_constant() -> None:
    world = lazy_world(train={"inner_batch": 3})
    leases = [lease for grant in received(world.fakes[WorkerId("wa")], LeaseGrant) for lease in grant.leases]
    assert len(leases) == 4
    assert {lease.loss_denominator for lease in leases} == {3 * 2 * 64.0}
    assert [lease.key.index for lease in leases] == [0, 1, 2, 3]
    others = [lease for grant in received(world.fakes[WorkerId("wc")], LeaseGrant) for lease in grant.leases]
    samples = [sample for lease in (*leases, *others) for sample in lease.samples]
    assert len(set(samples)) == len(samples) == 16


def test_a_large_wish_is_granted_by_what_is_left() -> None:
    world = lazy_world(steps=10, spans={"wa": (0, 2), "wb": (0, 2)})
    wa = world.fakes[WorkerId("wa")]
    world.say(wa, LeaseRequest(1000))
    world.settle()
    # 40 microbatches are left, and two workers lease: a quarter for each at once.
    assert len(wa.leases) == 10
    world.train("wa", 8)
    world.say(wa, LeaseRequest(1000))
    world.settle()
    assert len(wa.leases) == 8


def test_who_asks_again_and_again_gets_no_more_than_it_can_keep() -> None:
    world = lazy_world(steps=10**6, spans={"wa": (0, 2)})
    wa = world.fakes[WorkerId("wa")]
    for _ in range(5):
        world.say(wa, LeaseRequest(1000))
        world.settle()
    assert len(wa.leases) <= 1024
    blocks = len(world.core.state.leased.blocks)
    for _ in range(100):
        world.train("wa", 1)
        world.say(wa, LeaseRequest(1000))
        world.settle()
    # No block for each microbatch that is done.
    assert len(world.core.state.leased.blocks) <= blocks


def test_the_end_waits_for_nobody() -> None:
    """One worker has leased and hangs; the other goes on with other samples until the budget is spent."""
    world = lazy_world(steps=2, spans={"wa": (0, 2), "wb": (0, 2)})
    for _ in range(20):
        if world.core.phase.value != "training":
            break
        world.train("wa", 1)
        world.tick()
    assert world.core.state.step == 2
    assert world.core.state.samples_trained == 16
    assert not world.core.state.leased.blocks


def test_progress_is_told_and_losses_are_recorded() -> None:
    world = lazy_world()
    world.train("wa", 4)
    world.train("wc", 4)
    world.tick(1.1)
    world.tick(1.1)
    records = [r for r in world.records if isinstance(r, StreamAdvanced)]
    assert [(r.step, r.loss) for r in records] == [(2, 1.0)]
    assert all(record_from_json(record_to_json(r)) == r for r in records)
    told = received(world.fakes[WorkerId("wb")], SwarmProgress)
    assert told[-1].tokens == 16 * 64
    assert told[-1].tokens_per_s > 0


def test_the_gradient_norm_is_over_all_stages() -> None:
    world = lazy_world()
    assert world.core.schedule is not None
    world.say(world.fakes[WorkerId("wa")], StageReport((StageSteps(0, 1, 4.0), StageSteps(1, 1, 1.0))))
    world.say(world.fakes[WorkerId("wb")], StageReport((StageSteps(2, 1, 2.0), StageSteps(0, 1, 1e9))))
    world.say(world.fakes[WorkerId("wd")], StageReport((StageSteps(2, 1, 6.0), StageSteps(2, 1, math.inf))))
    world.tick(1.1)
    world.tick(1.1)
    told = received(world.fakes[WorkerId("wa")], SwarmProgress)
    assert math.isclose(told[-1].gradient_norm, math.sqrt(4.0 + 1.0 + 4.0))


def test_a_lost_leader_gives_its_samples_back_and_nothing_is_restarted() -> None:
    world = lazy_world()
    lost = world.fakes[WorkerId("wc")]
    samples = {s for lease in lost.leases for s in lease.samples}
    world.train("wa", 1)
    world.feed(WorkerDisconnected(lost.session, lost.worker_id))
    del world.fakes[WorkerId("wc")]
    world.tick(2.0)
    assert world.core.phase.value == "training"
    wa = world.fakes[WorkerId("wa")]
    assert received(wa, Assignment)[-1].attempt == 0
    assert not received(wa, StepRestarted)
    world.train("wa", 3)
    world.say(wa, LeaseRequest(4))
    world.settle()
    again = {s for lease in wa.leases for s in lease.samples}
    assert samples <= again
    assert world.core.state.leased.samples_repeated == len(samples)


def test_work_of_a_lost_replica_is_counted() -> None:
    world = lazy_world()
    done = world.train("wa", 3)
    assert len(done) == 3
    world.tick(1.1)
    member = world.core.members[WorkerId("wb")]
    world.core.membership.lose(member, "test")
    world.tick(0.1)
    assert world.core.state.samples_unmerged == 6
    assert world.core.state.samples_trained == 6


def test_a_stage_without_holder_costs_what_came_after_the_checkpoint_and_no_sample_is_trained_again() -> None:
    world = lazy_world(spans={"wa": (0, 1), "wb": (2, 2)}, checkpoint={"every": 1})
    world.train("wa", 4)
    world.tick(1.1)
    world.tick()
    assert [r.version for r in world.records if isinstance(r, CheckpointRecorded)] == [1]
    world.save_at_once = False
    world.train("wa", 6)
    world.tick(1.1)
    assert world.core.state.step == 2
    world.feed(WorkerDisconnected(world.fakes[WorkerId("wb")].session, WorkerId("wb")))
    world.tick(3.0)
    assert world.core.phase.value == "gathering"
    before = set(trained(world))
    world.join("wb", lazy=True)
    for _ in range(5):
        world.tick()
    assert world.core.phase.value == "training"
    state = world.core.state
    # It was leased, so it may be trained again: only what was acknowledged is spent.
    assert (state.step, state.samples_trained, state.samples_unmerged) == (1, 8, len(before) - 8)
    wa = world.fakes[WorkerId("wa")]
    assert received(wa, Assignment)[-1].version == 1
    assert received(wa, Assignment)[-1].base_plan_version == received(wa, Assignment)[-1].plan_version
    world.train("wa", 4)
    world.tick(1.1)
    assert state.samples_trained == 16
    assert len(set(trained(world))) == len(trained(world))


def test_a_failed_microbatch_is_voided_everywhere_and_leased_again() -> None:
    world = lazy_world(spans={"wa": (0, 1), "wb": (2, 2)})
    lease = world.fakes[WorkerId("wa")].leases.pop(0)
    world.say(world.fakes[WorkerId("wb")], MicrobatchFailed(lease.key, "out of memory"))
    world.settle()
    for fake in world.fakes.values():
        assert received(fake, MicrobatchVoided) == [MicrobatchVoided((lease.key,))]
    world.train("wa", 3)
    world.tick(1.1)
    world.say(world.fakes[WorkerId("wa")], LeaseRequest(8))
    world.settle()
    assert any(other.samples == lease.samples for other in world.fakes[WorkerId("wa")].leases)


def test_nonsense_is_refused_and_costs_its_sender_its_place() -> None:
    world = lazy_world(spans={"wa": (0, 2), "wb": (0, 2)})
    wa = world.fakes[WorkerId("wa")]
    key, route = wa.leases[0].key, (Hop(WorkerId("wa"), 0, 2),)
    unknown = MicrobatchKey(LeaseKind.TRAIN, 0, 99, 0)
    world.say(wa, MicrobatchDone(unknown, route, 1.0, 128))
    world.settle()
    assert world.core.dropped_messages == 1
    for message in (
        MicrobatchDone(key, route, 1.0, 127),
        MicrobatchDone(key, (Hop(WorkerId("wa"), 0, 1),), 1.0, 128),
        MicrobatchDone(key, (Hop(WorkerId("wb"), 0, 2),), 1.0, 128),
    ):
        assert world.core.members[WorkerId("wa")].here
        world.say(wa, message)
        world.settle()
    assert WorkerId("wa") not in world.core.members
    assert world.core.state.samples_trained == 0
    assert world.core.phase.value == "training"


def test_a_report_counts_once_however_often_it_comes() -> None:
    world = lazy_world(spans={"wa": (0, 2)})
    wa = world.fakes[WorkerId("wa")]
    (lease, *_) = wa.leases
    message = MicrobatchDone(lease.key, (Hop(WorkerId("wa"), 0, 2),), 128.0, 128)
    for _ in range(3):
        world.say(wa, message)
        world.settle()
        world.tick(1.1)
    assert world.core.state.samples_trained == 2
    world.train("wa", 4)
    world.tick(1.1)
    assert [r.credits for r in world.records if isinstance(r, StreamAdvanced)] == [(("wa", 8 * 64),)]


def test_checkpoints_are_copies_made_while_training_goes_on() -> None:
    world = lazy_world(checkpoint={"every": 2})
    world.save_at_once = False
    world.train("wa", 4)
    world.train("wc", 4)
    world.tick(1.1)
    world.tick(0.1)
    (save,) = world.saves
    assert save.version == 2
    donors = {block: [p.worker_id for p in peers] for block, peers, _ in save.donors}
    assert donors == {block: [donors[block][0]] for block in world.config.profile.block_names}
    asked = {w for w, fake in world.fakes.items() if received(fake, StateWanted)}
    assert asked == {WorkerId("wa"), WorkerId("wb")}
    assert all(digest.endswith(f"@{2}") for _, _, digest in save.donors)
    assert world.core.phase.value == "training"


def test_a_newcomer_copies_a_donor_and_holds_its_span_at_once() -> None:
    world = lazy_world()
    world.spans[WorkerId("we")] = world.spans[WorkerId("wc")]
    world.join("we", lazy=True)
    for _ in range(4):
        world.tick()
    we = world.fakes[WorkerId("we")]
    assert not received(we, Assignment)
    world.train("wa", 4)
    world.tick(1.1)
    world.tick(0.1)
    first, *_, last = received(we, Assignment)
    assert (first.observer, first.version, last.observer) == (True, 1, False)
    # One of each stage, and not the keeper: whatever else has that stage is another replica.
    donors = [p.worker_id for p in first.donors]
    assert donors == [WorkerId("wa"), WorkerId("wb")]
    assert WorkerId("we") in world.core.state.spans
    for donor in donors:
        assert received(world.fakes[donor], Retain)[-1] == Retain()
    assert not received(world.fakes[WorkerId("wa")], StepRestarted)
    world.tick(1.1)
    assert we.leases


def test_a_restart_goes_on_with_what_is_leased() -> None:
    world = lazy_world()
    leases = list(world.fakes[WorkerId("wa")].leases)
    world.train("wa", 1)
    world.tick(1.1)
    world.restart(20.0)
    for name in PIPELINE:
        world.reconnect(name)
    assert world.core.phase.value == "training"
    wa = world.fakes[WorkerId("wa")]
    assert not received(wa, StepRestarted)
    world.train("wa", 3)
    world.tick(1.1)
    assert world.core.state.samples_trained == 8
    assert set(trained(world)) == {(0, p) for p in range(8)}
    assert [lease.key.attempt for lease in leases] == [leases[0].key.attempt] * 4


def test_stop_ends_with_what_there_is() -> None:
    world = lazy_world()
    world.train("wa", 4)
    world.tick(1.1)
    world.feed(StopRequested("enough"))
    world.settle()
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert [save.version for save in world.saves] == [1]


def test_who_leaves_gives_back_its_leases_and_goes_when_it_has_none() -> None:
    world = lazy_world()
    wc = world.fakes[WorkerId("wc")]
    world.feed(WorkerSaid(wc.session, wc.worker_id, Leaving("ctrl-c", 60.0)))
    world.settle()
    assert wc.finished is None
    rest = tuple(lease.key for lease in wc.leases[1:])
    world.say(wc, LeasesReturned(rest))
    world.settle()
    assert wc.finished is None
    world.train("wc", 1)
    world.tick(1.1)
    assert wc.finished is not None
    assert not wc.finished.done
    assert world.core.phase.value == "training"
    assert world.core.state.samples_trained == 2


def test_a_last_holder_goes_when_what_it_has_is_saved() -> None:
    world = lazy_world(spans={"wa": (0, 1), "wb": (2, 2)})
    wb = world.fakes[WorkerId("wb")]
    world.feed(WorkerSaid(wb.session, wb.worker_id, Leaving("ctrl-c", 60.0)))
    world.train("wa", 4)
    assert wb.finished is None
    world.tick(1.1)
    world.tick(0.1)
    assert wb.finished is not None
    assert [save.version for save in world.saves] == [1]
    assert world.core.phase.value == "gathering"


def test_replicas_that_differ_at_the_start_never_train() -> None:
    """Another seed, another first version: caught by its digest."""
    world = World(streaming(), {"wa": (0, 2), "wb": (0, 2), "wc": (0, 2)})
    world.boot()
    for name in world.spans:
        world.join(name, drifts=name == "wb")
    for _ in range(3):
        world.tick()
    assert WorkerId("wb") not in world.core.members
    assert any("loaded other weights" in event.text for event in world.core.events)
    assert world.core.state.samples_trained == 0 or world.core.state.spans.keys() == {"wa", "wc"}


def calls_of_a_report(workers: int) -> int:
    """Of Python functions, for one microbatch that is done and one more wish."""
    world = lazy_world(steps=10**5, spans={f"w{number:03d}": (0, 2) for number in range(workers)})
    for fake in world.fakes.values():
        world.say(fake, LeaseRequest(16))
    world.settle()
    for name in world.spans:
        world.train(name, 1)
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    fake = world.fakes[WorkerId("w003")]
    world._work(fake, fake.leases.pop(0))
    events, world._queue = world._queue, []
    sys.setprofile(count)
    try:
        for event in events:
            world.core.handle(event, world.now())
    finally:
        sys.setprofile(None)
    return counted


def test_what_one_says_costs_no_look_at_all_the_others() -> None:
    """A thousand workers say something a thousand times a second."""
    assert 50 < calls_of_a_report(100) < 1.5 * calls_of_a_report(5)
