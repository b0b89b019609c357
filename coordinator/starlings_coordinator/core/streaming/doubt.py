"""How much of what is leased may be trained without anybody having heard of it: what the ledger cannot know.

A worker holds at most `slots` microbatches: that many may be under way when it is lost. One whose stream broke before
may have gone on meanwhile, at its pace: a coordinator that hears nothing cannot tell it from one that is dead. And one
that is not heard again after a restart of the coordinator may have trained all that it had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member
from starlings_protos.messages import Span, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# A worker may have been this much faster than it was of late.
PACE_MARGIN = 2.0
# Seconds over which a pace is measured.
PACE_WINDOW_S = 30.0
# So many microbatches say what a worker's pace is; before, nobody knows what it did in a silence this long.
PACE_MICROBATCHES = 4
SILENCE_S = 1.0
UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _Holder:
    """As it was when it was last seen: the plan knows no lost ones."""

    member: Member
    span: Span
    slots: int
    # Samples that it led and reported, since when; the former is halved when the latter is long ago.
    reported: float = 0.0
    since_s: float = 0.0


class Doubt:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._holders: dict[WorkerId, _Holder] = {}
        self._plan_version = -1
        # Not heard of since the coordinator was started: they went on meanwhile.
        self._unheard: set[WorkerId] = set()

    def begin(self, *, recalled: bool) -> None:
        self._holders.clear()
        self._unheard.clear()
        self._plan_version = -1
        self.follow_plan()
        self._unheard = (
            {w for w, h in self._holders.items() if h.member.session is None} if recalled else set()
        )

    def follow_plan(self) -> None:
        """After every event: remember who holds what with how many slots, also of who is lost next."""
        core, state = self._core, self._core.state
        for worker_id in [w for w in self._unheard if self._holders[w].member.session is not None]:
            self._unheard.discard(worker_id)
        if self._plan_version == state.plan_version:
            return
        self._plan_version = state.plan_version
        for holder in core.holders:
            worker_id, span = holder.worker_id, state.spans[holder.worker_id]
            planned = state.planned.get(worker_id)
            slots = max(1, planned.slots) if planned is not None else 1
            known = self._holders.get(worker_id)
            if known is None or known.member is not holder:
                self._holders[worker_id] = _Holder(holder, span, slots, 0.0, core.now.monotonic_s)
            else:
                known.span, known.slots = span, slots

    def reported(self, worker_id: WorkerId, samples: int) -> None:
        known, now_s = self._holders.get(worker_id), self._core.now.monotonic_s
        if known is None:
            return
        known.reported += samples
        if now_s - known.since_s > PACE_WINDOW_S:
            known.reported /= 2
            known.since_s = (known.since_s + now_s) / 2

    def forget(self, worker_id: WorkerId) -> None:
        self._holders.pop(worker_id, None)
        self._unheard.discard(worker_id)

    # ------------------------------------------------------------------ questions

    def slots(self, worker_id: WorkerId) -> int:
        known = self._holders.get(worker_id)
        return known.slots if known is not None else 1

    def under_way(self, worker_id: WorkerId) -> int:
        """At most so many samples are with the worker between a forward and a backward pass."""
        return self.slots(worker_id) * self._core.config.job.train.microbatch

    @property
    def all_under_way(self) -> int:
        """At most so many samples are on their way through the stages."""
        first = [w for w, span in self._core.state.spans.items() if span.first_stage == 0]
        return sum(self.under_way(worker_id) for worker_id in first)

    def in_doubt(self, worker_id: WorkerId, now_s: float) -> int:
        """At most so many of the samples that the worker leased are begun and not reported."""
        known = self._holders.get(worker_id)
        if known is None or worker_id in self._unheard:
            return UNBOUNDED
        silent_s = max(0.0, now_s - known.member.detector.last_heard_s)
        if (
            silent_s > SILENCE_S
            and known.reported < PACE_MICROBATCHES * self._core.config.job.train.microbatch
        ):
            return UNBOUNDED
        pace = known.reported / max(1.0, known.member.detector.last_heard_s - known.since_s)
        return self.under_way(worker_id) + math.ceil(PACE_MARGIN * pace * silent_s)

    def passing(self, worker_id: WorkerId, led: int) -> int:
        """At most so many samples of others are with a lost worker, and may have been added behind it.

        Args:
            led: how many of its own samples are in doubt.
        """
        known = self._holders.get(worker_id)
        if known is None or known.span.last_stage == len(self._core.state.stages) - 1:
            return 0
        return max(0, self.under_way(worker_id) - led)
