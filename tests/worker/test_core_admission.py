"""Admission: slots that cannot deadlock, headers that cannot lie."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from starlings_protos.messages import Receipt, Refusal, Span, WorkerId
from starlings_simulator.driver import Driver, assignment, forward_header, train_key
from starlings_simulator.plans import cover
from starlings_worker.core import admission
from starlings_worker.core.admission import (
    Duplicate,
    Rejection,
    boundaries_of,
    early_exits,
    inner_entries,
    lease_room,
    may_enter,
)
from starlings_worker.core.events import ArrivalAborted, Direction, MicrobatchArrived
from starlings_worker.core.router import PeerView, onward


def test_an_entry_leaves_a_slot_for_each_deeper_stage() -> None:
    span = Span(0, 2)
    assert lease_room(5, 0, span) == 3
    assert may_enter(5, 2, span, 0)
    assert not may_enter(5, 3, span, 0)
    assert may_enter(5, 3, span, 1)
    assert may_enter(5, 4, span, 2)
    assert not may_enter(5, 5, span, 2)


def test_only_where_spans_of_the_plan_begin_or_end_is_a_slot_kept() -> None:
    plan = [Span(0, 3), Span(0, 1), Span(2, 3)]
    assert boundaries_of(plan, 4) == {2}
    assert inner_entries(Span(0, 3), boundaries_of(plan, 4)) == [2]
    assert lease_room(3, 0, Span(0, 3), boundaries_of(plan, 4)) == 2
    replicas = [Span(0, 3), Span(0, 3)]
    assert lease_room(3, 0, Span(0, 3), boundaries_of(replicas, 4)) == 3


def test_fewer_slots_than_stages_reserve_nothing_but_forbid_exits_inside() -> None:
    span = Span(0, 2)
    assert not early_exits(2, span)
    assert lease_room(2, 0, span) == 2
    assert lease_room(1, 0, span) == 1


Enter = Callable[[int, int, Span, int, frozenset[int]], bool]


class SlotWorld:
    """Only slots: microbatches go forward through workers at random, holding a slot in each, until they end."""

    def __init__(self, rng: random.Random, enter: Enter) -> None:
        self.rng = rng
        self.enter = enter
        self.stage_count = rng.randint(2, 4)
        self.spans = cover(rng.randint(2, 4), self.stage_count, rng)
        self.boundaries = boundaries_of(self.spans, self.stage_count)
        ways_in = [1 + len(inner_entries(span, self.boundaries)) for span in self.spans]
        self.slots = [rng.choice([1, ways, ways, ways + 1]) for ways in ways_in]
        self.held = [0] * len(self.spans)
        # (route of workers, next stage, wanted next worker or None)
        self.away: list[tuple[list[int], int]] = []
        self.left_to_begin = 24

    def views(self, leave_out: list[int]) -> list[PeerView]:
        return [
            PeerView(WorkerId(str(index)), span, (1.0,) * len(span.stages))
            for index, span in enumerate(self.spans)
            if index not in leave_out
        ]

    def leads_on(self, stage: int, leave_out: list[int]) -> bool:
        return onward(self.stage_count, self.views(leave_out), ()).passable[stage]

    def run_through(self, route: list[int], worker: int, stage: int) -> None:
        """The worker computes to a random allowed exit; at the end everything on the route is freed."""
        span = self.spans[worker]
        exits = [span.last_stage]
        if early_exits(self.slots[worker], span, self.boundaries):
            exits += [
                entry - 1
                for entry in inner_entries(span, self.boundaries)
                if entry > stage and self.leads_on(entry, [*route, worker])
            ]
        exit_stage = self.rng.choice(exits)
        route = [*route, worker]
        if exit_stage == self.stage_count - 1:
            for visited in route:
                self.held[visited] -= 1
        else:
            self.away.append((route, exit_stage + 1))

    def step(self) -> bool:
        """One thing that can happen does, drawn at random; False when nothing can."""
        moves: list[tuple[int, int]] = []
        for number, (route, stage) in enumerate(self.away):
            for worker, span in enumerate(self.spans):
                if (
                    worker not in route
                    and stage in span
                    and self.enter(self.slots[worker], self.held[worker], span, stage, self.boundaries)
                    and self.leads_on(span.last_stage + 1, [*route, worker])
                ):
                    moves.append((number, worker))
        starts = [
            worker
            for worker, span in enumerate(self.spans)
            if 0 in span and self.enter(self.slots[worker], self.held[worker], span, 0, self.boundaries)
        ]
        if self.left_to_begin and starts and (not moves or self.rng.random() < 0.8):
            self.left_to_begin -= 1
            worker = self.rng.choice(starts)
            self.held[worker] += 1
            self.run_through([], worker, 0)
            return True
        if not moves:
            return False
        number, worker = self.rng.choice(moves)
        route, stage = self.away.pop(number)
        self.held[worker] += 1
        self.run_through(route, worker, stage)
        return True


def finishes(seed: int, enter: Enter) -> bool:
    world = SlotWorld(random.Random(seed), enter)
    while world.step():
        pass
    return not world.away and not world.left_to_begin


def test_no_order_of_events_deadlocks() -> None:
    assert all(finishes(seed, may_enter) for seed in range(400))


def test_without_reserved_slots_some_order_does() -> None:
    """The test above can fail: the rule is what prevents it."""
    assert not all(finishes(seed, lambda slots, held, *_: slots > held) for seed in range(400))


def test_a_push_reserves_its_slot_at_once_and_an_abort_frees_it() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2, slots=1))
    first = forward_header(train_key(0), 1, ("a", 0, 0))
    second = forward_header(train_key(1), 1, ("a", 0, 0))
    assert isinstance(driver.core.admit(Direction.FORWARD, first, WorkerId("a"), 0.0), Receipt)
    answer = driver.core.admit(Direction.FORWARD, second, WorkerId("a"), 0.0)
    assert isinstance(answer, Rejection)
    assert answer.refusal is Refusal.BUSY
    driver.handle(ArrivalAborted(Direction.FORWARD, first, WorkerId("a"), "reset"))
    assert isinstance(driver.core.admit(Direction.FORWARD, second, WorkerId("a"), 0.0), Receipt)


def test_a_second_copy_is_recognised_while_it_arrives_while_held_and_after_it_was_accumulated() -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 1), {"a": (0, 0)}, stages=2))
    header = forward_header(train_key(0), 1, ("a", 0, 0))
    assert isinstance(driver.core.admit(Direction.FORWARD, header, WorkerId("a"), 0.0), Receipt)
    again = driver.core.admit(Direction.FORWARD, header, WorkerId("a"), 0.0)
    assert isinstance(again, Rejection)
    assert again.refusal is Refusal.BUSY
    driver.handle(MicrobatchArrived(Direction.FORWARD, header, WorkerId("a")))
    assert isinstance(driver.push(Direction.FORWARD, header, "a"), Duplicate)
    driver.drain_device()
    assert isinstance(driver.push(Direction.FORWARD, header, "a"), Duplicate)


@pytest.mark.parametrize(
    ("header", "sender", "refusal"),
    [
        (forward_header(train_key(0), 1), "a", Refusal.MALFORMED),
        (forward_header(train_key(0), 1, ("a", 0, 0)), "b", Refusal.MALFORMED),
        (forward_header(train_key(0), 1, ("a", 1, 0)), "a", Refusal.MALFORMED),
        (forward_header(train_key(0), 2, ("a", 0, 0)), "a", Refusal.MALFORMED),
        (forward_header(train_key(0), 2, ("a", 0, 0), ("a", 1, 1)), "a", Refusal.MALFORMED),
        (forward_header(train_key(0), 2, ("me", 0, 0), ("a", 1, 1)), "a", Refusal.MALFORMED),
        (forward_header(train_key(0), 3, ("a", 0, 2)), "a", Refusal.NOT_HELD),
        (forward_header(train_key(0, step=2), 1, ("a", 0, 0)), "a", Refusal.BUSY),
        (forward_header(train_key(0), 1, ("a", 0, 0), plan_version=0), "a", Refusal.STALE),
    ],
)
def test_headers_that_do_not_add_up_are_refused(header: object, sender: str, refusal: Refusal) -> None:
    driver = Driver("me")
    driver.ready(assignment((1, 2), {"a": (0, 2), "b": (0, 0)}, stages=4))
    answer = driver.core.admit(Direction.FORWARD, header, WorkerId(sender), 0.0)  # type: ignore[arg-type]
    assert isinstance(answer, Rejection)
    assert answer.refusal is refusal
    assert not driver.core.table.held


def test_a_worker_without_a_span_holds_nothing() -> None:
    driver = Driver("me")
    answer = driver.push(Direction.FORWARD, forward_header(train_key(0), 1, ("a", 0, 0)), "a")
    assert isinstance(answer, admission.Rejection)
    assert answer.refusal is Refusal.NOT_HELD
