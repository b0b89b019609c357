"""When a plan is amended and when not: each bound of the rule from both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from starlings_coordinator.planner.gain import Amendment, LastReplica, TooCostly, TooLittle, Worthwhile, judge
from starlings_protos.messages import Span, WorkerId

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
HOLDERS = {A: Span(0, 1), B: Span(0, 0), C: Span(1, 1)}
# B goes from stage 0 to stage 1: 2 microbatches/s more, 3 fewer for 100 seconds.
MOVE = Amendment({B: (Span(0, 0), Span(1, 1))}, 10.0, 7.0, 12.0, 1e9, 100.0)


def test_a_move_that_pays_is_made_and_says_what_it_gains() -> None:
    assert judge(MOVE, HOLDERS, 400.0) == Worthwhile(gained=600.0, cost=300.0)


def test_time_left_decides_whether_it_pays() -> None:
    # 450 microbatches are what justifies a cost of 300, and not more than that.
    assert judge(MOVE, HOLDERS, 325.0) == TooCostly(450.0, 300.0)
    assert isinstance(judge(MOVE, HOLDERS, 325.5), Worthwhile)
    assert judge(MOVE, HOLDERS, 50.0) == TooCostly(0.0, 300.0)
    # Costless, but over before it could bring anything.
    assert isinstance(judge(replace(MOVE, rate_meanwhile=10.0), HOLDERS, 100.0), TooCostly)


def test_small_gains_do_not_move_anybody_however_long_they_last() -> None:
    assert judge(replace(MOVE, rate_then=10.49), HOLDERS, 1e9) == TooLittle(pytest.approx(0.049))
    assert isinstance(judge(replace(MOVE, rate_then=10.5), HOLDERS, 1e9), Worthwhile)
    assert judge(replace(MOVE, rate_then=9.0), HOLDERS, 1e9) == TooLittle(pytest.approx(-0.1))


def test_no_move_takes_the_last_replica_of_a_stage() -> None:
    alone = {A: Span(0, 0), B: Span(0, 0), C: Span(1, 2)}
    assert judge(Amendment({C: (Span(1, 2), Span(1, 1))}, 1, 1, 9, 0, 0), alone, 1e9) == LastReplica(2)
    assert judge(Amendment({C: (Span(1, 2), None)}, 1, 1, 9, 0, 0), alone, 1e9) == LastReplica(1)
    # Unless another one takes it at the same time.
    both = {C: (Span(1, 2), Span(1, 1)), B: (Span(0, 0), Span(2, 2))}
    assert isinstance(judge(Amendment(both, 1, 1, 9, 0, 1), alone, 1e9), Worthwhile)


def test_a_bare_stage_is_filled_and_what_stays_bare_does_not_forbid_moves() -> None:
    standing = Amendment({B: (Span(0, 0), Span(1, 1))}, 0.0, 0.0, 5.0, 1e9, 60.0)
    assert judge(standing, {A: Span(0, 0), B: Span(0, 0)}, 3600.0) == Worthwhile(5.0 * 3540, 0.0)
    assert judge(replace(standing, rate_then=0.0), {A: Span(0, 0), B: Span(0, 0)}, 3600.0) == TooLittle(0.0)


def test_who_holds_nothing_takes_a_place_for_any_gain_that_outweighs_its_copies() -> None:
    place = Amendment({C: (None, Span(0, 0))}, 10.0, 10.0, 10.01, 1e9, 100.0)
    assert judge(place, HOLDERS, 1e4) == Worthwhile(pytest.approx(99.0), 0.0)
    assert isinstance(judge(replace(place, rate_meanwhile=9.0), HOLDERS, 1e4), TooCostly)
    assert judge(replace(place, rate_then=10.0), HOLDERS, 1e4) == TooLittle(0.0)
