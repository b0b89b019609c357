"""The coordinator's half of pair exchanges: what outcomes say, and what links learn from them."""

from __future__ import annotations

from dataclasses import replace

from starlings_coordinator.core.pairing.links import PassiveEstimates, Place
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import (
    SoloReason,
    SwapResult,
)
from support.pair_desk import A, B, C, Desk, matches


def test_outcomes_of_both_sides_are_brought_together() -> None:
    desk = Desk(A, B).started()
    told = matches(desk.all_ready(1))
    desk.outcome(A, told[A, 0], SwapResult.COMMITTED, fraction=1.0, seconds=0.5)
    desk.outcome(B, told[B, 0], SwapResult.COMMITTED, fraction=1.0, seconds=0.5)
    book = desk.rounds.book
    assert (book.rounds_averaged, book.rounds_one_sided, book.unexpected) == (1, 0, 0)
    desk.look(10.0)
    told = matches(desk.all_ready(2))
    desk.outcome(A, told[A, 0], SwapResult.ONE_SIDED, fraction=1.0)
    desk.outcome(B, told[B, 0], SwapResult.SOLO, solo_reason=SoloReason.LATE)
    assert (book.rounds_averaged, book.rounds_one_sided) == (1, 1)
    assert (book.of(A).one_sided, book.of(B).one_sided) == (1, 0)
    assert (book.of(A).solo_slots_in_a_row, book.of(B).solo_slots_in_a_row) == (0, 1)
    # A last word whose answer was lost: both averaged after all.
    desk.look(10.0)
    told = matches(desk.all_ready(3))
    desk.outcome(A, told[A, 0], SwapResult.ONE_SIDED, fraction=1.0)
    desk.outcome(B, told[B, 0], SwapResult.COMMITTED, fraction=1.0)
    assert (book.rounds_averaged, book.rounds_one_sided) == (2, 1)


def test_a_report_that_nobody_was_matched_for_counts_for_nothing() -> None:
    desk = Desk(A, B, C).started()
    desk.ready(A, 1)
    desk.ready(B, 1)
    told = matches(desk.look(5.1))
    outcome = SwapResult.COMMITTED
    desk.outcome(C, told[A, 0], outcome)
    desk.outcome(A, replace(told[A, 0], round_id=77), outcome)
    desk.outcome(A, replace(told[A, 0], partner=C), outcome)
    desk.outcome(A, replace(told[A, 0], slot=2), outcome)
    desk.outcome(A, told[A, 0], outcome)
    desk.outcome(A, told[A, 0], outcome)
    book = desk.rounds.book
    assert book.unexpected == 5
    assert book.of(A).committed == 1
    assert book.of(C).committed == 0


def test_solo_slots_in_a_row_are_counted_per_slot_not_per_swap() -> None:
    desk = Desk(*map(WorkerId, "abcd"), swaps=2).started()
    for slot in range(1, 5):
        told = matches(desk.all_ready(slot))
        desk.outcome(A, told[A, 0], SwapResult.SOLO, solo_reason=SoloReason.LATE)
        result = SwapResult.COMMITTED if slot == 3 else SwapResult.SOLO
        desk.outcome(A, told[A, 1], result, solo_reason=SoloReason.LATE)
        assert desk.rounds.book.of(A).solo_slots_in_a_row == {1: 1, 2: 2, 3: 0, 4: 1}[slot]
        desk.look(10.0)


def test_who_sends_nonsense_is_named_and_suspected_when_several_say_so() -> None:
    desk = Desk(A, B, C).started()
    accused: set[WorkerId] = set()
    for slot in range(1, 20):
        for (worker_id, _), match in matches(desk.all_ready(slot)).items():
            if match.partner == A:
                accused.add(worker_id)
                desk.outcome(
                    worker_id,
                    match,
                    SwapResult.SOLO,
                    solo_reason=SoloReason.REFUSED,
                    detail="its weights are not finite",
                )
                assert desk.rounds.book.named[-1].reason == "its weights are not finite"
        assert desk.rounds.book.suspects() == ((A,) if len(accused) == 2 else ())
        desk.look(10.0)
    assert accused == {B, C}


def test_links_learn_from_what_was_committed() -> None:
    desk = Desk(A, B).started()
    desk.links.place(A, Place("", "eu", 1e6))
    desk.links.place(B, Place("", "eu", 1e6))
    before_s = desk.links.exchange_s(A, B, 10**6)
    told = matches(desk.all_ready(1))
    desk.outcome(A, told[A, 0], SwapResult.COMMITTED, seconds=5.0)
    assert desk.links.exchange_s(B, A, 10**6) > 2 * before_s
    assert desk.links.exchange_s(A, C, 10**6) < desk.links.exchange_s(A, B, 10**6)


def test_places_tell_near_from_far() -> None:
    links = PassiveEstimates()
    links.place(A, Place("lab", "eu", 1e6))
    links.place(B, Place("lab", "eu", 1e6))
    links.place(C, Place("", "us", 1e6))
    assert links.exchange_s(A, B, 10**6) < 0.1 < 1.0 < links.exchange_s(A, C, 10**6)
    links.forget(B)
    assert links.exchange_s(A, B, 10**6) > 0.1
