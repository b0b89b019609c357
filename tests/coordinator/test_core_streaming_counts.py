"""What an `async` job counts as trained twice, and as gone with a replica: at most so much, and no more."""

from __future__ import annotations

from starlings_coordinator.core.events import WorkerDisconnected, WorkerSaid
from starlings_coordinator.core.records import (
    ReplicasShared,
    SamplesRepeated,
    record_from_json,
    record_to_json,
)
from starlings_protos.messages import (
    EngineDown,
    LeaseRequest,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    WorkerId,
)
from starlings_protos.stream_messages import LeasesReturned
from support.core_world import World
from support.streaming_world import lazy_world, trained

# What a worker may hold: four slots of two samples each.
SLOTS = 4 * 2
PAIR = {"wa": (0, 2), "wb": (0, 2)}


def ask(world: World, name: str, count: int) -> None:
    world.say(world.fakes[WorkerId(name)], LeaseRequest(count))
    world.settle()


def lose(world: World, name: str, reason: str = "test") -> None:
    world.core.membership.lose(world.core.members[WorkerId(name)], reason)
    world.tick(0.1)


def lease_all(world: World, name: str) -> None:
    """Until it has got at least once what others had."""
    for _ in range(40):
        ask(world, name, 64)
        world.train(name, 64)
        world.tick(1.1)


def test_of_a_large_store_of_leases_only_what_was_in_flight_is_repeated() -> None:
    world = lazy_world(spans=PAIR)
    ask(world, "wa", 64)
    assert len(world.fakes[WorkerId("wa")].leases) > 40
    world.train("wa", 2)
    world.say(world.fakes[WorkerId("wa")], EngineDown("out of memory", restarting=False))
    world.settle()
    lease_all(world, "wb")
    assert world.core.state.samples_repeated == SLOTS
    assert len(set(trained(world))) == len(trained(world))


def test_who_was_silent_before_it_was_lost_may_have_gone_on_at_its_pace() -> None:
    world = lazy_world(spans=PAIR)
    ask(world, "wa", 64)
    for _ in range(10):
        world.train("wa", 1)
        world.tick(1.0)
    wa = world.fakes[WorkerId("wa")]
    world.feed(WorkerDisconnected(wa.session, wa.worker_id))
    wa.mute = True
    for _ in range(12):
        world.tick(0.5)
        if wa.worker_id not in world.core.members:
            break
    assert wa.worker_id not in world.core.members
    lease_all(world, "wb")
    # Two samples a second for some seconds, doubled.
    assert SLOTS + 4 <= world.core.state.samples_repeated <= SLOTS + 4 * 6


def test_leases_that_were_never_begun_are_not_repeated_and_failed_ones_are() -> None:
    world = lazy_world(spans=PAIR)
    wa = world.fakes[WorkerId("wa")]
    failed, *rest = [lease.key for lease in wa.leases]
    world.say(wa, MicrobatchFailed(failed, "the way was blocked"))
    world.feed(WorkerSaid(wa.session, wa.worker_id, Leaving("ctrl-c", 60.0)))
    world.say(wa, LeasesReturned(tuple(rest)))
    world.settle()
    wa.leases = []
    lease_all(world, "wb")
    assert world.core.state.samples_repeated == 2


def test_who_is_lost_in_the_middle_of_routes_makes_stages_behind_it_add_twice() -> None:
    world = lazy_world(spans={"wa": (0, 0), "wb": (1, 1), "wc": (2, 2), "wd": (1, 1)})
    assert len(world.fakes[WorkerId("wa")].leases) == 4
    lose(world, "wd")
    (record,) = [r for r in world.records if isinstance(r, SamplesRepeated)]
    assert (record.worker_id, record.samples) == (WorkerId("wd"), SLOTS)
    assert record_from_json(record_to_json(record)) == record
    world.restart(1.0)
    assert world.core.state.samples_repeated == SLOTS


def test_behind_the_last_stage_is_nobody() -> None:
    world = lazy_world()
    lose(world, "wb")
    assert world.core.state.samples_repeated == 0


def test_what_is_lost_with_all_weights_is_not_repeated_and_no_word_of_it_counts() -> None:
    """Its report was on the way when training went back to version 0."""
    world = lazy_world(spans={"wa": (0, 1), "wb": (2, 2)})
    wa = world.fakes[WorkerId("wa")]
    lease = wa.leases[0]
    late = MicrobatchDone(lease.key, world.route(wa), 128.0, 128)
    lose(world, "wb")
    assert world.core.phase.value == "gathering"
    world.join("wb", lazy=True)
    for _ in range(6):
        world.tick()
    assert world.core.phase.value == "training"
    dropped = world.core.dropped_messages
    world.say(wa, late)
    world.settle()
    world.tick(1.1)
    assert world.core.state.samples_trained == 0
    assert world.core.dropped_messages == dropped + 1
    assert wa.worker_id in world.core.members, "nobody's fault"
    lease_all(world, "wa")
    assert world.core.state.samples_repeated == 0


def test_what_a_replica_has_alone_is_known_after_a_restart() -> None:
    world = lazy_world(spans=PAIR)
    world.train("wa", 4)
    world.tick(1.1)
    ask(world, "wa", 4)
    world.train("wa", 1)
    world.tick(1.1)
    assert world.core.state.samples_trained == 10
    world.restart(1.0)
    for name in PAIR:
        world.reconnect(name)
    lose(world, "wa")
    # Of the tenth no point of the curve has said whose it was.
    assert world.core.state.samples_unmerged == 10
    lose_again = world.core.schedule
    assert lose_again.contributions.unmerged(WorkerId("wb")) == 2  # type: ignore[attr-defined]


def test_what_others_have_too_is_written_down_and_not_lost_with_it() -> None:
    world = lazy_world(spans=PAIR)
    world.train("wa", 4)
    world.tick(1.1)
    contributions = world.core.schedule.contributions  # type: ignore[attr-defined]
    fragments = world.config.job.pair_rules.fragments if world.config.job.pair_rules else 1
    for stage in range(3):
        for fragment in range(fragments):
            contributions.merged(WorkerId("wa"), stage, fragment, 6)
    assert not [r for r in world.records if isinstance(r, ReplicasShared)]
    for _ in range(35):
        world.tick(1.0)
    (record,) = [r for r in world.records if isinstance(r, ReplicasShared)]
    assert record.tokens == ((WorkerId("wa"), 6 * 64),)
    assert record_from_json(record_to_json(record)) == record
    world.restart(1.0)
    for name in PAIR:
        world.reconnect(name)
    lose(world, "wa")
    assert world.core.state.samples_unmerged == 2


def test_a_new_life_begins_with_what_others_have() -> None:
    world = lazy_world(spans=PAIR)
    world.train("wa", 4)
    world.tick(1.1)
    lose(world, "wa")
    assert world.core.state.samples_unmerged == 8
    world.join("wa", lazy=True)
    for _ in range(5):
        world.tick()
    world.train("wb", 4)
    world.tick(1.1)
    world.tick(1.1)
    assert WorkerId("wa") in world.core.state.spans
    assert world.core.state.shared_tokens[WorkerId("wa")] == 8 * 64
    world.restart(1.0)
    for name in PAIR:
        world.reconnect(name)
    lose(world, "wa")
    assert world.core.state.samples_unmerged == 8
