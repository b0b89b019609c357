"""A worker that has no memory for its span after all: it is planned with less, and says why it stands by."""

from __future__ import annotations

from starlings_coordinator.core.members import MemberState
from starlings_coordinator.core.overfull import LESS
from starlings_coordinator.core.reasons import why
from starlings_coordinator.core.records import PlanDropped, SamplesQuarantined, WorkerMeasured
from starlings_protos.messages import LeaseKind, MicrobatchFailed, MicrobatchKey, Standby, WorkerId
from support.core_world import World, config, received
from support.streaming_world import PIPELINE, lazy_world

# As World.plan gives everybody.
GIVEN = 1000


def overfill(world: World, name: str) -> None:
    fake = world.fakes[WorkerId(name)]
    lease = next(f.leases[0] for f in world.fakes.values() if f.leases)
    world.say(fake, MicrobatchFailed(lease.key, "CUDA out of memory", out_of_memory=True))
    world.settle()


def test_one_of_several_stands_by_is_planned_with_less_and_nobody_stops() -> None:
    world = lazy_world()
    asked = len(world.plan_requests)
    overfill(world, "wd")
    member = world.core.members[WorkerId("wd")]
    assert member.state is MemberState.STANDBY
    assert member.probe is not None
    assert member.probe.memory_bytes == int(LESS * GIVEN)
    assert "no memory for stage 2, not even for one row at a time" in member.reason
    assert received(world.fakes[WorkerId("wd")], Standby)
    assert WorkerId("wd") not in world.core.state.spans
    assert world.core.phase.value == "training"
    assert any(e.kind == "out_of_memory" and e.text.startswith("wd") for e in world.core.events)
    assert "not even for one row" in " ".join(
        b.text for b in why(world.core, WorkerId("wd"), world.now()).because
    )
    for _ in range(6):
        world.tick()
        for name in ("wa", "wc"):
            world.train(name)
    later = world.plan_requests[asked:]
    assert later, "the planner is asked for another span"
    memory = {w.worker_id: w.memory_bytes for w in later[-1].request.workers}
    assert memory[WorkerId("wd")] == int(LESS * GIVEN)
    assert not any(isinstance(r, SamplesQuarantined) for r in world.records)


def test_a_restarted_coordinator_knows_it() -> None:
    world = lazy_world()
    overfill(world, "wd")
    measured = [r for r in world.records if isinstance(r, WorkerMeasured) and r.worker_id == "wd"]
    assert measured[-1].probe.memory_bytes == int(LESS * GIVEN)
    world.restart()
    world.reconnect("wd")
    member = world.core.members[WorkerId("wd")]
    assert member.probe is not None
    assert member.probe.memory_bytes == int(LESS * GIVEN)


def test_in_sync_the_step_goes_on_without_it() -> None:
    world = World(config(job={"name": "t", "tokens": 12 * 8 * 64, "seed": 7}), PIPELINE)
    world.pause_at = 3
    world.start()
    fake = world.fakes[WorkerId("wd")]
    state = world.core.state
    failed = MicrobatchFailed(MicrobatchKey(LeaseKind.TRAIN, state.step, state.attempt, 0), "no memory", True)
    world.say(fake, failed)
    world.go_on()
    world.run_to_the_end()
    assert world.ended is not None
    assert world.ended.exit_code == 0
    assert world.core.state.samples_lost == 0
    assert "no memory" in next(e.text for e in world.core.events if e.kind == "out_of_memory")


def test_the_only_holder_of_a_stage_is_planned_anew_with_less() -> None:
    world = lazy_world(spans={"wa": (0, 1), "wb": (2, 2)})
    overfill(world, "wb")
    assert any(isinstance(r, PlanDropped) for r in world.records)
    for _ in range(8):
        world.tick()
    memory = {w.worker_id: w.memory_bytes for w in world.plan_requests[-1].request.workers}
    assert memory[WorkerId("wb")] == int(LESS * GIVEN)
