"""When the slots of a stage begin. A slot lasts H times the median step of the group, so that an exchange that is
shorter than H steps costs nobody time; and every replica extrapolates, so that slots go on without the coordinator.

A change never touches a slot that somebody may have been matched for: it begins two slots later at the earliest and is
announced at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from starlings_protos.pair_messages import SlotClock

# A shorter slot would leave no time for the messages that belong to it.
LEAST_SLOT_S = 0.5
MOST_SLOT_S = 3600.0
# A new length is announced when it differs by this factor in so many looks in a row (one per slot): a busy minute is no
# reason to move everybody's clock.
CHANGE_FACTOR = 1.25
LOOKS_BEFORE_CHANGE = 3
# In the first slots one look is enough: first steps are slow ones, and say little of those that come.
YOUNG_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """From `slot` on, which begins at `begins_at_s`, slots follow each other every `length_s`."""

    slot: int
    begins_at_s: float
    length_s: float
    warmup: bool

    def begins_at(self, slot: int) -> float:
        return self.begins_at_s + (slot - self.slot) * self.length_s

    def slot_at(self, now_s: float) -> int:
        """The newest slot that has begun; below `slot` before the segment does."""
        return self.slot + math.floor((now_s - self.begins_at_s) / self.length_s)


def slot_length_s(
    inner_steps: int, step_seconds: Iterable[float], least_s: float = LEAST_SLOT_S
) -> float | None:
    """H x the median of the group's step times, within bounds; None while nobody has made a step."""
    known = [seconds for seconds in step_seconds if 0 < seconds < math.inf]
    if not known:
        return None
    return min(MOST_SLOT_S, max(least_s, inner_steps * median(known)))


class StageClock:
    def __init__(self, stage: int, fragments: int) -> None:
        self.stage = stage
        self.fragments = fragments
        self._segment: Segment | None = None
        # Announced, and not begun.
        self._next: Segment | None = None
        # Looks in a row at which the length was too long (positive) or too short (negative).
        self._off = 0
        self._first_slot = 0

    @property
    def running(self) -> bool:
        return self._segment is not None

    @property
    def warmup(self) -> bool:
        """Of the newest announcement."""
        newest = self._next or self._segment
        return newest is not None and newest.warmup

    def start(self, slot: int, begins_at_s: float, length_s: float, *, warmup: bool) -> None:
        self._segment, self._next, self._off = Segment(slot, begins_at_s, length_s, warmup), None, 0
        self._first_slot = slot

    def slot_at(self, now_s: float) -> int:
        """The newest slot that has begun."""
        segment = self._at(now_s)
        return segment.slot_at(now_s)

    def begins_at(self, slot: int) -> float:
        return self._of(slot).begins_at(slot)

    def length_of(self, slot: int) -> float:
        return self._of(slot).length_s

    def warmup_at(self, slot: int) -> bool:
        return self._of(slot).warmup

    def fragment_of(self, slot: int) -> int:
        return slot % self.fragments

    def review(
        self,
        inner_steps: int,
        step_seconds: Iterable[float],
        *,
        warmup: bool,
        now_s: float,
        least_s: float = LEAST_SLOT_S,
    ) -> bool:
        """To be called once per slot. Returns whether a change is to be announced.

        Args:
            inner_steps, warmup: H, and whether it is the warm-up's, by the tokens that are trained.
            least_s: what no slot may be shorter than.
        """
        current = self._at(now_s)
        wanted_s = slot_length_s(inner_steps, step_seconds, least_s)
        if self._next is not None or wanted_s is None:
            return False
        if warmup == current.warmup:
            ratio = wanted_s / current.length_s
            side = (ratio > CHANGE_FACTOR) - (ratio < 1 / CHANGE_FACTOR)
            self._off = self._off + side if side and side * self._off >= 0 else side
            young = current.slot_at(now_s) < self._first_slot + YOUNG_SLOTS
            if abs(self._off) < (1 if young else LOOKS_BEFORE_CHANGE):
                return False
        self._off = 0
        first = current.slot_at(now_s) + 2
        self._next = Segment(first, current.begins_at(first), wanted_s, warmup)
        return True

    def announcements(self, now_s: float) -> tuple[SlotClock, ...]:
        """All that a replica needs to know which slots come: for one that is new, or for all after a change."""
        current = self._at(now_s)
        # At the moment of its start, a segment's first slot is one length ahead, give or take a rounding: without the
        # bound, the slot before it could be announced, which no replica accepts where the first one is 1.
        slot = max(current.slot, current.slot_at(now_s) + 1)
        known = [Segment(slot, current.begins_at(slot), current.length_s, current.warmup)]
        if self._next is not None:
            if self._next.slot <= slot:
                known.clear()
            known.append(self._next)
        return tuple(
            SlotClock(self.stage, s.slot, s.begins_at_s - now_s, s.length_s, self.fragments, s.warmup)
            for s in known
        )

    def _at(self, now_s: float) -> Segment:
        assert self._segment is not None, "the clock does not run yet"
        if self._next is not None and now_s >= self._next.begins_at_s:
            self._segment, self._next = self._next, None
        return self._segment

    def _of(self, slot: int) -> Segment:
        assert self._segment is not None, "the clock does not run yet"
        return self._next if self._next is not None and slot >= self._next.slot else self._segment
