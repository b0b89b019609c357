"""How far an `async` job has come: losses and credits for people, rate and gradient norm for the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member
from starlings_coordinator.core.records import StreamAdvanced
from starlings_protos.messages import Hop, MicrobatchDone, WorkerId
from starlings_protos.stream_messages import StageReport, SwarmProgress

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# The least time between two points of the loss curve.
RECORD_EVERY_S = 0.25
# Seconds between two SwarmProgress to a holder, at least, and holders for each second of it.
TELL_EVERY_S = 1.0
HOLDERS_PER_SECOND = 100.0


class Progress:
    def __init__(self, core: Core) -> None:
        self._core = core
        # Since the last record.
        self._loss_sum = 0.0
        self._target_count = 0
        self._credits: dict[WorkerId, int] = {}
        self._recorded = (0, 0, float("-inf"))
        self._told_at_s = float("-inf")
        # Squared norms by stage and worker.
        self._norms: dict[int, dict[WorkerId, float]] = {}

    def begin(self) -> None:
        core = self._core
        self._loss_sum, self._target_count, self._credits = 0.0, 0, {}
        self._recorded = (core.state.step, core.state.tokens, core.now.monotonic_s)
        self._told_at_s = float("-inf")
        self._norms.clear()

    # ------------------------------------------------------------------ records

    def done(self, message: MicrobatchDone, samples: int) -> None:
        """A microbatch was reported for the first time."""
        self._loss_sum += message.loss_sum
        self._target_count += message.target_count
        tokens = samples * self._core.config.job.tokens_per_sample
        for hop in message.route:
            self._credits[hop.worker_id] = self._credits.get(hop.worker_id, 0) + tokens

    def record(self, *, at_once: bool = False) -> bool:
        """Write a point of the loss curve if a step is complete. Returns whether."""
        core, state, now_s = self._core, self._core.state, self._core.now.monotonic_s
        step, tokens, at_s = self._recorded
        early = now_s - at_s < RECORD_EVERY_S and not at_once
        if state.step <= step or not self._target_count or early:
            return False
        credits = tuple(sorted(self._credits.items()))
        loss = self._loss_sum / self._target_count
        core.desk.record(StreamAdvanced(state.step, loss, credits, now_s - core.started_at_s))
        core.rates.step(now_s, state.tokens - tokens, credits)
        self._recorded = (state.step, state.tokens, now_s)
        self._loss_sum, self._target_count, self._credits = 0.0, 0, {}
        return True

    # ------------------------------------------------------------------ what workers are told

    def stages_reported(self, member: Member, message: StageReport) -> None:
        span = self._core.state.spans.get(member.worker_id)
        for report in message.stages:
            if span is not None and report.stage in span and 0 < report.squared_norm < math.inf:
                self._norms.setdefault(report.stage, {})[member.worker_id] = report.squared_norm

    def gradient_norm(self) -> float:
        """Of the whole model: what the replicas of each stage say in the mean; 0 while a stage has said nothing."""
        core, squares = self._core, []
        for stage in range(len(core.state.stages)):
            said = self._norms.get(stage, {})
            present = [said[w] for w in core.holders_of(stage) if w in said]
            if not present:
                return 0.0
            squares.append(math.fsum(present) / len(present))
        return math.sqrt(math.fsum(squares))

    def tell(self) -> None:
        """All holders, now and then."""
        core, now_s = self._core, self._core.now.monotonic_s
        holders = core.holders
        if now_s - self._told_at_s < max(TELL_EVERY_S, len(holders) / HOLDERS_PER_SECOND):
            return
        self._told_at_s = now_s
        self.tell_each(holders)

    def tell_each(self, members: Iterable[Member]) -> None:
        core = self._core
        message = SwarmProgress(core.state.tokens, core.rates.tokens_per_s(), self.gradient_norm())
        for member in members:
            core.desk.send(member, message)


def way_flaw(route: Iterable[Hop], sender: WorkerId, stages: int) -> str:
    """Why `route` is no way through all stages that begins with `sender`; "" when it is. Who was lost since has still
    done its part.
    """
    expected = 0
    seen: set[WorkerId] = set()
    for hop in route:
        if hop.first_stage != expected or hop.last_stage < hop.first_stage or hop.worker_id in seen:
            return "its route is not a way through the stages"
        if not seen and hop.worker_id != sender:
            return "its route does not begin with the lease's holder"
        seen.add(hop.worker_id)
        expected = hop.last_stage + 1
    return "" if expected == stages else f"its route ends before stage {expected}"
