"""When slots begin here: the coordinator's last word on it, extrapolated by this worker's own monotonic clock.

The number of the newest slot that was taken never falls, whatever is said: so no slot is taken twice, and after a pause
only the newest of those that were missed is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlings_protos.pair_messages import SlotClock

SEGMENTS_MOST = 4
# Beyond any job: what says more is no clock.
SECONDS_MOST = 1e8
SLOTS_MOST = 1 << 48
LEAST_LENGTH_S = 1e-3


@dataclass(frozen=True, slots=True)
class _Segment:
    slot: int
    begins_at_s: float
    length_s: float
    fragments: int
    warmup: bool

    def begins_at(self, slot: int) -> float:
        return self.begins_at_s + (slot - self.slot) * self.length_s


class StageSlots:
    def __init__(self) -> None:
        # By slot; each is valid up to the next one's.
        self._segments: list[_Segment] = []
        # The newest slot that was taken here; 0 before the first.
        self.taken = 0
        # The owner has paused the job: no slot is taken.
        self.held = False

    def hold(self, held: bool, now_s: float) -> None:
        """When a hold ends, what began meanwhile is over: the next slot is the first that begins after `now_s`."""
        if self.held and not held:
            self.held = False
            self.taken = self.due(now_s) or self.taken
        self.held = held

    @property
    def running(self) -> bool:
        return bool(self._segments)

    def told(self, clock: SlotClock, now_s: float) -> bool:
        """Returns False for a message that makes no sense, which changes nothing."""
        sound = (
            1 <= clock.slot < SLOTS_MOST
            and LEAST_LENGTH_S <= clock.slot_length_s < SECONDS_MOST
            and -SECONDS_MOST < clock.begins_in_s < SECONDS_MOST
            and clock.fragments >= 1
        )
        if sound:
            begins_at_s = now_s + clock.begins_in_s
            segment = _Segment(clock.slot, begins_at_s, clock.slot_length_s, clock.fragments, clock.warmup)
            kept = [known for known in self._segments if known.slot < clock.slot]
            self._segments = [*kept, segment][-SEGMENTS_MOST:]
        return sound

    def due(self, now_s: float) -> int | None:
        """The newest slot that has begun and was not taken yet."""
        if self.held:
            return None
        upper: int | None = None
        for segment in reversed(self._segments):
            if now_s >= segment.begins_at_s:
                slot = segment.slot + math.floor((now_s - segment.begins_at_s) / segment.length_s)
                newest = slot if upper is None else min(slot, upper - 1)
                return newest if newest > self.taken else None
            upper = segment.slot
        return None

    def next_slot(self, now_s: float) -> int:
        """The first slot that is still to be taken, and begins after `now_s`; 0 without a clock."""
        if not self._segments:
            return 0
        slot = max(self.taken + 1, self._segments[0].slot)
        while self.begins_at(slot) <= now_s:
            behind = math.floor((now_s - self.begins_at(slot)) / self._of(slot).length_s)
            slot = max(slot + 1, min(slot + behind, self._end_of(slot)))
        return slot

    def begins_at(self, slot: int) -> float:
        return self._of(slot).begins_at(slot)

    def fragment_of(self, slot: int) -> int:
        return slot % self._of(slot).fragments

    def warmup_at(self, slot: int) -> bool:
        return self._of(slot).warmup

    def _of(self, slot: int) -> _Segment:
        """A slot before the first segment that is known belongs to it, too."""
        return next((s for s in reversed(self._segments) if s.slot <= slot), self._segments[0])

    def _end_of(self, slot: int) -> int:
        """The first slot of the segment after that of `slot`."""
        later = [s.slot for s in self._segments if s.slot > slot]
        return min(later, default=slot + (1 << 62))
