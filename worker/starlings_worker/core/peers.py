"""What is known of the other holders:

priors from the plan, telemetry from their receipts, and who is not answering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlings_protos.messages import Assignment, Receipt, Refusal, Span, WorkerId
from starlings_worker.core.router import PeerView
from starlings_worker.core.timings import WorkerTimings

# Of the least time that sending has taken, per transfer: a link that has got slower is known after a few hundred.
LEAST_FORGOTTEN = 0.002


@dataclass(slots=True)
class PeerState:
    span: Span
    stage_seconds: tuple[float, ...]
    backlog_s: float = 0.0
    heard_at_s: float = 0.0
    # Sent there since its last receipt.
    sent_since: int = 0
    free_slots: int | None = None
    link_s: float = 0.0
    # The least of late: what sending there takes when nothing else is sent.
    link_least_s: float = 0.0
    # In a row: unanswered or refused otherwise, and refused for lack of room.
    failures: int = 0
    busy: int = 0
    retry_at_s: float = 0.0
    told_unreachable: bool = False

    @property
    def free_slots_left(self) -> int | None:
        return None if self.free_slots is None else max(0, self.free_slots - self.sent_since)


def own_span_prior(assignment: Assignment) -> dict[int, float]:
    """A first guess at this worker's own seconds per stage:

    the mean of the others' (the plan lists only peers).
    """
    prior: dict[int, float] = {}
    rates = [
        forward + backward
        for peer in assignment.peers
        for forward, backward in zip(peer.forward_seconds, peer.backward_seconds, strict=False)
    ]
    mean_s = sum(rates) / len(rates) if rates else 0.0
    for stage in assignment.span.stages:
        prior[stage] = mean_s
    return prior


class PeerTable:
    """Keeps one `PeerState` per other holder of the plan; survives a new plan for those that stay."""

    def __init__(self, timings: WorkerTimings) -> None:
        self._timings = timings
        self.states: dict[WorkerId, PeerState] = {}

    def update(self, assignment: Assignment) -> None:
        fresh: dict[WorkerId, PeerState] = {}
        for peer in sorted(assignment.peers, key=lambda peer: peer.worker_id):
            if peer.span is None:
                continue
            count = len(peer.span.stages)
            forward = (*peer.forward_seconds, *[0.0] * count)[:count]
            backward = (*peer.backward_seconds, *[0.0] * count)[:count]
            seconds = tuple(max(0.0, one + two) for one, two in zip(forward, backward, strict=True))
            known = self.states.get(peer.worker_id)
            if known is not None and known.span == peer.span:
                known.stage_seconds = seconds
                fresh[peer.worker_id] = known
            else:
                fresh[peer.worker_id] = PeerState(peer.span, seconds)
        self.states = fresh

    def views(self, now_s: float) -> list[PeerView]:
        """The router's input, sorted by worker id."""
        views = []
        for worker_id, state in self.states.items():
            aged_s = max(0.0, state.backlog_s - (now_s - state.heard_at_s))
            views.append(
                PeerView(
                    worker_id,
                    state.span,
                    state.stage_seconds,
                    backlog_s=aged_s + state.sent_since * sum(state.stage_seconds),
                    free_slots=state.free_slots_left,
                    usable=now_s >= state.retry_at_s,
                    link_s=state.link_s,
                )
            )
        return views

    def sending(self, worker_id: WorkerId) -> None:
        if worker_id in self.states:
            self.states[worker_id].sent_since += 1

    def succeeded(self, worker_id: WorkerId, receipt: Receipt, took_s: float, now_s: float) -> None:
        state = self.states.get(worker_id)
        if state is None:
            return
        weight = self._timings.measurement_weight
        state.link_s = took_s if state.link_s == 0.0 else state.link_s + weight * (took_s - state.link_s)
        least_s = state.link_least_s or took_s
        state.link_least_s = min(took_s, least_s + LEAST_FORGOTTEN * (took_s - least_s))
        state.backlog_s = receipt.backlog_seconds
        state.free_slots = receipt.free_slots
        state.heard_at_s = now_s
        state.sent_since = 0
        self.answered(worker_id)

    def link_least_s(self, worker_id: WorkerId) -> float:
        state = self.states.get(worker_id)
        return state.link_least_s if state is not None else 0.0

    def link_wait_s(self, worker_id: WorkerId) -> float:
        """What sending there takes longer of late than it would alone."""
        state = self.states.get(worker_id)
        return max(0.0, state.link_s - state.link_least_s) if state is not None else 0.0

    def answered(self, worker_id: WorkerId) -> None:
        """The peer is there: its outage, if any, is over."""
        state = self.states.get(worker_id)
        if state is not None:
            state.failures = state.busy = 0
            state.retry_at_s = 0.0
            state.told_unreachable = False

    def room_again(self, worker_id: WorkerId) -> None:
        """The peer finished something of ours, so it will have a free slot: worth asking again now."""
        state = self.states.get(worker_id)
        if state is not None and state.free_slots == 0:
            state.free_slots = 1
        self.answered(worker_id)

    def failed(self, worker_id: WorkerId, refusal: Refusal, now_s: float) -> bool:
        """Puts off the next try.

        Returns True when the coordinator should now be told that the peer is unreachable.
        """
        state = self.states.get(worker_id)
        if state is None:
            return False
        timings = self._timings
        if refusal is Refusal.BUSY:
            state.busy += 1
            state.failures = 0
            state.free_slots = 0
            state.sent_since = 0
            delay_s = timings.growing(timings.busy_first_s, timings.busy_most_s, state.busy)
        else:
            state.failures += 1
            delay_s = timings.growing(timings.retry_first_s, timings.retry_most_s, state.failures)
        state.retry_at_s = now_s + delay_s
        silent = refusal is Refusal.UNSPECIFIED and state.failures >= timings.unreachable_after
        if silent and not state.told_unreachable:
            state.told_unreachable = True
            return True
        return False

    def silent_holders(self, stage: int) -> list[WorkerId]:
        """Holders of `stage` that did not answer the last time."""
        return [who for who, state in self.states.items() if stage in state.span and state.failures > 0]

    def next_retry_s(self, stage: int, now_s: float) -> float | None:
        """When the first holder of `stage` that is being left alone may be asked again."""
        times = [state.retry_at_s for state in self.states.values() if stage in state.span]
        later = [time_s for time_s in times if time_s > now_s]
        return min(later, default=None)


def queue_seconds(stages: Mapping[int, float], runs: list[tuple[int, int]]) -> float:
    """Seconds of work in `runs` of (first, last) stage, by seconds per stage."""
    return sum(stages.get(stage, 0.0) for first, last in runs for stage in range(first, last + 1))
