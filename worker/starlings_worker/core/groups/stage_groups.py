"""The rounds of one stage's group: slots, one round in each, and where this replica's starting points are.

Every slot that is taken ends in exactly one outcome.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from starlings_protos.group_messages import (
    GroupClosed,
    GroupDecided,
    GroupHeader,
    GroupHeld,
    GroupMatched,
    GroupPrepared,
)
from starlings_protos.messages import Receipt, Refusal, WorkerId
from starlings_protos.pair_messages import RoundOutcome, RoundReady, SlotClock, SoloReason, SwapResult
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.groups.round import NOBODY, GroupRound
from starlings_worker.core.groups.work import (
    AnchorsDigested,
    DigestAnchors,
    GroupNetworkEffect,
    GroupResult,
    GroupTask,
    GroupWork,
)
from starlings_worker.core.pairing.slots import StageSlots
from starlings_worker.core.pairing.stage_rounds import STEP_WEIGHT

# Matches for slots to come that are kept, and rounds that are over and still recognised.
ANNOUNCED_MOST = 4
REMEMBERED = 16
SEATS_MOST = 4096

Said = RoundReady | RoundOutcome | GroupHeld | GroupPrepared


class StageGroups:
    def __init__(
        self,
        stage: int,
        worker_id: WorkerId,
        overlapped: bool,
        push: Callable[[GroupWork], None],
        emit: Callable[[GroupNetworkEffect], None],
        say: Callable[[Said], None],
        counters: Counter[str],
    ) -> None:
        self.stage = stage
        self.slots = StageSlots()
        self._worker_id = worker_id
        self._overlapped = overlapped
        self._push = push
        self._emit = emit
        self._say = say
        self._counters = counters
        # By fragment; empty until the device has looked.
        self._anchors: list[str] = []
        self._announced: dict[int, GroupRound] = {}
        # Of the slot that was taken last; None: no match has come.
        self.round: GroupRound | None = None
        self._said_outcome = True
        self._fragment = 0
        self._past: OrderedDict[int, None] = OrderedDict()
        self._tokens = 0
        self._steps = 0
        self._step_s = 0.0
        self._trains = False
        self._expiry_told = False
        push(GroupWork(DigestAnchors(stage)))

    def forget(self) -> None:
        """Nothing of what is under way matters any more."""
        for round_ in (*self._announced.values(), self.round):
            if round_ is not None:
                round_.forget()
        self._announced.clear()
        self.round = None

    @property
    def holds_training(self) -> bool:
        return self.round is not None and self.round.holds_training

    # ------------------------------------------------------------------ what the coordinator says

    def clock(self, message: SlotClock, now_s: float) -> None:
        first = not self.slots.running
        if not self.slots.told(message, now_s):
            self._counters["senseless_clocks"] += 1
        elif first:
            self.say_ready(now_s)

    def matched(self, match: GroupMatched, now_s: float) -> None:
        known = match.round_id in self._past or any(r.match == match for r in self._announced.values())
        if not self._is_sound(match) or known:
            self._counters["senseless_matches"] += 1
            return
        round_ = GroupRound(match, self._worker_id, self._overlapped, self._push, self._emit, self._say)
        current = self.slots.taken
        if match.slot > current:
            replaced = self._announced.pop(match.slot, None)
            if replaced is not None:
                # The coordinator was started anew, and has matched the slot again.
                self._retire(replaced)
            while len(self._announced) >= ANNOUNCED_MOST:
                self._retire(self._announced.pop(min(self._announced)))
            self._announced[match.slot] = round_
        elif match.slot == current and self.round is None and not self._said_outcome:
            self._begin_round(round_, now_s)
        else:
            self._counters["late_matches"] += 1

    def _is_sound(self, match: GroupMatched) -> bool:
        ids = [seat.worker_id for seat in match.seats]
        return (
            self.slots.running
            and 0 < match.deadline_s < 1e6
            and 1 <= len(ids) <= SEATS_MOST
            and ids == sorted(set(ids))
            and all(0 <= seat.share <= 1 and 0 <= seat.weight < float("inf") for seat in match.seats)
            and abs(sum(seat.share for seat in match.seats) - 1) < 1e-6
            and match.donor in ids
            and (self._worker_id in ids) != (self._worker_id in match.adopters)
        )

    def closed(self, message: GroupClosed, now_s: float) -> None:
        round_ = self._live(message.round_id)
        if round_ is not None:
            round_.close_members(message, now_s)
            self._go_on(now_s)

    def decided(self, message: GroupDecided, now_s: float) -> None:
        round_ = self._live(message.round_id)
        if round_ is not None:
            round_.decide(message, now_s)
            self._go_on(now_s)

    def _live(self, round_id: int) -> GroupRound | None:
        found = self.find(round_id)
        if found is None:
            self._counters["late_group_events"] += 1
        return found

    def find(self, round_id: int) -> GroupRound | None:
        rounds = (*self._announced.values(), self.round)
        return next((r for r in rounds if r is not None and r.key.round_id == round_id), None)

    def lives(self, incarnations: Mapping[WorkerId, int]) -> None:
        """A new plan. Who left it, the coordinator leaves out; an adopter whose donor is gone waits for the next."""

    # ------------------------------------------------------------------ training

    def inner_stepped(self, tokens: int, seconds: float, now_s: float) -> None:
        """An inner step of the stage was applied, `seconds` after the one before."""
        self._tokens += tokens
        self._steps += 1
        weight = max(STEP_WEIGHT, 1 / self._steps)
        self._step_s += weight * (seconds - self._step_s)
        if not self._trains:
            self._trains = True
            self.say_ready(now_s)

    def say_ready(self, now_s: float) -> None:
        """Again after each reconnection, and whenever the starting point of the next slot's fragment has moved."""
        if not (self._anchors and (self.slots.running or self._trains)):
            return
        slot = self.slots.next_slot(now_s)
        begins_in_s = self.slots.begins_at(slot) - now_s if slot else 0.0
        self._say(
            RoundReady(self.stage, slot, begins_in_s, self._tokens, self._step_s, self._anchor_at(slot))
        )

    def _anchor_at(self, slot: int) -> str:
        fragment = self.slots.fragment_of(slot) if slot else 0
        return self._anchors[fragment] if fragment < len(self._anchors) else ""

    # ------------------------------------------------------------------ time

    def look_at_time(self, now_s: float) -> None:
        if self.round is not None:
            self.round.look_at_time(now_s)
        due = self.slots.due(now_s)
        # What the device applies is done before anything else, and then the slot may be taken.
        if due is not None and self._anchors and not (self.round is not None and self.round.applying):
            self._begin(due, now_s)
        self._go_on(now_s)

    def wake_at_s(self, now_s: float) -> float | None:
        times = [self.round.wake_at_s()] if self.round is not None else []
        if self.slots.running:
            times.append(self.slots.begins_at(self.slots.next_slot(now_s)))
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _begin(self, number: int, now_s: float) -> None:
        self.end_slot(now_s)
        self._counters["slots_missed"] += max(0, number - self.slots.taken - 1) if self.slots.taken else 0
        self.slots.taken = number
        self._fragment = self.slots.fragment_of(number)
        self._said_outcome = self._expiry_told = False
        for slot in sorted(self._announced):
            if slot < number:
                self._retire(self._announced.pop(slot))
        round_ = self._announced.pop(number, None)
        if round_ is None:
            self._go_to_next(now_s)
        else:
            self._begin_round(round_, now_s)

    def _begin_round(self, round_: GroupRound, now_s: float) -> None:
        self.round = round_
        match, number = round_.match, self.slots.taken
        if match.fragment != self._fragment:
            round_.close(SoloReason.REFUSED, "the match is about another fragment than its slot", now_s)
        elif round_.seated and match.anchor != self._anchor_at(number):
            round_.close(SoloReason.BEHIND, "the match is about another starting point than is here", now_s)
        else:
            round_.begin(self.slots.begins_at(number), warmup=self.slots.warmup_at(number))
        self._go_on(now_s)

    def end_slot(self, now_s: float) -> None:
        """Whatever has not been decided by now changes nothing."""
        round_, self.round = self.round, None
        if round_ is not None:
            round_.close(SoloReason.LATE, _what_is_missing(round_), now_s)
            self._report(round_)
            self._retire(round_)
        elif not self._said_outcome:
            self._said_outcome = True
            self._counters["rounds_solo"] += 1
            self._say(
                RoundOutcome(
                    self.stage, self.slots.taken, self._fragment, 0, 0, NOBODY, SwapResult.SOLO,
                    SoloReason.NOT_MATCHED,
                )
            )  # fmt: skip

    def _go_on(self, now_s: float) -> None:
        """Says what is over, and where this replica stands for the next slot."""
        round_ = self.round
        if round_ is None:
            return
        if round_.over and not self._said_outcome:
            self._report(round_)
            if round_.anchor is not None and self._anchors:
                self._anchors[round_.match.fragment] = round_.anchor
            self._go_to_next(now_s)
        elif round_.expired and not self._expiry_told:
            self._expiry_told = True
            self._go_to_next(now_s)

    def _go_to_next(self, now_s: float) -> None:
        self.say_ready(now_s)
        self._tokens = 0

    def _report(self, round_: GroupRound) -> None:
        if self._said_outcome or round_.outcome is None:
            return
        self._said_outcome = True
        self._say(round_.outcome)
        self._counters[f"rounds_{round_.outcome.result.name.lower()}"] += 1

    def _retire(self, round_: GroupRound) -> None:
        round_.forget()
        self._past[round_.key.round_id] = None
        while len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    # ------------------------------------------------------------------ what peers ask, what happened

    def admit(self, header: GroupHeader, sender: WorkerId, receipt: Receipt) -> Admission:
        round_ = self.find(header.round_id)
        if round_ is not None:
            return round_.admit(header, sender, receipt)
        if header.round_id in self._past or header.slot < self.slots.taken:
            return Rejection(Refusal.STALE, "the round is over here")
        return Rejection(Refusal.BUSY, "this round is not known here yet")

    def worked(self, task: GroupTask, result: GroupResult, now_s: float) -> None:
        if isinstance(result, AnchorsDigested):
            self._anchors = list(result.anchors)
            self.say_ready(now_s)
            return
        if isinstance(task, DigestAnchors):
            return
        round_ = self._live(task.key.round_id)
        if round_ is not None:
            round_.worked(task, result, now_s)
            self._go_on(now_s)

    def happened(self, round_id: int, change: Callable[[GroupRound], None], now_s: float) -> None:
        """Something about one round; nothing, when it is over."""
        round_ = self._live(round_id)
        if round_ is not None:
            change(round_)
            round_.look_at_time(now_s)
            self._go_on(now_s)


def _what_is_missing(round_: GroupRound) -> str:
    if round_.me is None:
        return f"no starting point came from {round_.match.donor}"
    if round_.closed is None:
        return "the coordinator did not close the round in time"
    return "the coordinator did not decide the round in time"
