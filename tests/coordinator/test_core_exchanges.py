"""Exchanges in pairs as the core of an `async` job drives them: who takes part, slots, matches, what is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from starlings_coordinator.core.events import WorkerDisconnected
from starlings_coordinator.core.pairing.clock import MOST_SLOT_S
from starlings_coordinator.core.pairing.rounds import START_WAIT_S
from starlings_coordinator.core.records import SlotsReserved, record_from_json, record_to_json
from starlings_coordinator.core.streaming.exchanges import SLOTS_RESERVED
from starlings_coordinator.core.streaming.streaming import Streaming
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import (
    PairMatched,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SoloReason,
    SwapResult,
)
from starlings_protos.stream_messages import TrainingPaused
from support.core_world import World, config, received

A, B, C = map(WorkerId, "abc")
TWO = {"a": (0, 2), "b": (0, 2)}
PAIRS = {"every": 10, "warmup_fraction": 0.0}
# Three stages, and ten steps of a second each.
STAGES, STEP_S, SLOT_S = 3, 1.0, 10.0


class Rounds(World):
    """Replicas that lease and train when the test says so, and say what it tells them to."""

    def __init__(self, spans: dict[str, tuple[int, int]] = TWO, exchange: dict[str, Any] = PAIRS) -> None:
        job = {"name": "test", "tokens": 1000 * 8 * 64, "seed": 7}
        super().__init__(config(job=job, train={"schedule": "async"}, exchange=exchange), spans)
        self.boot()
        for name in spans:
            self.join(name, lazy=True)
        self.until_training()

    @property
    def streaming(self) -> Streaming:
        assert isinstance(self.core.schedule, Streaming)
        return self.core.schedule

    def until_training(self) -> None:
        for _ in range(8):
            if self.core.phase.value == "training":
                return
            self.tick()
        raise AssertionError(self.core.waiting_words())

    def ready(self, who: WorkerId, slot: int, *, stage: int = 0, **changes: Any) -> None:
        fields = {"begins_in_s": 0.0, "tokens": 0, "step_s": STEP_S, **changes}
        self.say(self.fakes[who], RoundReady(stage, slot, **fields))
        self.settle()

    def all_ready(self, slot: int, stage: int = 0) -> None:
        for who in sorted(self.streaming.exchanges.stages[stage].replicas):
            self.ready(who, slot, stage=stage)

    def run_clock(self, stage: int = 0) -> int:
        """Returns the first slot."""
        self.all_ready(0, stage)
        return self.heard(A, SlotClock)[-1].slot

    def heard(self, who: WorkerId, kind: type) -> list[Any]:
        return received(self.fakes[who], kind)

    def match_of(self, who: WorkerId, slot: int) -> PairMatched:
        (match,) = [m for m in self.heard(who, PairMatched) if (m.slot, m.swap) == (slot, 0)]
        return match

    def outcome(self, who: WorkerId, match: PairMatched, result: SwapResult, **changes: Any) -> None:
        place = (match.stage, match.slot, match.fragment, match.swap, match.round_id, match.partner)
        self.say(self.fakes[who], RoundOutcome(*place, result, **changes))
        self.settle()

    def lose(self, name: str) -> None:
        fake = self.fakes.pop(WorkerId(name))
        self.feed(WorkerDisconnected(fake.session, fake.worker_id))
        self.tick(2.0)


def test_the_clock_begins_when_all_train_and_matches_come_one_slot_ahead() -> None:
    world = Rounds()
    world.ready(A, 0)
    assert world.heard(A, SlotClock) == []
    world.ready(B, 0)
    for who in (A, B):
        assert world.heard(who, SlotClock) == [SlotClock(0, 1, SLOT_S, SLOT_S, 1, False)]
    world.all_ready(1)
    one, other = world.match_of(A, 1), world.match_of(B, 1)
    assert (one.partner, other.partner, one.round_id) == (B, A, other.round_id)
    assert one.partner_incarnation == world.fakes[B].incarnation
    assert one.weight + other.weight == 1
    assert any(
        e.kind == "exchange" and "stage 0 exchange in pairs every 10.0 s" in e.text for e in world.core.events
    )


def test_stages_have_clocks_of_their_own() -> None:
    world = Rounds()
    world.run_clock()
    world.all_ready(0, 2)
    assert [clock.stage for clock in world.heard(B, SlotClock)] == [0, 2]
    world.tick(SLOT_S)
    world.all_ready(2)
    world.all_ready(2, 2)
    assert {match.stage for match in world.heard(A, PairMatched)} == {0, 2}


def test_a_replica_that_says_nothing_is_not_waited_for() -> None:
    world = Rounds()
    world.ready(A, 0)
    world.tick(START_WAIT_S - 1)
    assert world.heard(A, SlotClock) == []
    world.tick(1.5)
    assert len(world.heard(A, SlotClock)) == len(world.heard(B, SlotClock)) == 1
    world.ready(A, 1)
    world.tick(SLOT_S / 2 + 0.1)
    assert world.heard(A, PairMatched) == []


def test_weights_are_what_the_ledger_knows() -> None:
    """Both lead microbatches through all stages: three to one, whatever they claim."""
    world = Rounds()
    slot = world.run_clock()
    world.train("a", 3)
    world.train("b", 1)
    world.tick(1.0)
    world.ready(A, slot)
    world.ready(B, slot, tokens=3 * 128)
    assert math.isclose(world.match_of(A, slot).weight, 0.75)
    assert math.isclose(world.match_of(B, slot).weight, 0.25)
    assert not world.streaming.exchanges.stages[0].book.named


def test_only_what_nobody_else_has_counts_as_unmerged() -> None:
    world = Rounds(exchange={**PAIRS, "fragments": 2})
    slot = world.run_clock()
    world.run_clock(1)
    world.run_clock(2)
    world.train("a", 2)
    for begun in (slot, slot + 1):
        for stage in range(STAGES):
            world.all_ready(begun, stage)
        # The slot begins with what is done by then; what comes after is in no payload.
        world.tick(SLOT_S / 2)
        world.tick(SLOT_S / 2 + 0.05)
        world.train("a", 1)
        for stage in range(STAGES):
            match = next(m for m in world.heard(B, PairMatched) if (m.stage, m.slot) == (stage, begun))
            world.outcome(B, match, SwapResult.ONE_SIDED, fraction=1.0)
        # Half of the vector is as new as the slot before.
        assert world.streaming.contributions.unmerged(A) == {slot: 2 * 3, slot + 1: 2 * 2}[begun]
    world.lose("a")
    assert world.core.state.samples_unmerged == 2 * 2
    # B's own work went nowhere: A did not say that it averaged.
    assert world.streaming.contributions.unmerged(B) == world.streaming.contributions.count(B, 0)


def test_a_solo_outcome_merges_nothing_and_neither_does_a_lie() -> None:
    world = Rounds()
    slot = world.run_clock()
    world.train("a", 2)
    world.all_ready(slot)
    world.tick(SLOT_S / 2)
    world.tick(SLOT_S / 2 + 0.05)
    match = world.match_of(B, slot)
    world.outcome(B, match, SwapResult.SOLO, solo_reason=SoloReason.SILENT)
    world.outcome(B, match, SwapResult.COMMITTED)
    status = world.core.status(world.now()).exchanges[0]
    assert status.reports_unexpected == 1
    assert status.rounds_averaged == 0
    assert world.streaming.contributions.unmerged(A) == 4


def test_a_lost_partner_is_matched_no_more_and_a_new_life_hears_the_clock() -> None:
    world = Rounds({"a": (0, 2), "b": (0, 2), "c": (0, 2)})
    slot = world.run_clock()
    world.all_ready(slot)
    world.lose("b")
    world.tick(SLOT_S)
    world.all_ready(slot + 1)
    assert world.match_of(A, slot + 1).partner == C
    world.train("a", 4)
    world.tick(1.1)
    world.join("b", lazy=True)
    for _ in range(8):
        world.train("a", 4)
        world.tick()
        if B in world.core.state.spans:
            break
    assert B in world.core.state.spans
    clocks = world.heard(B, SlotClock)
    assert clocks
    assert clocks[-1].slot == slot + 1
    assert world.streaming.exchanges.stages[0].replicas[B].incarnation == world.fakes[B].incarnation == 2


def test_a_replica_on_a_new_stream_hears_the_clock_again() -> None:
    world = Rounds()
    world.run_clock()
    before = len(world.heard(B, SlotClock))
    world.feed(WorkerDisconnected(world.fakes[B].session, B))
    world.tick(0.5)
    world.reconnect("b")
    assert len(world.heard(B, SlotClock)) == before + 1
    assert world.core.phase.value == "training"


def restarted(world: Rounds) -> None:
    world.restart()
    for name in world.spans:
        world.reconnect(name)
    assert world.core.phase.value == "training"


def test_after_a_restart_slots_go_on_where_replicas_have_them() -> None:
    world = Rounds()
    slot = world.run_clock()
    world.all_ready(slot)
    restarted(world)
    # One that never had a clock speaks first, and waits for those that have one.
    world.ready(A, 0)
    world.tick(START_WAIT_S + 1)
    assert world.streaming.exchanges.stages[0].clock.running is False
    world.ready(B, slot + 7, begins_in_s=3.0)
    assert world.heard(A, SlotClock)[-1] == SlotClock(0, slot + 7, 3.0, SLOT_S, 1, False)


def test_without_anybody_that_has_a_clock_slots_go_on_above_all_that_were_ever_spoken_of() -> None:
    world = Rounds()
    assert world.run_clock() == 1
    ids = set()
    for slot in range(1, 5):
        world.all_ready(slot)
        ids.add(world.match_of(A, slot).round_id)
        world.tick(SLOT_S)
    restarted(world)
    world.ready(A, 0)
    world.ready(B, 0)
    first = world.heard(A, SlotClock)[-1].slot
    assert 5 < first <= 5 + SLOTS_RESERVED + 1
    world.all_ready(first)
    assert world.match_of(A, first).round_id not in ids
    reserved = [record for record in world.records if isinstance(record, SlotsReserved)]
    assert len(reserved) == 2
    assert all(record_from_json(record_to_json(record)) == record for record in reserved)
    assert world.core.state.slots_reserved > first


def test_reserved_slots_are_always_ahead_and_rarely_written() -> None:
    world = Rounds()
    world.run_clock()
    for _ in range(300):
        world.tick(SLOT_S)
        slot = world.streaming.exchanges.stages[0].clock.slot_at(world.now_s)
        assert slot < world.core.state.slots_reserved
    assert len([r for r in world.records if isinstance(r, SlotsReserved)]) == 2


@pytest.mark.parametrize(
    "message",
    [
        RoundReady(0, 1 << 63, 0.0, 0, STEP_S),
        RoundReady(0, 3, math.inf, 0, STEP_S),
        RoundReady(0, 3, math.nan, 0, STEP_S),
        RoundReady(7, 0, 0.0, 0, STEP_S),
        RoundOutcome(7, 1, 0, 0, 1, B, SwapResult.COMMITTED),
    ],
)
def test_nonsense_is_dropped(message: RoundReady | RoundOutcome) -> None:
    world = Rounds()
    dropped = world.core.dropped_messages
    world.say(world.fakes[A], message)
    world.settle()
    assert world.core.dropped_messages == dropped + 1
    assert world.heard(A, SlotClock) == []


def test_a_time_that_cannot_be_is_taken_for_the_longest_slot() -> None:
    world = Rounds()
    world.ready(A, 0, step_s=math.inf)
    world.ready(B, 0, step_s=1e9)
    assert world.heard(A, SlotClock)[-1].slot_length_s == MOST_SLOT_S


def test_who_does_not_hold_the_stage_says_nothing() -> None:
    world = Rounds({"a": (0, 1), "b": (2, 2), "c": (0, 2)})
    dropped = world.core.dropped_messages
    world.ready(B, 0, stage=0)
    assert world.core.dropped_messages == dropped + 1
    assert sorted(world.streaming.exchanges.stages[2].replicas) == [B, C]


def test_status_says_what_came_of_rounds() -> None:
    world = Rounds()
    slot = world.run_clock()
    for number in range(3):
        world.all_ready(slot + number)
        one, other = world.match_of(A, slot + number), world.match_of(B, slot + number)
        world.tick(SLOT_S)
        if number == 0:
            world.outcome(A, one, SwapResult.COMMITTED, fraction=1.0)
            world.outcome(B, other, SwapResult.COMMITTED, fraction=1.0)
        elif number == 1:
            world.outcome(A, one, SwapResult.ONE_SIDED, fraction=1.0)
            world.outcome(B, other, SwapResult.SOLO, solo_reason=SoloReason.LATE)
        else:
            detail = "its weights are not finite"
            world.outcome(
                A, one, SwapResult.SOLO, solo_reason=SoloReason.REFUSED, fraction=0.0, detail=detail
            )
    shown = world.core.status(world.now()).exchanges
    assert [stage.stage for stage in shown] == [0, 1, 2]
    first = shown[0]
    assert (first.rounds_averaged, first.rounds_one_sided, first.slot) == (1, 1, slot + 2)
    one, two = first.replicas
    assert (one.worker_id, one.averaged, one.alone, one.alone_in_a_row, one.one_sided) == (A, 2, 1, 1, 1)
    assert (two.averaged, two.alone, two.suspect) == (1, 1, False)
    assert one.last is not None
    assert (one.last.partner, one.last.fraction, one.last.detail) == (B, 0.0, "its weights are not finite")
    assert first.named == ("b, by a: its weights are not finite",)
    assert any(e.text.endswith("of stage 0: its weights are not finite") for e in world.core.events)


def test_who_is_named_by_several_partners_is_suspected_once() -> None:
    world = Rounds({"a": (0, 2), "b": (0, 2), "c": (0, 2)})
    slot = world.run_clock()
    for number in range(12):
        world.all_ready(slot + number)
        for who in (A, B):
            for match in world.heard(who, PairMatched):
                if (match.slot, match.partner) == (slot + number, C):
                    world.outcome(who, match, SwapResult.SOLO, solo_reason=SoloReason.REFUSED)
        world.tick(SLOT_S)
    assert [e.text for e in world.core.events if e.kind == "suspect"] == [
        "c is named by several partners: a, b"
    ]
    assert [r.suspect for r in world.core.status(world.now()).exchanges[0].replicas] == [False, False, True]


def test_who_is_too_far_away_copies_what_others_have_unless_it_is_the_last() -> None:
    world = Rounds()
    slot = world.run_clock()
    world.all_ready(slot)
    matches = {who: world.match_of(who, slot) for who in (A, B)}
    world.outcome(A, matches[A], SwapResult.SOLO, solo_reason=SoloReason.TOO_FAR)
    assert sorted(world.core.state.spans) == [B]
    assert world.closed[-1].worker_id == A
    world.outcome(B, matches[B], SwapResult.SOLO, solo_reason=SoloReason.TOO_FAR)
    assert sorted(world.core.state.spans) == [B]
    assert world.core.phase.value == "training"


def test_what_real_swaps_took_is_what_their_links_are_believed_to_take() -> None:
    """Until then they are guessed; and a swap that came to nothing says nothing of a link."""
    world = Rounds(dict.fromkeys("abcd", (0, 2)))
    slot = world.run_clock()
    links = world.streaming.exchanges._links
    known = {}
    for number in range(6):
        world.all_ready(slot + number)
        for who in map(WorkerId, "abcd"):
            match = world.match_of(who, slot + number)
            pair = frozenset((who, match.partner))
            before_s = known.get(pair, links.exchange_s(*sorted(pair), 10**6))
            slow = A in pair and B in pair
            if slow:
                world.outcome(who, match, SwapResult.COMMITTED, fraction=1.0, seconds=9.0)
                assert links.exchange_s(*sorted(pair), 10**6) > 2 * before_s
            else:
                world.outcome(who, match, SwapResult.SOLO, solo_reason=SoloReason.LATE)
                assert links.exchange_s(*sorted(pair), 10**6) == before_s
            known.setdefault(pair, before_s)
        world.tick(SLOT_S)
    assert frozenset((A, B)) in known


def test_after_the_end_of_training_no_slot_is_spoken_of() -> None:
    world = Rounds()
    slot = world.run_clock()
    world.all_ready(slot)
    match = world.match_of(B, slot)
    world.core.state.stop_reason = "test"
    world.train("a", 4)
    world.tick(1.1)
    assert received(world.fakes[A], TrainingPaused)
    before = len(world.heard(A, SlotClock)) + len(world.heard(A, PairMatched))
    world.ready(A, slot + 1)
    world.tick(SLOT_S)
    assert len(world.heard(A, SlotClock)) + len(world.heard(A, PairMatched)) == before
    # What came of the last slot is still heard.
    if world.core.phase.value == "finishing":
        world.outcome(B, match, SwapResult.COMMITTED, fraction=1.0)
        assert world.core.status(world.now()).exchanges[0].replicas[1].averaged == 1


def test_a_job_without_pairs_has_no_slots() -> None:
    world = Rounds(exchange={"preset": "none"})
    world.ready(A, 0)
    world.ready(B, 0)
    assert world.heard(A, SlotClock) == []
    assert world.core.status(world.now()).exchanges == ()
