"""What a round says it did."""

from __future__ import annotations

from starlings_worker.outer.outcome import Dropped, Missing, NotFinite, Refetch, RoundOutcome


def test_a_round_that_averaged_most_of_a_vector_says_how_much() -> None:
    outcome = RoundOutcome(2, 40, 1000, 960, ("bob",), (Dropped("carol", Missing("late by 3 of 80 chunks")),))
    assert outcome.fraction_averaged == 0.96
    assert not outcome.solo
    assert (
        str(outcome) == "round 40 of fragment 2 averaged 96 % with bob; without carol: late by 3 of 80 chunks"
    )


def test_a_round_alone_is_not_reported_as_averaged() -> None:
    outcome = RoundOutcome(0, 41, 1000, 0, (), (Dropped("mallory", NotFinite("its weights are")),))
    assert outcome.solo
    assert outcome.fraction_averaged == 0.0
    assert str(outcome) == (
        "round 41 of fragment 0 took its own step alone; without mallory: its weights are not finite"
    )
    far = RoundOutcome(0, 42, 1000, 0, refetch=Refetch(3.5, 1.0, 6))
    assert "fetches state after 6 rounds alone" in str(far)
