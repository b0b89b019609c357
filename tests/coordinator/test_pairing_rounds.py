"""The coordinator's half of pair exchanges: the clock, readiness, contracts, weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_coordinator.core.pairing.clock import LEAST_SLOT_S, YOUNG_SLOTS, StageClock, slot_length_s
from starlings_coordinator.core.pairing.rounds import START_WAIT_S
from starlings_coordinator.core.pairing.weights import TokenCount, TokenMark, credited, incredible
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import (
    SlotClock,
    SoloReason,
    SwapResult,
)
from support.pair_desk import A, B, C, Desk, matches

# ------------------------------------------------------------------ the clock


def test_a_slot_lasts_h_median_steps_within_bounds() -> None:
    assert slot_length_s(50, [0.1, 0.2, 9.0]) == 10.0
    assert slot_length_s(5, [0.01]) == LEAST_SLOT_S
    assert slot_length_s(5, []) is None
    assert slot_length_s(5, [0.0]) is None


def test_the_clock_starts_when_all_train_or_a_while_after_the_first() -> None:
    desk = Desk(A, B, C)
    assert desk.ready(A, 0) == []
    assert desk.ready(B, 0) == []
    told = desk.ready(C, 0)
    assert [w for w, _ in told] == [A, B, C]
    assert told[0][1] == SlotClock(3, 1, 10.0, 10.0, 1, False)

    patient = Desk(A, B)
    patient.ready(A, 0)
    assert patient.look(START_WAIT_S - 0.1) == []
    assert [w for w, _ in patient.look(0.2)] == [A, B]


def test_a_short_hiccup_does_not_change_the_length_and_a_lasting_change_does_two_slots_later() -> None:
    clock = StageClock(0, 1)
    clock.start(1 - YOUNG_SLOTS, 10.0 * (1 - YOUNG_SLOTS), 10.0, warmup=False)

    def look(slot: int, step_s: float, *, warmup: bool = False) -> bool:
        return clock.review(50, [step_s], warmup=warmup, now_s=10.0 * slot + 0.1)

    assert not look(1, 0.4)
    assert not look(2, 0.4)
    assert not look(3, 0.2)
    assert not look(4, 0.4)
    assert not look(5, 0.1)
    assert not look(6, 0.1)
    assert look(7, 0.1)
    assert clock.begins_at(9) == 90.0
    assert clock.length_of(8) == 10.0
    assert clock.length_of(9) == 5.0
    assert clock.begins_at(11) == 100.0
    assert clock.slot_at(89.9) == 8
    assert clock.slot_at(95.1) == 10


def test_a_young_clock_believes_one_look() -> None:
    clock = StageClock(0, 1)
    clock.start(1, 10.0, 10.0, warmup=False)
    assert clock.review(50, [0.1], warmup=False, now_s=10.1)
    assert (clock.length_of(2), clock.length_of(3)) == (10.0, 5.0)
    assert clock.begins_at(3) == 30.0


def test_the_end_of_the_warm_up_is_announced_at_once() -> None:
    desk = Desk(A, B)
    desk.tokens_done = 199
    desk.started()
    assert desk.rounds.clock.length_of(1) == 1.0
    desk.tokens_done = 200
    told = desk.look(1.1)
    announced = [m for w, m in told if isinstance(m, SlotClock) and w == A]
    assert [(m.slot, m.slot_length_s, m.warmup) for m in announced] == [(2, 1.0, True), (3, 10.0, False)]
    assert announced[1].begins_in_s == pytest.approx(1.9)


@given(now_s=st.floats(0.0, 1e7), length_s=st.floats(LEAST_SLOT_S, 3600.0))
def test_the_first_slot_is_announced_whatever_the_rounding(now_s: float, length_s: float) -> None:
    """`now + length - now` may be a hair more than the length; replicas refuse a slot 0, and would never begin."""
    clock = StageClock(0, 1)
    clock.start(1, now_s + length_s, length_s, warmup=False)
    (first,) = clock.announcements(now_s)
    assert first.slot == 1
    assert first.begins_in_s == pytest.approx(length_s, rel=1e-6)


@given(
    changes=st.lists(st.tuples(st.floats(0.01, 30.0), st.floats(0.001, 5.0)), max_size=30),
)
def test_slots_follow_each_other_whatever_the_lengths(changes: list[tuple[float, float]]) -> None:
    """Never backwards, and what was announced for a slot that is near does not change any more."""
    clock = StageClock(0, 3)
    clock.start(1, 1.0, 1.0, warmup=True)
    now_s, slot = 0.0, 0
    for after_s, step_s in changes:
        near = {k: clock.begins_at(k) for k in (clock.slot_at(now_s) + 1, clock.slot_at(now_s) + 2)}
        clock.review(10, [step_s], warmup=False, now_s=now_s)
        assert {k: clock.begins_at(k) for k in near} == near
        now_s += after_s
        assert clock.slot_at(now_s) >= slot
        slot = clock.slot_at(now_s)
        assert clock.begins_at(slot) <= now_s + 1e-6 < clock.begins_at(slot + 1) + 2e-6


# ------------------------------------------------------------------ readiness and contracts


def test_a_match_comes_when_all_are_ready_and_both_sides_hold_one_contract() -> None:
    desk = Desk(A, B, swaps=1, fragments=4).started()
    assert matches(desk.ready(A, 1)) == {}
    told = matches(desk.ready(B, 1))
    one, other = told[A, 0], told[B, 0]
    assert (one.partner, other.partner) == (B, A)
    assert one.weight + other.weight == 1
    assert (one.round_id, one.slot, one.fragment, one.swap) == (other.round_id, 1, 1, 0)
    assert one.partner_incarnation == 1
    assert one.deadline_s == 10.0
    assert desk.look() == []


def test_at_half_of_the_slot_before_those_who_are_ready_are_matched_without_the_others() -> None:
    desk = Desk(A, B, C).started()
    desk.ready(A, 1)
    desk.ready(B, 1)
    assert desk.rounds.wake_at_s(desk.now_s) == desk.now_s + 5.0
    assert desk.look(4.9) == []
    assert set(matches(desk.look(0.2))) == {(A, 0), (B, 0)}
    # Too late for this one.
    assert matches(desk.ready(C, 1)) == {}


def test_who_is_frozen_is_matched_no_more() -> None:
    desk = Desk(A, B, C).started()
    desk.all_ready(1)
    for slot in range(2, 6):
        desk.look(10.0)
        desk.ready(A, slot)
        desk.ready(B, slot)
        assert {w for w, _ in matches(desk.look(5.1))} == {A, B}
        desk.now_s -= 5.1


def test_slots_that_are_too_short_for_replicas_get_longer_until_they_meet() -> None:
    """Each says that it is ready 0.4 s after a slot has begun."""
    desk = Desk(A, B)
    for worker_id in (A, B):
        desk.ready(worker_id, 0, step_s=0.005)
    clock, met = desk.rounds.clock, 0
    assert clock.length_of(1) == LEAST_SLOT_S
    desk.now_s = clock.begins_at(1)
    ready = {A: 0, B: 0}
    for _ in range(2000):
        desk.now_s += 0.02
        met += len(matches(desk.look())) > 0
        slot = clock.slot_at(desk.now_s)
        for worker_id in (A, B):
            if ready[worker_id] <= slot and desk.now_s - clock.begins_at(slot) >= 0.4:
                ready[worker_id] = slot + 1
                met += len(matches(desk.ready(worker_id, slot + 1, step_s=0.005))) > 0
    assert 0.8 <= clock.length_of(slot) < 2.0
    assert met > 20


@pytest.mark.parametrize(("slow", "longer"), [((A, B, C), True), ((A, B), True), ((A,), False)])
def test_slots_get_longer_until_most_payloads_fit(slow: tuple[WorkerId, ...], longer: bool) -> None:
    """Who is slow needs 25 s for an exchange, by its own link or its partner's; slots begin with 10 s."""
    desk = Desk(A, B, C).started()
    averaged: set[WorkerId] = set()
    for slot in range(1, 80):
        desk.now_s = desk.rounds.clock.begins_at(slot) - 0.6 * desk.rounds.clock.length_of(slot - 1)
        found = matches(desk.all_ready(slot))
        desk.now_s = desk.rounds.clock.begins_at(slot) + 0.1
        desk.look()
        for (worker_id, _), match in found.items():
            if match.deadline_s < 25.0 and {worker_id, match.partner} & set(slow):
                desk.outcome(worker_id, match, SwapResult.SOLO, solo_reason=SoloReason.LATE)
            else:
                desk.outcome(worker_id, match, SwapResult.COMMITTED)
                averaged.add(worker_id)
    length_s = desk.rounds.clock.length_of(80)
    if longer:
        assert 25.0 <= length_s < 40.0
        assert averaged == {A, B, C}
    else:
        assert length_s == 10.0


def test_a_silent_replica_makes_no_slot_longer() -> None:
    desk = Desk(A, B).started()
    desk.all_ready(1)
    for slot in range(2, 20):
        desk.look(10.0)
        desk.ready(A, slot)
        desk.look(5.1)
        desk.now_s -= 5.1
    assert desk.rounds.clock.length_of(20) == 10.0


def test_a_worker_whose_counter_is_elsewhere_is_not_matched() -> None:
    desk = Desk(A, B, C).started()
    desk.ready(A, 1)
    desk.ready(B, 1)
    desk.ready(C, 3)
    assert {w for w, _ in matches(desk.look(5.1))} == {A, B}


def test_swaps_of_a_slot_share_it_and_have_different_partners() -> None:
    desk = Desk(*map(WorkerId, "abcd"), swaps=2).started()
    told = matches(desk.all_ready(1))
    for worker_id in map(WorkerId, "abcd"):
        assert told[worker_id, 0].partner != told[worker_id, 1].partner
        assert (told[worker_id, 0].deadline_s, told[worker_id, 1].deadline_s) == (5.0, 10.0)
        assert told[worker_id, 0].round_id != told[worker_id, 1].round_id


def test_another_life_or_another_weight_is_another_contract() -> None:
    ids = set()
    for incarnation, tokens in ((1, 0), (2, 0), (1, 300)):
        desk = Desk()
        desk.rounds.joined(A, incarnation, "eu", desk.now_s)
        desk.rounds.joined(B, 1, "eu", desk.now_s)
        desk.ready(A, 0, incarnation=incarnation)
        desk.ready(B, 0)
        desk.ledger.counts[B] = TokenCount(tokens, tokens)
        desk.ready(A, 1, incarnation=incarnation)
        ids.add(matches(desk.ready(B, 1))[A, 0].round_id)
    assert len(ids) == 3


def test_an_earlier_life_says_nothing() -> None:
    desk = Desk(A, B).started()
    desk.rounds.joined(B, 2, "eu", desk.now_s)
    desk.ready(A, 1)
    assert matches(desk.ready(B, 1, incarnation=1)) == {}
    assert matches(desk.ready(B, 1, incarnation=2))[A, 0].partner_incarnation == 2


def test_who_leaves_is_matched_no_more_and_a_newcomer_hears_the_clock() -> None:
    desk = Desk(A, B).started()
    desk.all_ready(1)
    desk.rounds.left(B)
    desk.look(10.0)
    assert matches(desk.ready(A, 2)) == {}
    assert [type(m) for _, m in desk.rounds.joined(C, 1, "eu", desk.now_s)] == [SlotClock]
    assert matches(desk.look(10.0)) == {}
    desk.ready(A, 3)
    assert set(matches(desk.ready(C, 3))) == {(A, 0), (C, 0)}


def test_after_a_restart_the_clock_goes_on_where_replicas_have_it() -> None:
    desk = Desk(A, B)
    told = desk.ready(A, 41, begins_in_s=3.0)
    assert [(w, m.slot, m.begins_in_s) for w, m in told if isinstance(m, SlotClock)] == [
        (A, 41, 3.0),
        (B, 41, 3.0),
    ]
    # Slot 41 may have been matched before the restart; 42 is the first of the new life.
    assert matches(desk.ready(B, 41, begins_in_s=3.1)) == {}
    desk.look(3.5)
    desk.ready(A, 42)
    assert set(matches(desk.ready(B, 42))) == {(A, 0), (B, 0)}


@pytest.mark.parametrize("off_s", [-2.0, 2.0, 25.0])
def test_a_replica_whose_slot_begins_at_another_time_is_told_the_clock_again(off_s: float) -> None:
    """It was frozen when it was told, and counts from when it heard it."""
    desk = Desk(A, B).started()
    told = desk.ready(B, 1, begins_in_s=10.0 + off_s)
    assert [(w, m.slot, m.begins_in_s) for w, m in told if isinstance(m, SlotClock)] == [(B, 1, 10.0)]
    # With the number that it takes for the next one it may be anywhere.
    told = desk.ready(B, 4, begins_in_s=10.0)
    assert [(w, m.slot) for w, m in told if isinstance(m, SlotClock)] == [(B, 1)]


@pytest.mark.parametrize("off_s", [-0.9, 0.0, 0.9])
def test_a_message_that_was_a_while_on_the_way_moves_no_clock(off_s: float) -> None:
    desk = Desk(A, B).started()
    assert desk.ready(A, 1, begins_in_s=10.0 + off_s) == []


def test_the_first_swap_crosses_regions_and_the_interval_is_stated() -> None:
    desk = Desk(*map(WorkerId, "abcdef"), regions="xxxxyy").started()
    assert desk.rounds.worst_far_interval() == 2
    met: dict[WorkerId, int] = {}
    for slot in range(1, 9):
        for (worker_id, _), match in matches(desk.all_ready(slot)).items():
            ours, theirs = (desk.rounds.replicas[w].region for w in (worker_id, match.partner))
            if ours != theirs:
                met[worker_id] = slot
        assert all(slot - met.get(w, 0) < 2 for w in desk.rounds.replicas)
        desk.look(10.0)


# ------------------------------------------------------------------ weights


def test_weights_come_from_the_ledger_capped_twice_and_never_from_a_claim() -> None:
    desk = Desk(A, B).started()
    desk.ledger.counts = {A: TokenCount(300, 1000), B: TokenCount(900, 100)}
    desk.ready(A, 1, tokens=10**9)
    told = matches(desk.ready(B, 1, tokens=0))
    # B is acknowledged for more than it ever leased.
    assert told[A, 0].weight == 0.75
    assert told[B, 0].weight == 0.25
    assert [(named.worker_id, named.by) for named in desk.rounds.book.named] == [(A, None)]
    assert "claims 1000000000 tokens; 1000 were leased" in desk.rounds.book.named[0].reason
    desk.look(10.0)
    # What it leased before and has not trained counts now.
    desk.ledger.counts = {A: TokenCount(400, 1000), B: TokenCount(1300, 1400)}
    assert matches(desk.all_ready(2))[A, 0].weight == 0.2


@given(
    trained=st.floats(0, 1e9),
    leased=st.floats(0, 1e9),
    before=st.floats(0, 1e9),
    rate=st.floats(0.1, 1e6),
    seconds=st.floats(0, 1e4),
)
def test_nobody_weighs_more_than_was_leased_or_planned(
    trained: float, leased: float, before: float, rate: float, seconds: float
) -> None:
    mark = TokenMark(TokenCount(before, before), 0.0)
    tokens = credited(TokenCount(trained, leased, rate), mark, seconds)
    assert 0 <= tokens <= min(max(0.0, trained - before), max(0.0, leased - before), 2 * rate * seconds)


def test_who_leases_in_store_weighs_what_it_trains_of_it_later() -> None:
    mark = TokenMark(TokenCount(100, 5000), 0.0)
    assert credited(TokenCount(900, 5000), mark, 10.0) == 800
    assert not incredible(900, TokenCount(900, 5000), mark)
