"""What the core asks of the planner when the job fixes its cut, and that it takes no other answer."""

from __future__ import annotations

from starlings_protos.messages import Stage
from support.core_world import World, config


def test_listed_stages_are_the_cut_that_is_planned_with() -> None:
    world = World(config(pipeline={"stages": [1, 3, 2]}), {"wa": (0, 2)})
    world.stages = (Stage(0, 0), Stage(1, 3), Stage(4, 5))
    world.start()
    assert world.plan_requests[0].request.stages == world.stages
    assert world.core.state.stages == world.stages


def test_a_number_of_stages_is_left_to_the_planner_until_something_was_trained() -> None:
    world = World(config(pipeline={"stages": 3}), {"wa": (0, 2)})
    world.pause_at = 2
    world.start()
    first = world.plan_requests[0].request
    assert (first.stages, first.stages_wanted) == ((), 3)
    world.restart(versions=(0, 2))
    world.join("wb")
    for _ in range(200):
        world.tick()
    assert len(world.plan_requests) > 1
    last = world.plan_requests[-1].request
    assert last.stages == world.core.state.stages != ()
    assert last.stages_wanted == 0


def test_a_plan_of_another_number_of_stages_is_refused() -> None:
    world = World(config(pipeline={"stages": 2}), {"wa": (0, 2)}, stages=3)
    world.start()
    assert "3 stages, where the job demands 2" in world.core.waiting_words()
    world.stages = world._cut(2)
    world.spans = {w: type(s)(0, 1) for w, s in world.spans.items()}
    for _ in range(30):
        world.tick()
    world.run_to_the_end()
