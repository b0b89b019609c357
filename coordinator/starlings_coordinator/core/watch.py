"""Holders that live and yet do not get on: whose device hangs, and who is slower than planned.

Both are told by heartbeats (worker: `core/vitals.py`). A device *hangs* when it has been at one piece of work for
longer than any takes, and the worker's counter of things done stands still; a slow one still counts. It is suspected
at half of that time, and then given up like one that fell silent: as a new life, or with a new engine if the device
does not come back, it copies the state and joins again. *Stragglers* are judged by `straggling.py`. Soft: a restarted
coordinator measures anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member, Suspicion
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.straggling import Colour, Figures, Paces, Verdict
from starlings_coordinator.core.traffic import largest_boundary_bytes
from starlings_protos.messages import Span, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Everybody is looked at this often, and in large swarms so many in a second.
LOOK_EVERY_S = 2.0
LOOKS_PER_S = 1000.0
# Of the time after which a device hangs, the part after which it is suspected.
SUSPECT_AT = 0.5
# The slowest memory that anything is copied from or hashed in, and how many passes of the whole span one piece of work
# may take.
SLOWEST_BYTES_PER_S = 2e8
PASSES = 20


@dataclass(slots=True)
class _Seen:
    """Of one holder under its present span."""

    incarnation: int
    span: Span
    # Per stage as it was measured, forward plus backward plus what is computed again.
    planned_seconds: tuple[float, ...]
    passes: int
    progress: int
    moved_at_s: float


class Watch:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.paces = Paces()
        self._seen: dict[WorkerId, _Seen] = {}
        self._look_again_at_s = float("-inf")

    def look_at_time(self, *, forgive: bool) -> None:
        """`forgive`: this machine was asleep, so what nobody said proves nothing."""
        core, now_s = self._core, self._core.now.monotonic_s
        if forgive:
            for seen in self._seen.values():
                seen.moved_at_s = now_s
        if now_s < self._look_again_at_s:
            return
        holders = core.holders if core.phase is Phase.TRAINING else ()
        self._look_again_at_s = now_s + max(LOOK_EVERY_S, len(holders) / LOOKS_PER_S)
        here = {h.worker_id for h in holders}
        self.paces.keep(here)
        for gone in self._seen.keys() - here:
            del self._seen[gone]
        for holder in holders:
            if holder.session is not None:
                self._look_at(holder, now_s)
        for worker_id, verdict in self.paces.judge(now_s).items():
            self._announce(worker_id, verdict)

    def _look_at(self, holder: Member, now_s: float) -> None:
        worker_id, sign, span = holder.worker_id, holder.heartbeat, self._core.state.spans[holder.worker_id]
        seen = self._seen.get(worker_id)
        if seen is None or (seen.incarnation, seen.span) != (holder.incarnation, span):
            self.paces.forget(worker_id)
            planned = self._planned_seconds(holder, span)
            self._seen[worker_id] = _Seen(
                holder.incarnation, span, planned, sign.passes, sign.progress, now_s
            )
            return
        if sign.progress != seen.progress or not sign.busy_s:
            seen.progress, seen.moved_at_s = sign.progress, now_s
            if holder.suspicion is not None and not holder.suspicion.of_silence:
                holder.suspicion = None
                self._core.desk.announce("trusted", f"{worker_id} gets something done again")
        else:
            self._judge_stillness(holder, now_s - seen.moved_at_s, sum(seen.planned_seconds))
        if sign.passes != seen.passes and len(sign.stage_seconds) == len(seen.planned_seconds):
            seen.passes = sign.passes
            self._observe(holder, seen, now_s)

    def _judge_stillness(self, holder: Member, still_s: float, pass_s: float) -> None:
        core, most_s = self._core, self.patience_s(holder, pass_s)
        words = f"its device has been at one piece of work for {still_s:.0f} s and gets nothing done"
        if still_s >= most_s:
            core.membership.dismiss(holder, None, words)
        elif still_s >= SUSPECT_AT * most_s and holder.suspicion is None:
            holder.suspicion = Suspicion(core.now.monotonic_s, words, of_silence=False)
            core.desk.announce("suspect", f"{holder.worker_id}: {words}")

    def patience_s(self, holder: Member, pass_s: float) -> float:
        """No piece of work takes longer: not a pass, and not a copy of the worker's whole memory."""
        planned = self._core.state.planned.get(holder.worker_id)
        copying_s = planned.memory_bytes / SLOWEST_BYTES_PER_S if planned is not None else 0.0
        return self._core.config.timings.hung_least_s + copying_s + PASSES * pass_s

    # ------------------------------------------------------------------ pace

    def slowdown(self, worker_id: WorkerId) -> float:
        """Of a straggler, by how much; 1 for all others, so that figures that wander move nothing."""
        verdict = self.paces.verdict(worker_id)
        return max(1.0, verdict.slowdown) if verdict.colour is not Colour.GREEN else 1.0

    def capacity_tokens_per_s(self, holder: Member) -> float:
        """What the plan counts on at most: a microbatch through the whole span, one after the other, as it was
        measured. 0 for who holds nothing.
        """
        core, span = self._core, self._core.state.spans.get(holder.worker_id)
        if span is None or not core.plan_is_live:
            return 0.0
        seconds = sum(self._planned_seconds(holder, span))
        job = core.config.job
        return job.train.microbatch * job.tokens_per_sample / seconds if seconds > 0 else 0.0

    def _planned_seconds(self, holder: Member, span: Span) -> tuple[float, ...]:
        core = self._core
        if holder.probe is None:
            return ()
        peer = holder.peer(span, core.state.stages, core.config.profile, 1)
        planned = core.state.planned.get(holder.worker_id)
        again = core.config.job.train.streams or (planned is not None and planned.recompute)
        last = len(core.state.stages) - 1
        return tuple(
            forward * (2 if again and span.last_stage != last else 1) + backward
            for forward, backward in zip(peer.forward_seconds, peer.backward_seconds, strict=True)
        )

    def _observe(self, holder: Member, seen: _Seen, now_s: float) -> None:
        core, sign, probe = self._core, holder.heartbeat, holder.probe
        known = [
            (measured, planned)
            for measured, planned in zip(sign.stage_seconds, seen.planned_seconds, strict=True)
            if measured > 0 and planned > 0
        ]
        uplink = probe.uplink_bytes_per_s if probe is not None else 0.0
        # There and back.
        bytes_out = largest_boundary_bytes(core.config.job, core.config.profile, core.state.stages) / 2
        figures = Figures(
            sum(measured for measured, _ in known),
            sum(planned for _, planned in known),
            max(0.0, sign.push_s),
            bytes_out / uplink if uplink > 0 else 0.0,
            max(0.0, sign.room_s),
            sign.slowed_by,
        )
        self.paces.observe(holder.worker_id, figures, now_s)

    def _announce(self, worker_id: WorkerId, verdict: Verdict) -> None:
        colour = verdict.colour.name.lower()
        words = verdict.words() or "as fast as planned"
        if verdict.colour is not Colour.GREEN and is_single(self._core, worker_id):
            words += "; it is the only holder of a stage"
        self._core.desk.announce("pace", f"{worker_id} is {colour}: {words}")


def is_single(core: Core, worker_id: WorkerId) -> bool:
    """Whether a stage would have no holder without the worker."""
    span = core.state.spans.get(worker_id)
    return span is not None and any(core.holders_of(stage) == (worker_id,) for stage in span.stages)
