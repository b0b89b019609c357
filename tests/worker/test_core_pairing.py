"""The worker's half of pair exchanges, event by event: slots, admission, the commit rule, and each way to fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_protos.messages import Receipt, Refusal, Span, WorkerId
from starlings_protos.pair_messages import (
    PairHeader,
    PairMatched,
    PairWord,
    PairWordKind,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SoloReason,
    SwapResult,
)
from starlings_worker.core.admission import Duplicate, Rejection
from starlings_worker.core.pairing.pair_rounds import PairRounds
from starlings_worker.core.pairing.slots import StageSlots
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    ForgetPair,
    JudgePair,
    OuterStepTaken,
    PairArrived,
    PairCommitted,
    PairDeviceEffect,
    PairDeviceOutcome,
    PairEncoded,
    PairFailed,
    PairJudged,
    PairKey,
    PairNetworkEffect,
    PairNetworkEvent,
    PairNotSent,
    PairSent,
    SendPair,
    SendWord,
    TakeOuterStep,
    WordNotSent,
    WordSent,
    WordTold,
)

PEER, OTHER = WorkerId("peer"), WorkerId("other")
MINE, THEIRS = "0a" * 32, "0b" * 32
MATCH = PairMatched(2, 5, 1, 0, PEER, 7, 0.25, 8.0, 99)
KEY = PairKey.of(MATCH)
HEADER = KEY.header(THEIRS)
PREPARED = PairWord(99, PairWordKind.PREPARED, MINE)


class Bench:
    """One stage, whose slot 5 (fragment 1 of 4) begins at 100 s and lasts 10 s."""

    def __init__(self) -> None:
        self.now_s = 90.0
        self.device: list[PairDeviceEffect] = []
        self.network: list[PairNetworkEffect] = []
        self.said: list[RoundReady | RoundOutcome] = []
        self.counters: Counter[str] = Counter()
        self.rounds = PairRounds(self.device.append, self.network.append, self.said.append, self.counters)
        self.rounds.hold(Span(2, 2))
        self.rounds.told(SlotClock(2, 5, 10.0, 10.0, 4), self.now_s)

    def at(self, now_s: float) -> Bench:
        self.now_s = now_s
        self.rounds.look_at_time(now_s)
        return self

    def match(self, match: PairMatched = MATCH) -> Bench:
        self.rounds.told(match, self.now_s)
        return self

    def do(self, *events: PairDeviceOutcome | PairNetworkEvent) -> Bench:
        for event in events:
            self.rounds.handle(event, self.now_s)
        return self

    def begun(self) -> Bench:
        """The slot has begun, and the own payload is on its way."""
        return self.match().at(100.0).do(OuterStepTaken(2, 5), PairEncoded(KEY, MINE))

    def arrive(self, header: PairHeader = HEADER) -> Bench:
        assert self.rounds.admit(header, PEER, Receipt(), self.now_s) == Receipt()
        return self.do(PairArrived(header, PEER))

    def prepared(self) -> Bench:
        assert self.rounds.judge_word(PREPARED, PEER, self.now_s) is None
        return self.do(WordTold(PREPARED, PEER))

    def refusal(self, header: PairHeader = HEADER, sender: WorkerId = PEER) -> Refusal:
        answer = self.rounds.admit(header, sender, Receipt(), self.now_s)
        assert isinstance(answer, Rejection), answer
        return answer.refusal

    def word_refusal(self, word: PairWord = PREPARED, sender: WorkerId = PEER) -> Refusal:
        answer = self.rounds.judge_word(word, sender, self.now_s)
        assert answer is not None
        return answer.refusal

    @property
    def outcomes(self) -> list[RoundOutcome]:
        return [message for message in self.said if isinstance(message, RoundOutcome)]

    @property
    def words(self) -> list[PairWordKind]:
        return [effect.word.kind for effect in self.network if isinstance(effect, SendWord)]


# ------------------------------------------------------------------ the way to a commit


def test_a_whole_swap() -> None:
    bench = Bench().match().at(99.9)
    assert bench.device == []
    bench.at(100.0)
    assert bench.device == [TakeOuterStep(2, 5, 1, False, 0)]
    bench.do(OuterStepTaken(2, 5))
    assert bench.device[1:] == [EncodePair(KEY)]
    assert [m.slot for m in bench.said if isinstance(m, RoundReady)] == [5, 6]
    bench.do(PairEncoded(KEY, MINE))
    assert bench.network == [SendPair(KEY, MINE, PEER)]
    bench.arrive()
    assert bench.device[2:] == [JudgePair(KEY, PEER)]
    bench.do(PairSent(KEY), PairJudged(KEY, 0.5))
    said = PairWord(99, PairWordKind.PREPARED, THEIRS)
    assert bench.network[1:] == [SendWord(said, PEER)]
    bench.prepared()
    assert bench.device[3:] == [CommitPair(KEY, PEER, 0.25)]
    bench.do(PairCommitted(KEY, 1.0, 0.5))
    assert bench.outcomes == []
    bench.now_s = 100.5
    bench.do(WordSent(said))
    (outcome,) = bench.outcomes
    assert outcome.result is SwapResult.COMMITTED
    assert (outcome.partner, outcome.round_id, outcome.fraction, outcome.distance) == (PEER, 99, 1.0, 0.5)
    assert bench.network[-1] == ForgetPair(KEY)
    assert bench.rounds.stages[2].idle


@pytest.mark.parametrize("missing", ["payload", "verdict", "word"])
def test_nothing_is_committed_while_anything_is_missing(missing: str) -> None:
    bench = Bench().begun()
    if missing != "payload":
        bench.arrive()
    if missing not in ("payload", "verdict"):
        bench.do(PairJudged(KEY, 0.5))
    if missing != "word":
        bench.prepared()
    assert not any(isinstance(effect, CommitPair) for effect in bench.device)
    bench.at(108.0)
    (outcome,) = bench.outcomes
    assert outcome.solo_reason in (SoloReason.LATE, SoloReason.SILENT)
    assert PairWordKind.DECLINED in bench.words


def test_a_payload_may_come_before_the_slot_and_a_word_may_not() -> None:
    bench = Bench().match().arrive()
    assert bench.word_refusal() is Refusal.MALFORMED
    assert bench.rounds.judge_word(PairWord(99, PairWordKind.WAITING), PEER, bench.now_s) is None
    bench.at(100.0).do(OuterStepTaken(2, 5))
    assert bench.device == [TakeOuterStep(2, 5, 1, False, 0), EncodePair(KEY)]
    bench.do(PairEncoded(KEY, MINE))
    assert JudgePair(KEY, PEER) in bench.device


def test_two_swaps_follow_each_other_and_the_second_sends_what_the_first_made() -> None:
    second = replace(MATCH, swap=1, partner=OTHER, round_id=100)
    bench = Bench().match(second).begun().arrive().do(PairJudged(KEY, 0.5)).prepared()
    assert EncodePair(PairKey.of(second)) not in bench.device
    bench.do(PairCommitted(KEY, 1.0, 0.5))
    # The last word of the first is still on its way.
    assert bench.device[-2:] == [CommitPair(KEY, PEER, 0.25), EncodePair(PairKey.of(second))]


# ------------------------------------------------------------------ what is refused


def test_only_the_very_swaps_payload_from_the_partner_is_read() -> None:
    bench = Bench()
    assert bench.refusal() is Refusal.BUSY
    bench.begun()
    assert bench.refusal(sender=OTHER) is Refusal.MALFORMED
    for wrong in ({"slot": 6}, {"fragment": 2}, {"swap": 1}):
        assert bench.refusal(replace(HEADER, **wrong)) is Refusal.MALFORMED
    assert bench.refusal(replace(HEADER, round_id=98, slot=4)) is Refusal.STALE
    assert bench.refusal(replace(HEADER, round_id=98, slot=6)) is Refusal.BUSY
    assert bench.refusal(replace(HEADER, stage=3)) is Refusal.NOT_HELD
    assert bench.rounds.admit(HEADER, PEER, Receipt(), bench.now_s) == Receipt()
    assert bench.refusal() is Refusal.BUSY
    bench.do(PairArrived(HEADER, PEER))
    assert bench.rounds.admit(HEADER, PEER, Receipt(), bench.now_s) == Duplicate(Receipt())
    assert bench.refusal(replace(HEADER, sha256=MINE)) is Refusal.MALFORMED
    bench.at(108.0)
    assert bench.refusal() is Refusal.STALE
    assert bench.word_refusal() is Refusal.STALE


def test_a_word_counts_from_the_partner_with_the_digest_of_what_was_sent() -> None:
    bench = Bench().begun().arrive().do(PairJudged(KEY, 0.5))
    assert bench.word_refusal(sender=OTHER) is Refusal.MALFORMED
    assert bench.word_refusal(replace(PREPARED, sha256=THEIRS)) is Refusal.MALFORMED
    assert bench.word_refusal(replace(PREPARED, round_id=5)) is Refusal.BUSY
    assert bench.word_refusal(PairWord(99, PairWordKind.UNSPECIFIED)) is Refusal.MALFORMED
    assert not any(isinstance(effect, CommitPair) for effect in bench.device)


def test_senseless_messages_of_a_coordinator_change_nothing() -> None:
    bench = Bench()
    for wrong in (
        {"weight": 0.0},
        {"weight": 1.0},
        {"weight": float("nan")},
        {"deadline_s": -1.0},
        {"deadline_s": float("inf")},
        {"partner": ""},
        {"swap": 99},
    ):
        bench.match(replace(MATCH, **wrong))  # type: ignore[arg-type]
    for clock in (
        SlotClock(2, 0, 1.0, 1.0, 1),
        SlotClock(2, 9, 1.0, 0.0, 1),
        SlotClock(2, 9, 1.0, float("nan"), 1),
        SlotClock(2, 9, float("inf"), 1.0, 1),
        SlotClock(2, 9, 1.0, 1.0, 0),
    ):
        bench.rounds.told(clock, bench.now_s)
    assert bench.counters == {"senseless_matches": 7, "senseless_clocks": 5}
    bench.match(replace(MATCH, fragment=3)).at(100.0)
    assert [o.solo_reason for o in bench.outcomes] == [SoloReason.REFUSED]


# ------------------------------------------------------------------ what fails


def test_silence_costs_five_seconds() -> None:
    bench = Bench().begun()
    for now_s in (101.6, 103.2, 104.9):
        bench.at(now_s)
        bench.do(*[WordNotSent(e.word) for e in bench.network if isinstance(e, SendWord)])
        assert bench.outcomes == []
    bench.at(105.0)
    assert [o.solo_reason for o in bench.outcomes] == [SoloReason.SILENT]
    assert "5 s" in bench.outcomes[0].detail


def test_a_partner_that_answers_is_waited_for_until_the_deadline() -> None:
    bench = Bench().begun()
    for now_s in (101.6, 103.2, 104.8, 106.4, 107.9):
        bench.at(now_s).do(WordSent(PairWord(99, PairWordKind.WAITING)))
        assert bench.outcomes == []
    assert bench.at(108.0).outcomes[0].solo_reason is SoloReason.LATE


def test_a_payload_is_repeated_later_and_later() -> None:
    bench = Bench().begun()
    tries = 1
    for tick in range(100, 400):
        bench.at(100.0 + (tick - 100) / 100)
        sent = [e for e in bench.network if isinstance(e, SendPair)]
        if len(sent) > tries - 1:
            bench.do(PairNotSent(KEY, Refusal.BUSY))
            tries += 1
    assert 4 <= tries <= 7


@pytest.mark.parametrize("how", ["word", "stale payload", "stale word"])
def test_a_partner_that_goes_alone_is_not_waited_for(how: str) -> None:
    bench = Bench().begun()
    if how == "word":
        bench.do(WordTold(PairWord(99, PairWordKind.DECLINED, reason="late"), PEER))
    elif how == "stale payload":
        bench.do(PairNotSent(KEY, Refusal.STALE, "over"))
    else:
        bench.do(WordNotSent(PairWord(99, PairWordKind.WAITING), Refusal.STALE, "over"))
    assert [o.solo_reason for o in bench.outcomes] == [SoloReason.DECLINED]
    assert PairWordKind.DECLINED not in bench.words


def test_the_last_word_lost_is_one_sided_and_said_so() -> None:
    for end in ("deadline", "refused", "silence"):
        bench = Bench().begun().arrive().do(PairJudged(KEY, 0.5)).prepared().do(PairCommitted(KEY, 1.0, 0.5))
        said = PairWord(99, PairWordKind.PREPARED, THEIRS)
        bench.do(WordNotSent(said, Refusal.STALE if end == "refused" else Refusal.UNSPECIFIED))
        if end != "refused":
            assert bench.outcomes == []
            bench.at(108.0 if end == "deadline" else 105.0)
        assert [o.result for o in bench.outcomes] == [SwapResult.ONE_SIDED]
        assert bench.outcomes[0].fraction == 1.0


def test_who_has_averaged_confirms_a_word_that_comes_again() -> None:
    bench = Bench().begun().arrive().do(PairJudged(KEY, 0.5)).prepared().do(PairCommitted(KEY, 1.0, 0.5))
    bench.do(WordSent(PairWord(99, PairWordKind.PREPARED, THEIRS)))
    assert bench.rounds.judge_word(PREPARED, PEER, 109.0) is None
    assert bench.word_refusal(PairWord(99, PairWordKind.WAITING)) is Refusal.STALE


@pytest.mark.parametrize(
    ("lives", "fenced"), [({}, True), ({PEER: 8}, True), ({PEER: 7}, False), ({PEER: 6}, False)]
)
def test_a_fenced_partner_is_left_at_once(lives: dict[WorkerId, int], fenced: bool) -> None:
    bench = Bench().begun()
    bench.rounds.lives(lives, bench.now_s)
    assert [o.solo_reason for o in bench.outcomes] == [SoloReason.FENCED] * fenced


def test_a_decided_commit_survives_fence_deadline_and_next_slot() -> None:
    bench = Bench().begun().arrive().do(PairJudged(KEY, 0.5)).prepared()
    bench.rounds.lives({}, bench.now_s)
    bench.at(110.0)
    assert bench.outcomes == []
    # In the device's order the commit comes before the next outer step, which knows that the round was not alone.
    kinds = [type(effect) for effect in bench.device]
    assert kinds.index(CommitPair) < len(kinds) - 1 - kinds[::-1].index(TakeOuterStep)
    bench.do(PairCommitted(KEY, 1.0, 0.5))
    assert [o.result for o in bench.outcomes] == [SwapResult.ONE_SIDED]


def test_after_a_pause_nothing_is_committed_and_only_the_newest_slot_is_taken() -> None:
    bench = Bench().begun().arrive().do(PairJudged(KEY, 0.5))
    bench.now_s = 145.0
    assert bench.word_refusal() is Refusal.STALE
    bench.do(WordTold(PREPARED, PEER)).at(145.0)
    assert not any(isinstance(effect, CommitPair) for effect in bench.device)
    assert [e.slot for e in bench.device if isinstance(e, TakeOuterStep)] == [5, 9]
    assert bench.counters["slots_missed"] == 3


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (PairJudged(KEY, refused="its weights are not finite"), SoloReason.REFUSED),
        (PairJudged(KEY, 9.0, too_far=True), SoloReason.TOO_FAR),
        (PairFailed(KEY, "out of memory"), SoloReason.FAILED),
    ],
)
def test_what_the_device_says_ends_a_swap(event: PairDeviceOutcome, reason: SoloReason) -> None:
    bench = Bench().begun().arrive().do(event)
    assert [o.solo_reason for o in bench.outcomes] == [reason]
    assert bench.words == [PairWordKind.DECLINED]


def test_a_late_match_is_used_while_there_is_time_and_else_said_to_be_late() -> None:
    bench = Bench().at(100.0).do(OuterStepTaken(2, 5)).at(103.0).match()
    assert EncodePair(KEY) in bench.device
    late = Bench().at(100.0).do(OuterStepTaken(2, 5)).at(109.0).match()
    assert [o.solo_reason for o in late.outcomes] == [SoloReason.LATE]
    later = Bench().at(100.0).do(OuterStepTaken(2, 5)).at(110.0).match()
    assert [o.solo_reason for o in later.outcomes] == [SoloReason.NOT_MATCHED, SoloReason.LATE]
    assert later.refusal() is Refusal.STALE


def test_a_slot_that_was_matched_anew_has_the_newer_match() -> None:
    newer = replace(MATCH, partner=OTHER, round_id=100)
    bench = Bench().match().arrive().match(newer)
    assert bench.network == [ForgetPair(KEY)]
    assert bench.refusal() is Refusal.STALE
    bench.at(100.0).do(OuterStepTaken(2, 5))
    assert bench.device[-1] == EncodePair(PairKey.of(newer))


def test_rounds_alone_are_counted_by_fragment() -> None:
    bench = Bench()
    for slot in range(5, 26):
        bench.at(100.0 + 10 * (slot - 5)).do(OuterStepTaken(2, slot))
    told = [(e.fragment, e.solo_rounds) for e in bench.device if isinstance(e, TakeOuterStep)]
    assert told[-4:] == [(2, 4), (3, 4), (0, 4), (1, 5)]
    assert {o.solo_reason for o in bench.outcomes} == {SoloReason.NOT_MATCHED}


def test_readiness_is_said_after_each_outer_step_and_after_a_reconnection() -> None:
    bench = Bench()
    fresh = PairRounds(bench.device.append, bench.network.append, bench.said.append, bench.counters)
    fresh.hold(Span(0, 1))
    bench.said.clear()
    fresh.reconnected(1.0)
    assert bench.said == []
    fresh.inner_stepped(1, 64, 0.5, 2.0)
    fresh.inner_stepped(1, 64, 0.5, 2.5)
    assert bench.said == [RoundReady(1, 0, 0.0, 64, 0.5)]
    fresh.reconnected(3.0)
    assert bench.said[1:] == [RoundReady(1, 0, 0.0, 128, 0.5)]
    fresh.told(SlotClock(1, 4, 2.0, 10.0, 1), 4.0)
    assert bench.said[2:] == [RoundReady(1, 4, 2.0, 128, 0.5)]
    fresh.look_at_time(6.0)
    fresh.handle(OuterStepTaken(1, 4), 6.5)
    assert bench.said[3:] == [RoundReady(1, 5, 9.5, 128, 0.5)]
    fresh.inner_stepped(1, 64, 0.5, 7.0)
    fresh.reconnected(8.0)
    assert bench.said[4:] == [RoundReady(1, 5, 8.0, 64, 0.5)]


def test_a_new_place_in_the_plan_forgets_everything() -> None:
    bench = Bench().begun()
    bench.rounds.hold(Span(2, 2))
    assert bench.refusal(HEADER) is Refusal.BUSY
    bench.do(PairEncoded(KEY, MINE), WordTold(PREPARED, PEER))
    assert bench.counters["late_pair_events"] == 2
    bench.rounds.hold(None)
    assert bench.refusal(HEADER) is Refusal.NOT_HELD


# ------------------------------------------------------------------ slots


@given(
    clocks=st.lists(
        st.tuples(
            st.integers(1, 40), st.floats(-20, 20), st.floats(0.1, 20), st.integers(1, 4), st.floats(0, 15)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_said_slots_only_go_on(clocks: list[tuple[int, float, float, int, float]]) -> None:
    slots = StageSlots()
    now_s = 0.0
    for slot, begins_in_s, length_s, fragments, after_s in clocks:
        assert slots.told(SlotClock(0, slot, begins_in_s, length_s, fragments), now_s)
        for _ in range(3):
            now_s += after_s / 3
            due = slots.due(now_s)
            if due is not None:
                assert due > slots.taken
                assert slots.begins_at(due) <= now_s + 1e-9
                slots.taken = due
            assert slots.due(now_s) is None
            following = slots.next_slot(now_s)
            assert following > slots.taken
            assert slots.begins_at(following) > now_s


def test_a_change_is_valid_from_its_slot_on() -> None:
    slots = StageSlots()
    slots.told(SlotClock(0, 3, 1.0, 2.0, 5, warmup=True), 10.0)
    slots.told(SlotClock(0, 6, 7.0, 20.0, 5), 10.0)
    assert [slots.begins_at(slot) for slot in range(3, 9)] == [11.0, 13.0, 15.0, 17.0, 37.0, 57.0]
    assert [slots.warmup_at(slot) for slot in (5, 6)] == [True, False]
    assert slots.due(10.9) is None
    assert slots.due(16.9) == 5
    assert slots.due(17.0) == 6
    assert slots.due(56.9) == 7
    assert slots.next_slot(10.0) == 3
    assert slots.next_slot(15.5) == 6
    assert slots.fragment_of(7) == 2
