"""The planner's real process behind its link: plans and advice, one at a time, and plans come first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from starlings_coordinator.core.advising import advice_request
from starlings_coordinator.core.events import Event, PlanComputed
from starlings_coordinator.planner_link import PlannerLink
from starlings_protos.advice_messages import AdviceRequest
from starlings_protos.errors import RefusedError
from support.coordinator_harness import until
from support.core_world import World
from support.streaming_world import lazy_world


class Linked:
    def __init__(self, world: World, tmp_path: Path) -> None:
        self.events: list[Event] = []
        self.link = PlannerLink(
            profile_json=world.config.profile.to_json(),
            log_path=tmp_path / "planner.log",
            post=self.events.append,
        )
        request = advice_request(world.core)
        assert isinstance(request, AdviceRequest)
        self.question = request
        self.plan = world.plan_requests[-1].request

    async def advise(self) -> int:
        """How many answers; asks again while the process is being started."""
        for _ in range(300):
            try:
                return len((await self.link.advise(self.question)).advice)
            except RefusedError:
                await asyncio.sleep(0.1)
        raise AssertionError("the planner never answers")


@pytest.fixture
async def linked(tmp_path: Path) -> AsyncIterator[Linked]:
    found = Linked(lazy_world(), tmp_path)
    running = asyncio.create_task(found.link.child.run())
    yield found
    await found.link.child.stop()
    await running


async def test_a_plan_that_is_wanted_while_advice_is_worked_out_comes_first(linked: Linked) -> None:
    assert await linked.advise() == 1
    waiting = asyncio.create_task(linked.link.advise(linked.question))
    await asyncio.sleep(0)
    with pytest.raises(RefusedError, match="at another question"):
        await linked.link.advise(linked.question)
    linked.link.compute(linked.plan)
    with pytest.raises(RefusedError, match="ask again"):
        await waiting
    await until(lambda: bool(linked.events), "the plan", 30)
    (event,) = linked.events
    assert isinstance(event, PlanComputed)
    assert event.reply.request_id == linked.plan.request_id
    assert await linked.advise() == 1, "and afterwards there is advice again"
