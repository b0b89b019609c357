"""Saving on the way: never too often, never two at a time, tried again after a failure, and people are told."""

from __future__ import annotations

import random

from starlings_coordinator.core.events import CheckpointFailed, CheckpointSaved
from starlings_coordinator.core.save_pace import FULL_DISK_S, REST_PER_SAVE, RETRY_MOST_S, SavePace
from support.core_world import World, config

FULL = "The disk is full while writing a checkpoint to /x: free some space there or choose another place."


def test_saving_takes_a_quarter_of_the_time_at_most() -> None:
    rng = random.Random(5)
    pace, now_s, saving_s = SavePace(5.0), 0.0, 0.0
    for version in range(20_000):
        now_s += rng.uniform(0.01, 0.5)
        if pace.due(version, 1) and pace.may_begin(now_s):
            took_s = rng.uniform(0.1, 30.0)
            saving_s += took_s
            now_s += took_s
            pace.saved(now_s - took_s, now_s)
    assert 0.15 < saving_s / now_s <= 1 / (1 + REST_PER_SAVE) + 0.01


def test_a_checkpoint_that_was_due_too_early_is_made_up_for() -> None:
    pace = SavePace(5.0)
    pace.saved(0.0, 10.0)
    assert pace.due(10, 10)
    assert not pace.may_begin(20.0)
    pace.overdue = True
    assert pace.due(13, 10)
    assert pace.may_begin(40.0)
    pace.saved(40.0, 41.0)
    assert not pace.due(14, 10)


def test_failures_are_tried_again_later_and_later() -> None:
    pace, now_s, waits = SavePace(5.0), 0.0, []
    for _ in range(8):
        waits.append(pace.failed(4, FULL, now_s) - now_s)
        assert not pace.may_begin(now_s)
        now_s += waits[-1]
        assert pace.may_begin(now_s)
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, RETRY_MOST_S, RETRY_MOST_S, RETRY_MOST_S]
    assert pace.gives_up(1, 3, now_s)
    assert not pace.gives_up(9, 3, now_s)
    assert pace.gives_up(9, 3, FULL_DISK_S)


def test_a_full_disk_at_the_end_is_waited_for_and_said() -> None:
    world = World(config(), {"wa": (0, 2)})
    world.save_at_once = False
    world.start()
    for _ in range(5):
        asked = len(world.saves)
        assert world.saves[-1].version == 4
        world.feed(CheckpointFailed(4, FULL, 9))
        status = world.core.status(world.now())
        assert status.checkpoint_trouble == FULL
        assert FULL in status.waiting_for
        for _ in range(int(RETRY_MOST_S) + 2):
            world.tick(seconds=1.0)
            if len(world.saves) > asked:
                break
        assert len(world.saves) == asked + 1, "it is tried again, once"
    assert any(e.kind == "checkpoint_failed" and FULL in e.text for e in world.core.events)
    world.feed(CheckpointSaved(4, "/x/00000004", 1))
    world.settle()
    assert world.core.phase.value == "done"
    assert world.core.status(world.now()).checkpoint_trouble == ""


def test_training_goes_on_without_checkpoints_and_saves_again_when_there_is_room() -> None:
    world = World(config(checkpoint={"every": 1}), {"wa": (0, 2)})
    world.save_at_once = False
    world.pause_at = 2
    world.start()
    (first,) = world.saves
    world.feed(CheckpointFailed(first.version, FULL, 9))
    world.pause_at = 3
    world.settle()
    assert world.core.state.step == 3
    assert world.saves == [first], "not again at once"
    status = world.core.status(world.now())
    assert (status.checkpoint_trouble, status.waiting_for) == (FULL, "")
    world.save_at_once = True
    world.now_s += 6.0
    world.go_on()
    world.run_to_the_end()
    assert len(world.saves) > 1
    assert world.core.status(world.now()).checkpoint_trouble == ""
