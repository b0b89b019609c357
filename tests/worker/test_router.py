"""The router: least expected completion time, a worker is visited once, and there is always a way on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from starlings_protos.messages import Span, WorkerId
from starlings_simulator.plans import cover
from starlings_worker.core.router import (
    PeerView,
    choose_exit,
    choose_next,
    onward,
)


def peer(name: str, first: int, last: int, seconds: float = 0.03, **more: object) -> PeerView:
    return PeerView(WorkerId(name), Span(first, last), (seconds,) * (last - first + 1), **more)  # type: ignore[arg-type]


def test_the_faster_of_two_holders_is_chosen() -> None:
    peers = [peer("a", 1, 1, 0.05), peer("b", 1, 1, 0.02)]
    chosen = choose_next(1, 2, peers, {WorkerId("me")}, random.Random(0))
    assert chosen is not None
    assert chosen.next_worker == "b"


def test_a_backlog_outweighs_speed() -> None:
    peers = [peer("a", 1, 1, 0.05), peer("b", 1, 1, 0.02, backlog_s=0.2)]
    chosen = choose_next(1, 2, peers, set(), random.Random(0))
    assert chosen is not None
    assert chosen.next_worker == "a"


def test_a_slow_link_outweighs_speed() -> None:
    peers = [peer("a", 1, 1, 0.05), peer("b", 1, 1, 0.02, link_s=0.5)]
    chosen = choose_next(1, 2, peers, set(), random.Random(0))
    assert chosen is not None
    assert chosen.next_worker == "a"


def test_holders_without_a_slot_come_last_and_resting_ones_not_at_all() -> None:
    full = peer("a", 1, 1, 0.001, free_slots=0)
    slow = peer("b", 1, 1, 1.0, free_slots=2)
    resting = peer("c", 1, 1, 0.001, usable=False)
    chosen = choose_next(1, 2, [full, slow, resting], set(), random.Random(0))
    assert chosen is not None
    assert chosen.next_worker == "b"
    chosen = choose_next(1, 2, [full, resting], set(), random.Random(0))
    assert chosen is not None
    assert chosen.next_worker == "a"
    assert choose_next(1, 2, [resting], set(), random.Random(0)) is None


def test_equal_holders_share_the_work_and_a_seed_fixes_the_choice() -> None:
    peers = [peer("a", 1, 1), peer("b", 1, 1)]

    def draw(seed: int) -> list[WorkerId | None]:
        rng = random.Random(seed)
        choices = [choose_next(1, 2, peers, set(), rng) for _ in range(200)]
        return [choice.next_worker for choice in choices if choice is not None]

    assert draw(4) == draw(4)
    assert 60 < draw(4).count(WorkerId("a")) < 140


def test_a_holder_whose_span_leads_nowhere_is_not_chosen() -> None:
    # The only other holder of stage 2 is gone: going to "a" would strand the microbatch there.
    peers = [peer("a", 1, 1, 0.001)]
    assert choose_next(1, 3, peers, {WorkerId("me")}, random.Random(0)) is None
    assert choose_next(1, 3, [*peers, peer("b", 2, 2)], {WorkerId("me")}, random.Random(0)) is not None


def test_leaving_early_needs_a_clear_gain() -> None:
    fast = [peer("a", 1, 2, 0.001), peer("b", 2, 2, 0.01)]

    def exit_stage(own_s: float, *, early: bool) -> int:
        return choose_exit(
            0,
            Span(0, 1),
            3,
            {0: 0.01, 1: own_s},
            fast,
            {WorkerId("me")},
            early_exits={0} if early else (),
            margin=1.15,
            rng=random.Random(0),
        ).exit_stage

    assert exit_stage(0.5, early=True) == 0
    assert exit_stage(0.5, early=False) == 1
    assert exit_stage(0.0, early=True) == 1


def test_an_early_exit_never_strands_a_microbatch() -> None:
    # Only "me" holds stage 1: leaving after stage 0 would need "me" again.
    peers = [peer("a", 2, 2, 0.001)]
    boundary = choose_exit(
        0,
        Span(0, 1),
        3,
        {0: 0.01, 1: 9.0},
        peers,
        {WorkerId("me")},
        early_exits=range(5),
        margin=1.15,
        rng=random.Random(0),
    )
    assert boundary.exit_stage == 1


def test_the_model_ends_where_its_last_stage_is_held() -> None:
    boundary = choose_exit(
        0, Span(0, 2), 3, {}, [], {WorkerId("me")}, early_exits=range(5), margin=1.1, rng=random.Random(0)
    )
    assert (boundary.exit_stage, boundary.next_worker) == (2, None)


def brute_force_way(
    stage: int, stage_count: int, peers: list[PeerView], visited: frozenset[WorkerId]
) -> bool:
    """Whether any sequence of unvisited workers, with any exits, passes the stages from `stage` on."""
    if stage == stage_count:
        return True
    return any(
        brute_force_way(exit_stage + 1, stage_count, peers, visited | {peer.worker_id})
        for peer in peers
        if stage in peer.span and peer.worker_id not in visited
        for exit_stage in range(stage, peer.span.last_stage + 1)
    )


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_chosen_every_microbatch_gets_through_and_nobody_is_visited_twice(seed: int) -> None:
    rng = random.Random(seed)
    stage_count = rng.randint(1, 5)
    spans = cover(rng.randint(1, 6), stage_count, rng)
    views = [
        peer(f"w{index}", span.first_stage, span.last_stage, rng.uniform(0.001, 0.1), backlog_s=rng.random())
        for index, span in enumerate(spans)
    ]
    for _ in range(20):
        start = rng.choice([view for view in views if 0 in view.span])
        route: list[WorkerId] = []
        worker, stage = start, 0
        while True:
            visited = {*route, worker.worker_id}
            others = [view for view in views if view.worker_id != worker.worker_id]
            own = {index: rng.uniform(0.001, 0.5) for index in worker.span.stages}
            boundary = choose_exit(
                stage,
                worker.span,
                stage_count,
                own,
                others,
                visited,
                early_exits=worker.span.stages if rng.random() < 0.7 else (),
                margin=1.15,
                rng=rng,
            )
            route.append(worker.worker_id)
            assert len(set(route)) == len(route)
            if boundary.exit_stage == stage_count - 1:
                break
            assert onward(stage_count, others, visited).passable[boundary.exit_stage + 1]
            assert brute_force_way(boundary.exit_stage + 1, stage_count, others, frozenset(visited))
            chosen = choose_next(boundary.exit_stage + 1, stage_count, others, visited, rng)
            assert chosen is not None
            stage = boundary.exit_stage + 1
            worker = next(view for view in views if view.worker_id == chosen.next_worker)


def test_the_way_on_counts_the_fastest_holder_of_each_stage_off_the_route() -> None:
    peers = [peer("a", 1, 2, 0.05), peer("b", 2, 2, 0.01)]
    table = onward(3, peers, ())
    assert table.fastest_s == pytest.approx((0.06, 0.06, 0.01, 0.0))
    assert table.passable == (False, True, True, True)
    assert onward(3, peers, {WorkerId("a")}).passable == (False, False, True, True)


@pytest.mark.parametrize("seed", range(40))
def test_the_table_agrees_with_trying_every_way(seed: int) -> None:
    rng = random.Random(seed)
    stage_count = rng.randint(1, 5)
    views = []
    for index in range(rng.randint(0, 5)):
        first = rng.randrange(stage_count)
        views.append(peer(f"w{index}", first, rng.randint(first, stage_count - 1)))
    visited = frozenset(view.worker_id for view in views if rng.random() < 0.2)
    table = onward(stage_count, views, visited)
    for stage in range(stage_count):
        # Whoever holds the stage before is on the route by then; the table needs no more than that to be exact.
        assert table.passable[stage] == brute_force_way(stage, stage_count, views, visited)


def test_who_has_work_waiting_lets_idle_helpers_take_over_and_never_a_leader() -> None:
    """A lone leader with the whole model; the others can begin nothing themselves, and are slower than it."""

    def leaves(waiting: int, *peers: PeerView) -> tuple[int, WorkerId | None]:
        found = choose_exit(
            0,
            Span(0, 2),
            3,
            {0: 0.1, 1: 0.1, 2: 0.1},
            peers,
            {WorkerId("me")},
            early_exits={0, 1},
            margin=1.15,
            rng=random.Random(0),
            waiting=waiting,
        )
        return found.exit_stage, found.next_worker

    slow = peer("small", 1, 2, 0.3)
    assert leaves(0, slow) == (2, None)
    assert leaves(4, slow) == (0, WorkerId("small"))
    # Not when that takes longer than what waits here could win.
    assert leaves(4, replace(slow, backlog_s=2.0)) == (2, None)
    assert leaves(4, replace(slow, link_s=2.0)) == (2, None)
    # Nor when it has no room, or has samples of its own to do.
    assert leaves(4, replace(slow, free_slots=0)) == (2, None)
    assert leaves(4, peer("leader", 0, 2, 0.3)) == (2, None)
    assert leaves(4, peer("leader", 0, 2, 0.1), slow) == (0, WorkerId("small"))
