"""Held-out text while training goes on: who evaluates what and when, and what becomes of trouble."""

from __future__ import annotations

import math
from typing import Any

import pytest

from starlings_coordinator.core.events import WorkerDisconnected
from starlings_coordinator.core.records import LiveEvaluated, record_from_json, record_to_json
from starlings_coordinator.core.state import snapshot_from_json, snapshot_to_json
from starlings_coordinator.core.streaming.streaming import Streaming
from starlings_protos.messages import (
    Hop,
    Lease,
    LeaseGrant,
    LeaseKind,
    LeaseRequest,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    WorkerId,
)
from support.core_world import Fake, World, config, received

FORWARD = (LeaseKind.EVALUATE, LeaseKind.EVALUATE_AVERAGE)


class Slow(World):
    """Forward-only leases are answered when the test says so."""

    held: list[tuple[Fake, Lease]]

    def _work(self, fake: Fake, lease: Lease) -> None:
        if lease.key.kind in FORWARD and self.core.phase.value == "training":
            self.held.append((fake, lease))
        else:
            super()._work(fake, lease)

    def answer(self, loss: float = 2.0, **changes: Any) -> MicrobatchKey:
        fake, lease = self.held.pop(0)
        key = changes.get("key", lease.key)
        route = changes.get("route", self.route(fake))
        targets = 64 * len(lease.samples)
        self.say(self.fakes[route[-1].worker_id], MicrobatchDone(key, route, loss * targets, targets))
        self.settle()
        return lease.key


def training(
    spans: dict[str, tuple[int, int]], steps: int = 20, evaluations: int = 4, **sections: Any
) -> Slow:
    job = {"name": "test", "tokens": steps * 8 * 64, "seed": 7}
    train = {"schedule": "async", "evaluations": evaluations}
    world = Slow(config(job=job, train=train, **sections), spans)
    world.held = []
    world.boot()
    for name in spans:
        world.join(name, lazy=True)
    for _ in range(6):
        if world.core.phase.value == "training":
            return world
        world.tick()
    raise AssertionError(world.core.waiting_words())


def advance(world: Slow, steps: int, name: str = "wa") -> None:
    """Acknowledged steps."""
    for _ in range(4 * steps):
        if not world.fakes[WorkerId(name)].leases:
            world.say(world.fakes[WorkerId(name)], LeaseRequest(4))
            world.settle()
        world.train(name, 1)
    world.tick(1.1)
    world.tick(0.1)


def pretend_averages(world: Slow) -> None:
    assert isinstance(world.core.schedule, Streaming)
    for rounds in world.core.schedule.exchanges.stages:
        rounds.book.rounds_averaged = 1


def evaluated(world: Slow) -> list[LiveEvaluated]:
    return [record for record in world.records if isinstance(record, LiveEvaluated)]


def test_evaluations_are_spread_over_the_job_and_training_goes_on() -> None:
    world = training({"wa": (0, 2), "wb": (0, 2)})
    steps = []
    for _ in range(19):
        advance(world, 1)
        while world.held:
            world.answer(3.0)
            world.tick(0.1)
        steps = [record.step for record in evaluated(world)]
    assert len(steps) == 4
    assert all(abs(step - at) <= 1 for step, at in zip(steps, (4, 8, 12, 16), strict=True)), steps
    assert world.core.phase.value == "training"
    status = world.core.status(world.now())
    assert [e.step for e in status.evaluations] == steps
    assert all(e.loss == 3.0 and not e.has_average for e in status.evaluations)
    assert status.evaluations[0].tokens == steps[0] * 8 * 64
    # In turns.
    assert {record.worker_id for record in evaluated(world)} == {"wa", "wb"}


def test_one_replica_first_and_then_an_average() -> None:
    world = training({"wa": (0, 2), "wb": (0, 2)})
    pretend_averages(world)
    advance(world, 4)
    keys = []
    while world.held:
        keys.append(world.answer(4.0 if world.held[0][1].key.kind is LeaseKind.EVALUATE else 3.5))
        world.tick(0.1)
    # Six held-out samples in microbatches of two.
    assert [key.kind for key in keys] == [LeaseKind.EVALUATE] * 3 + [LeaseKind.EVALUATE_AVERAGE] * 3
    (record,) = evaluated(world)
    assert (record.loss, record.average_loss) == (4.0, 3.5)
    assert record_from_json(record_to_json(record)) == record
    state = snapshot_from_json(snapshot_to_json(world.core.state))
    assert state.live_evaluations == world.core.state.live_evaluations
    said = [event.text for event in world.core.events if event.kind == "evaluation"]
    assert said[-1].endswith(
        f"4.0000 with weights of {record.worker_id}, 3.5000 with those that were averaged last"
    )


def test_only_a_few_leases_are_out_at_a_time_and_the_same_samples_each_time() -> None:
    world = training({"wa": (0, 2)}, evaluations=9)
    seen: list[tuple[int, ...]] = []
    for _ in range(2):
        advance(world, 2)
        assert len(world.held) == 2
        while world.held:
            seen.append(world.held[0][1].samples)
            world.answer()
            world.tick(0.1)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] == [(0, 1), (2, 3), (4, 5)]


def test_a_pipeline_is_evaluated_through_one_replica_of_each_stage() -> None:
    world = training({"wa": (0, 1), "wb": (2, 2), "wc": (2, 2)})
    advance(world, 4)
    assert {fake.worker_id for fake, _ in world.held} == {"wa"}
    world.answer(route=(Hop(WorkerId("wa"), 0, 1), Hop(WorkerId("wc"), 2, 2)))
    # Not of the leader's, or no way through all stages.
    for route in ((Hop(WorkerId("wc"), 2, 2),), (Hop(WorkerId("wa"), 0, 1),)):
        world.held.insert(0, world.held[0])
        before = world.core.refused_reports
        world.answer(route=route)
        assert world.core.refused_reports == before + 1
    while world.held:
        world.answer()
        world.tick(0.1)
    assert len(evaluated(world)) == 1


def test_when_who_evaluates_is_lost_another_one_does() -> None:
    world = training({"wa": (0, 2), "wb": (0, 2)})
    advance(world, 4, "wb")
    fake, _ = world.held[0]
    assert fake.worker_id == "wa"
    old = world.held.copy()
    world.held.clear()
    world.feed(WorkerDisconnected(fake.session, fake.worker_id))
    del world.fakes[WorkerId("wa")]
    world.tick(2.0)
    world.tick(0.1)
    assert {fake.worker_id for fake, _ in world.held} == {"wb"}
    while world.held:
        world.answer()
        world.tick(0.1)
    (record,) = evaluated(world)
    assert record.worker_id == "wb"
    assert old


def test_a_lease_is_tried_three_times_and_a_late_answer_counts_for_nothing() -> None:
    world = training({"wa": (0, 2)})
    advance(world, 4)
    fake, first = world.held[0]
    world.say(fake, MicrobatchFailed(first.key, "out of memory"))
    world.settle()
    world.tick(0.1)
    again = next(lease for _, lease in world.held[2:] if lease.key.index == first.key.index)
    assert again.key.attempt == 1
    dropped = world.core.dropped_messages
    world.answer()
    assert world.core.dropped_messages == dropped + 1
    while world.held:
        world.answer()
        world.tick(0.1)
    assert len(evaluated(world)) == 1


def test_what_nobody_answers_is_given_up_and_said() -> None:
    world = training({"wa": (0, 2)})
    advance(world, 4)
    for _ in range(3):
        world.tick(61.0)
    assert not evaluated(world)
    said = [event.text for event in world.core.events if event.kind == "evaluation"]
    assert said == ["step 4 is not evaluated, 3 tries failed: wa did not answer in time"]
    # The next one is another matter.
    world.held.clear()
    advance(world, 4)
    while world.held:
        world.answer()
        world.tick(0.1)
    assert len(evaluated(world)) == 1


def test_losses_that_are_not_finite_are_no_record() -> None:
    world = training({"wa": (0, 2)})
    advance(world, 4)
    while world.held:
        world.answer(math.nan)
        world.tick(0.1)
    assert not evaluated(world)
    assert any("is not finite" in event.text for event in world.core.events)


@pytest.mark.parametrize("evaluations", [0, 4])
def test_the_end_waits_for_no_evaluation(evaluations: int) -> None:
    world = training({"wa": (0, 2)}, steps=5, evaluations=evaluations)
    advance(world, 4)
    assert bool(world.held) == bool(evaluations)
    late = list(world.held)
    world.tick(1.1)
    for _ in range(8):
        if world.core.phase.value == "training":
            advance(world, 1)
    for fake, lease in late:
        done = MicrobatchDone(lease.key, world.route(fake), 1.0, 128)
        world.say(world.fakes[WorkerId("wa")], done)
    world.held.clear()
    world.run_to_the_end()
    assert world.core.state.validation_loss == 2.0
    assert not evaluated(world)


def test_after_a_restart_what_was_evaluated_is_known_and_nothing_twice() -> None:
    world = training({"wa": (0, 2)})
    advance(world, 4)
    while world.held:
        world.answer()
        world.tick(0.1)
    (record,) = evaluated(world)
    world.restart()
    world.reconnect("wa")
    for _ in range(4):
        world.tick()
    assert [e.step for e in world.core.state.live_evaluations] == [record.step]
    assert not world.held
    grants = [g for g in received(world.fakes[WorkerId("wa")], LeaseGrant) if g.leases[0].key.kind in FORWARD]
    assert len(grants) == 3
