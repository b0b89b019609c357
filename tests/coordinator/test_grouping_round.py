"""The coordinator's decisions of a group's round: who counts, and what everybody applies."""

from __future__ import annotations

from starlings_coordinator.core.grouping.round import CLOSE_AT, DECIDE_AT, GroupRound
from starlings_protos.group_messages import (
    GroupClosed,
    GroupDecided,
    GroupDropped,
    GroupHeld,
    GroupMatched,
    GroupPart,
    GroupPrepared,
    GroupSeat,
)
from starlings_protos.messages import WorkerId

W = tuple(WorkerId(f"w{k}") for k in range(4))
SLOT_S, DEADLINE_S = 100.0, 10.0
PARTS = tuple(GroupPart(k, f"{k}" * 64) for k in range(4))


def opened(members: int = 4) -> GroupRound:
    seats = tuple(GroupSeat(w, 1, 1 / members, 1.0) for w in W[:members])
    return GroupRound(GroupMatched(0, 7, 0, 9, seats, "a", DEADLINE_S, (), W[0]), SLOT_S)


def held(round_: GroupRound, who: WorkerId, members: tuple[WorkerId, ...], now_s: float = SLOT_S) -> list:  # type: ignore[type-arg]
    return round_.hold(who, GroupHeld(0, 7, 9, members), now_s)


def prepared(
    round_: GroupRound,
    who: WorkerId,
    parts: tuple[GroupPart, ...] = PARTS,
    *,
    complete: bool = True,
    dropped: tuple[GroupDropped, ...] = (),
    now_s: float = SLOT_S + 6,
) -> list:  # type: ignore[type-arg]
    return round_.prepare(who, GroupPrepared(0, 7, 9, parts, dropped, complete), now_s)


def closed_round() -> GroupRound:
    round_ = opened()
    for who in W:
        told = held(round_, who, W)
    assert told == [(who, GroupClosed(0, 7, 9, W)) for who in W]
    return round_


def test_a_round_closes_when_all_owners_have_all_and_is_decided_when_all_are_prepared() -> None:
    round_ = closed_round()
    for who in W[:3]:
        assert prepared(round_, who) == []
    told = prepared(round_, W[3])
    assert told == [(who, GroupDecided(0, 7, 9, PARTS, W)) for who in W]
    assert round_.wake_at_s() is None


def test_who_is_late_with_one_owner_is_left_out_everywhere() -> None:
    round_ = opened()
    for who in W[:3]:
        assert held(round_, who, W if who != W[1] else W[:3]) == []
    close_s = SLOT_S + CLOSE_AT * DEADLINE_S
    assert round_.wake_at_s() == close_s
    assert round_.look(close_s - 0.01) == []
    assert round_.look(close_s)[0] == (W[0], GroupClosed(0, 7, 9, W[:3]))
    # It has said nothing as an owner, either: its part is in no decision.
    for who in W[:3]:
        prepared(round_, who, PARTS[:3], complete=False)
    (_, decided), *_ = round_.look(SLOT_S + DECIDE_AT * DEADLINE_S)
    assert decided.parts == PARTS[:3]
    assert decided.members == W[:3]
    assert [d.worker_id for d in decided.dropped] == [W[3]]


def test_fewer_than_a_majority_are_no_round() -> None:
    round_ = opened()
    held(round_, W[0], W[:2])
    held(round_, W[1], W[:2])
    told = round_.look(SLOT_S + CLOSE_AT * DEADLINE_S)
    assert {type(message) for _, message in told} == {GroupClosed, GroupDecided}
    assert all(message.members == () for _, message in told)
    assert round_.decided is not None
    assert round_.decided.parts == ()


def test_an_owner_that_tells_everybody_something_else_is_named_and_its_part_is_out() -> None:
    round_ = closed_round()
    for k, who in enumerate(W):
        odd = GroupPart(2, f"{k + 5}" * 64)
        told = prepared(round_, who, (PARTS[0], PARTS[1], odd, PARTS[3]))
    (_, decided), *_ = told
    assert [part.part for part in decided.parts] == [0, 1, 3]
    assert decided.dropped == (GroupDropped(W[2], "its aggregates differ from receiver to receiver"),)


def test_who_is_gone_is_waited_for_no_more_and_what_owners_refuse_is_told() -> None:
    round_ = closed_round()
    round_.leave(W[3])
    refusal = (GroupDropped(W[2], "not finite"),)
    for who in W[:2]:
        assert prepared(round_, who, dropped=refusal) == []
    told = prepared(round_, W[2])
    assert [who for who, _ in told] == list(W[:3])
    assert told[0][1].dropped == (GroupDropped(W[2], f"not finite, says {W[0]}"),)


def test_strangers_late_words_and_self_praise_count_for_nothing() -> None:
    round_ = opened()
    assert held(round_, WorkerId("x"), W) == []
    assert prepared(round_, W[0], now_s=SLOT_S) == []
    assert round_.held == round_.prepared == {}
    round_ = closed_round()
    held(round_, W[0], ())
    assert round_.closed == GroupClosed(0, 7, 9, W)
    for who in W:
        prepared(round_, who, dropped=(GroupDropped(who, "me"), GroupDropped(WorkerId("x"), "?")))
    assert round_.decided is not None
    assert round_.decided.dropped == ()
