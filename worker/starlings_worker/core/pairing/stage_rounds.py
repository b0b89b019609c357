"""The rounds of one stage: slots, the swaps of each in their order, and how often a fragment was alone.

Every slot that is taken ends in at least one outcome. Outcomes are said when they are known; a slot without any match
is said to be alone when the next one begins, since a match may come late.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from starlings_protos.messages import Receipt, Refusal, WorkerId
from starlings_protos.pair_messages import (
    PairHeader,
    PairMatched,
    PairWord,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SoloReason,
    SwapResult,
)
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.pairing.slots import StageSlots
from starlings_worker.core.pairing.swap import PairTimings, Swap
from starlings_worker.core.pairing.work import (
    ForgetPair,
    OuterStepTaken,
    PairDeviceEffect,
    PairNetworkEffect,
    TakeOuterStep,
)

NOBODY = WorkerId("")
# Matches that are known for slots to come, swaps of a slot, and swaps that are over and still recognised.
ANNOUNCED_MOST = 64
SWAPS_MOST = 16
REMEMBERED = 256
# Weight of the newest inner step in the average of their seconds; of the first ones it is the plain mean.
STEP_WEIGHT = 0.1


@dataclass(slots=True)
class _Slot:
    number: int
    fragment: int
    began_at_s: float
    stepped: bool = False
    swaps: dict[int, Swap] = field(default_factory=dict)


class StageRounds:
    def __init__(
        self,
        stage: int,
        timings: PairTimings,
        push: Callable[[PairDeviceEffect], None],
        emit: Callable[[PairNetworkEffect], None],
        say: Callable[[RoundReady | RoundOutcome], None],
        counters: Counter[str],
    ) -> None:
        self.stage = stage
        self.slots = StageSlots()
        # Rounds alone in a row, by fragment.
        self.solo_rounds: Counter[int] = Counter()
        self._timings = timings
        self._push = push
        self._emit = emit
        self._say = say
        self._counters = counters
        self._slot: _Slot | None = None
        # Of slots to come, by (slot, swap).
        self._announced: dict[tuple[int, int], Swap] = {}
        # Everything that is not over, by round id.
        self._live: dict[int, Swap] = {}
        # Over, by round id: late bytes and words are recognised. None: it never began.
        self._past: OrderedDict[int, Swap | None] = OrderedDict()
        self._tokens = 0
        self._steps = 0
        self._step_s = 0.0
        self._told_without_clock = False

    # ------------------------------------------------------------------ what the coordinator says

    def clock(self, message: SlotClock, now_s: float) -> None:
        first = not self.slots.running
        if not self.slots.told(message, now_s):
            self._counters["senseless_clocks"] += 1
        elif first:
            self.say_ready(now_s)

    def matched(self, match: PairMatched, now_s: float) -> None:
        sound = 0 < match.weight < 1 and 0 < match.deadline_s < 1e6 and 0 <= match.swap < SWAPS_MOST
        if not sound or not match.partner or not self.slots.running or match.round_id in self._live:
            self._counters["senseless_matches"] += 1
            return
        swap = Swap(match, self._timings, self._push, self._emit)
        current = self._slot
        place = (match.slot, match.swap)
        if match.slot > self.slots.taken:
            replaced = self._announced.pop(place, None)
            if replaced is not None:
                # The coordinator was started anew and has matched the slot again: both sides are told.
                self._retire(replaced, began=False)
            if len(self._announced) >= ANNOUNCED_MOST:
                self._retire(self._announced.pop(max(self._announced)), began=False)
            self._announced[place] = self._live[match.round_id] = swap
        elif current is not None and match.slot == current.number and match.swap not in current.swaps:
            swap.slot_began(current.began_at_s)
            self._live[match.round_id] = current.swaps[match.swap] = swap
            if self._fragment_is_wrong(swap, now_s) or now_s < swap.deadline_at_s:
                self._go_on(now_s)
            else:
                swap.close(SoloReason.LATE, "the match came after its deadline", now_s)
                self._sweep()
        else:
            swap.close(SoloReason.LATE, "the match came after its slot", now_s)
            self._report(swap)

    def _fragment_is_wrong(self, swap: Swap, now_s: float) -> bool:
        match = swap.match
        wrong = match.fragment != self.slots.fragment_of(match.slot)
        if wrong:
            swap.close(SoloReason.REFUSED, "the match is about another fragment than its slot", now_s)
        return wrong

    def forget(self) -> None:
        """Nothing of what is under way matters any more."""
        for swap in self._live.values():
            self._emit(ForgetPair(swap.key))
        self._live.clear()

    # ------------------------------------------------------------------ training

    def inner_stepped(self, tokens: int, seconds: float, now_s: float) -> None:
        """An inner step of the stage was applied, `seconds` after the one before."""
        self._tokens += tokens
        self._steps += 1
        weight = max(STEP_WEIGHT, 1 / self._steps)
        self._step_s += weight * (seconds - self._step_s)
        if not self.slots.running and not self._told_without_clock:
            self._told_without_clock = True
            self.say_ready(now_s)

    def say_ready(self, now_s: float) -> None:
        """Again after each reconnection."""
        if self.slots.running or self._told_without_clock:
            slot = self.slots.next_slot(now_s)
            begins_in_s = self.slots.begins_at(slot) - now_s if slot else 0.0
            self._say(RoundReady(self.stage, slot, begins_in_s, self._tokens, self._step_s))

    # ------------------------------------------------------------------ time

    def look_at_time(self, now_s: float) -> None:
        for swap in list(self._live.values()):
            swap.look_at_time(now_s)
        due = self.slots.due(now_s)
        if due is not None:
            self._begin(due, now_s)
        self._go_on(now_s)

    def wake_at_s(self, now_s: float) -> float | None:
        times = [swap.wake_at_s() for swap in self._live.values()]
        if self.slots.running:
            times.append(self.slots.begins_at(self.slots.next_slot(now_s)))
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _begin(self, number: int, now_s: float) -> None:
        self.end_slot(now_s)
        self._counters["slots_missed"] += max(0, number - self.slots.taken - 1) if self.slots.taken else 0
        self.slots.taken = number
        fragment = self.slots.fragment_of(number)
        slot = self._slot = _Slot(number, fragment, self.slots.begins_at(number))
        self._push(
            TakeOuterStep(
                self.stage, number, fragment, self.slots.warmup_at(number), self.solo_rounds[fragment]
            )
        )
        for place in sorted(self._announced):
            if place[0] > number:
                continue
            swap = self._announced.pop(place)
            if place[0] < number:
                swap.close(SoloReason.LATE, "the slot was missed", now_s)
                continue
            swap.slot_began(slot.began_at_s)
            slot.swaps[place[1]] = swap
            self._fragment_is_wrong(swap, now_s)

    def end_slot(self, now_s: float) -> None:
        """Whatever has not been decided goes without its partner; what has, is carried out."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        for swap in slot.swaps.values():
            swap.close(SoloReason.LATE, "the next slot began", now_s)
        averaged = any(swap.averages for swap in slot.swaps.values())
        self.solo_rounds[slot.fragment] = 0 if averaged else self.solo_rounds[slot.fragment] + 1
        if not slot.swaps:
            self._say(
                RoundOutcome(
                    self.stage, slot.number, slot.fragment, 0, 0, NOBODY, SwapResult.SOLO,
                    SoloReason.NOT_MATCHED,
                )
            )  # fmt: skip
        self._sweep()

    def _go_on(self, now_s: float) -> None:
        """Says what is over, and starts the next swap whose turn it is."""
        self._sweep()
        slot = self._slot
        if slot is None or not slot.stepped:
            return
        for number in sorted(slot.swaps):
            swap = slot.swaps[number]
            if not swap.settled:
                if swap.started_at_s is None:
                    swap.start(now_s)
                return

    def _sweep(self) -> None:
        for swap in [swap for swap in self._live.values() if swap.over]:
            self._report(swap)

    def _report(self, swap: Swap) -> None:
        assert swap.outcome is not None
        self._say(swap.outcome)
        self._counters[f"swaps_{swap.outcome.result.name.lower()}"] += 1
        self._retire(swap, began=True)

    def _retire(self, swap: Swap, *, began: bool) -> None:
        self._live.pop(swap.key.round_id, None)
        self._past[swap.key.round_id] = swap if began else None
        if not began:
            self._emit(ForgetPair(swap.key))
        while len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    # ------------------------------------------------------------------ what peers ask

    def admit(self, header: PairHeader, sender: WorkerId, receipt: Receipt, now_s: float) -> Admission:
        swap = self._live.get(header.round_id)
        if swap is not None:
            return swap.admit(header, sender, receipt, now_s)
        if header.round_id in self._past or header.slot < self.slots.taken:
            return Rejection(Refusal.STALE, "the swap is over here")
        return Rejection(Refusal.BUSY, "this swap is not known here yet")

    def judge_word(self, word: PairWord, sender: WorkerId, now_s: float) -> Rejection | None:
        swap = self._live.get(word.round_id)
        if swap is not None:
            return swap.judge_word(word, sender, now_s)
        past = self._past[word.round_id]
        if past is not None and past.partner == sender:
            return past.late_word(word)
        return Rejection(Refusal.STALE, "the swap is over here")

    def knows(self, round_id: int) -> bool:
        return round_id in self._live or round_id in self._past

    # ------------------------------------------------------------------ what happened

    def outer_step_taken(self, event: OuterStepTaken, now_s: float) -> None:
        if self._slot is not None and self._slot.number == event.slot:
            self._slot.stepped = True
            self.say_ready(now_s)
            self._tokens = 0
            self._go_on(now_s)

    def happened(self, round_id: int, change: Callable[[Swap], None], now_s: float) -> None:
        """Something about one swap; nothing, when it is over."""
        swap = self._live.get(round_id)
        if swap is None:
            self._counters["late_pair_events"] += 1
            return
        change(swap)
        self._go_on(now_s)

    def lives(self, incarnations: Mapping[WorkerId, int], now_s: float) -> None:
        """A new plan: partners that are gone, or in a new life, are fenced."""
        for swap in list(self._live.values()):
            life = incarnations.get(swap.partner)
            if life is None or life > swap.match.partner_incarnation:
                swap.fence("it is not in the plan" if life is None else "it began a new life", now_s)
        self._go_on(now_s)

    @property
    def idle(self) -> bool:
        """No swap is under way."""
        return all(swap.started_at_s is None for swap in self._live.values())

    def swaps(self) -> Iterable[Swap]:
        return self._live.values()
