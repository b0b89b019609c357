"""What the coordinator says on the bus: everything once, nothing too often, and never more than a topic takes."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import replace

import pytest

from starlings_coordinator.bus.notices import (
    ABSENT_EVERY_S,
    FORGOTTEN_AFTER_S,
    FORGOTTEN_AT_ONCE,
    QUIET_EVERY_S,
    STEP_EVERY_S,
    WORDS_EVERY_S,
    Absent,
    Told,
    event_payload,
    plan_payload,
)
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.views import headline
from starlings_protos import bus_pb2
from starlings_protos.bus.payloads import LIMIT_BYTES, Form, decode
from starlings_protos.bus.topics import Kind, Topic
from starlings_protos.messages import Span, WorkerId
from starlings_protos.status import Event, LossPoint
from support.core_world import World, config


def world(**overrides: object) -> World:
    made = World(config(**overrides), {"a": (0, 1), "b": (2, 2)})  # type: ignore[arg-type]
    made.pause_at = 2
    made.start()
    return made


def plan(core: Core, form: Form = Form.PROTOBUF) -> bus_pb2.PlanNotice:
    payload = plan_payload(core, headline(core), 7.0, form)
    assert len(payload) <= LIMIT_BYTES[Kind.PLAN]
    notice = decode(Topic("test", Kind.PLAN), payload)
    assert isinstance(notice, bus_pb2.PlanNotice)
    return notice


@pytest.mark.parametrize("form", Form)
def test_the_plan_names_stages_and_who_holds_them(form: Form) -> None:
    notice = plan(world().core, form)
    assert (notice.plan_version, notice.phase, notice.step, notice.steps_total) == (1, "training", 2, 4)
    assert [(s.first_block, s.last_block) for s in notice.stages] == [(0, 1), (2, 3), (4, 5)]
    assert {h.worker_id: (h.span.first_stage, h.span.last_stage) for h in notice.holdings} == {
        "a": (0, 1),
        "b": (2, 2),
    }
    assert notice.holdings_left_out == 0


@pytest.mark.parametrize("form", Form)
def test_a_plan_of_ten_thousand_fits_and_says_how_many_it_leaves_out(form: Form) -> None:
    core = world().core
    core.state.spans.update({WorkerId(f"w{number:016x}"): Span(0, 2) for number in range(10_000)})
    notice = plan(core, form)
    assert len(notice.holdings) + notice.holdings_left_out == 10_002
    assert len(notice.holdings) > 300


@pytest.mark.parametrize("form", Form)
def test_a_flood_of_events_fits_and_the_newest_stay(form: Form) -> None:
    core = world().core
    events = [Event(n, 1.0, "lost", "\x7f" * 500) for n in range(1000)]
    losses = [LossPoint(n, 64 * n, 4.5, 1.0) for n in range(4000)]
    payload = event_payload(core, headline(core), events, losses, 7.0, form)
    notice = decode(Topic("test", Kind.EVENT), payload)
    assert isinstance(notice, bus_pb2.EventNotice)
    assert notice.events[-1].sequence == 999
    assert notice.losses[-1].step == 3999
    assert (notice.phase, notice.step, notice.tokens_total) == ("training", 2, 4 * 8 * 64)


def test_the_plan_is_told_when_it_changes_and_its_words_now_and_then() -> None:
    core, told = world().core, Told()
    head = headline(core)
    assert told.wants_plan(core, head, 0.0)
    assert not told.wants_plan(core, head, 1000.0)
    told.plan_at_s = 1000.0
    words = replace(head, waiting_for="something")
    assert not told.wants_plan(core, words, 1000.0 + WORDS_EVERY_S - 0.1)
    assert told.wants_plan(core, words, 1000.0 + WORDS_EVERY_S)
    later = replace(words, step=3)
    assert not told.wants_plan(core, later, 1000.0 + WORDS_EVERY_S + STEP_EVERY_S - 0.1)
    assert told.wants_plan(core, later, 1000.0 + WORDS_EVERY_S + STEP_EVERY_S)
    core.state.plan_version += 1
    assert told.wants_plan(core, later, 1000.0 + WORDS_EVERY_S + STEP_EVERY_S)


def test_every_event_and_every_loss_is_told_once() -> None:
    running, told = world(), Told()
    seen: list[int] = []
    steps: list[int] = []
    for second in range(40):
        news = told.news(running.core, headline(running.core), float(second))
        if news is not None:
            seen += [event.sequence for event in news[0]]
            steps += [point.step for point in news[1]]
        if second == 10:
            running.go_on()
        if second > 10:
            running.tick()
    assert running.ended is not None
    assert seen == [event.sequence for event in running.core.events]
    assert steps == [0, 1, 2, 3]
    # Nothing happens any more: now and then it is said that somebody is there.
    last = told.progress_at_s
    head = headline(running.core)
    assert told.news(running.core, head, last + QUIET_EVERY_S - 0.1) is None
    assert told.news(running.core, head, last + QUIET_EVERY_S) == ((), ())


def test_steps_that_are_trained_again_are_told_again() -> None:
    running, told = world(), Told()
    assert told.news(running.core, headline(running.core), 0.0) is not None
    running.core.state.step, running.core.state.loss_curve = 1, running.core.state.loss_curve[:1]
    told.news(running.core, headline(running.core), 1.0)
    running.core.state.loss_curve.append(LossPoint(1, 128, 3.0, 2.0))
    running.core.state.step = 2
    news = told.news(running.core, headline(running.core), 2.0)
    assert news is not None
    assert [point.step for point in news[1]] == [1]


def test_who_stays_away_is_forgotten_once_also_after_a_restart() -> None:
    running, absent = world(), Absent()
    running.now_s = 0.0
    core = running.core
    assert absent.due(core, 0.0) == ()
    gone = core.members.pop(WorkerId("b"))
    assert absent.due(core, 10.0) == ()
    assert absent.due(core, 10.0 + FORGOTTEN_AFTER_S - 0.1) == ()
    core.members[WorkerId("b")] = gone
    assert absent.due(core, 10.0 + FORGOTTEN_AFTER_S + ABSENT_EVERY_S) == ()
    del core.members[WorkerId("b")]
    assert absent.due(core, 1000.0) == ()
    assert absent.due(core, 1000.0 + FORGOTTEN_AFTER_S) == (WorkerId("b"),)
    assert absent.due(core, 1000.0 + FORGOTTEN_AFTER_S + ABSENT_EVERY_S) == ()
    core.members[WorkerId("b")] = gone
    assert absent.due(core, 2000.0) == ()
    # Another process on the same log knows whom the one before had admitted.
    del core.members[WorkerId("a")]
    again = Absent()
    assert again.due(core, 0.0) == ()
    assert again.due(core, FORGOTTEN_AFTER_S) == (WorkerId("a"),)


def test_many_are_forgotten_little_by_little() -> None:
    core, absent = world().core, Absent()
    core.state.incarnations.update({WorkerId(f"w{number:016x}"): 1 for number in range(200)})
    absent.due(core, 0.0)
    counts = [len(absent.due(core, FORGOTTEN_AFTER_S + second)) for second in range(6)]
    assert counts == [FORGOTTEN_AT_ONCE] * 3 + [200 - 3 * FORGOTTEN_AT_ONCE, 0, 0]


class _Counted(dict[WorkerId, int]):
    """Says how often somebody has looked through it."""

    looks = 0

    def keys(self) -> KeysView[WorkerId]:  # type: ignore[override]
        self.looks += 1
        return super().keys()


def test_a_large_swarm_is_not_looked_through_each_second() -> None:
    core, absent = world().core, Absent()
    core.state.incarnations = counted = _Counted(core.state.incarnations)
    del core.members[WorkerId("a")]
    told = [absent.due(core, float(second)) for second in range(int(FORGOTTEN_AFTER_S) + 20)]
    assert counted.looks <= len(told) / ABSENT_EVERY_S + 1
    (at_s,) = [second for second, due in enumerate(told) if due]
    assert told[at_s] == (WorkerId("a"),)
    assert FORGOTTEN_AFTER_S <= at_s <= FORGOTTEN_AFTER_S + ABSENT_EVERY_S
