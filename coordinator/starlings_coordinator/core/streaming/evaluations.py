"""The held-out text on the way, while training goes on: how good one live replica is, and how good an average is.

A worker with the first stage gets leases for a part of the held-out samples, a few at a time, and they travel through
the stages beside its training: first with the weights that everybody trains, then with those that each stage on the way
has at its last average (phi of its outer rule), which costs no transfer and is what the average at the end will be
like. A worker that holds everything is one replica; else each microbatch goes through one replica of each stage.

| trouble | what follows |
| --- | --- |
| the worker leaves, is lost, or begins another life | the evaluation begins again with another one |
| a lease is not answered, or fails | again, under another attempt; after three tries there is no figure for this step |
| training ends, or the coordinator is started again | what was under way is forgotten; late answers are dropped |
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member
from starlings_coordinator.core.records import LiveEvaluated
from starlings_coordinator.core.streaming.exchanges import Exchanges
from starlings_coordinator.core.streaming.progress import way_flaw
from starlings_protos.messages import (
    Lease,
    LeaseGrant,
    LeaseKind,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    WorkerId,
)

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Held-out samples of one evaluation, spread over all of them: some 2 % of a batch of 32 in a thousand.
SAMPLES_MOST = 64
# Leases that are out at a time: training goes on between them.
OUT_MOST = 2
TRIES = 3
# Passes of the job's end have small numbers; these are steps beyond that, so that no late answer is mistaken.
KEYS_FROM = 1 << 40


@dataclass(slots=True)
class _Evaluation:
    """Under way. `losses`: of the parts that are done."""

    step: int
    worker_id: WorkerId
    incarnation: int
    parts: deque[LeaseKind]
    losses: dict[LeaseKind, float] = field(default_factory=dict)
    # Of the present part: what is to be leased, and when what is out was.
    pool: deque[int] = field(default_factory=deque)
    out: dict[int, float] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    loss_sum: float = 0.0
    target_count: int = 0


class Evaluations:
    def __init__(self, core: Core, exchanges: Exchanges) -> None:
        self._core = core
        self._exchanges = exchanges
        self._now: _Evaluation | None = None
        # The step of the last one, or of one that was given up.
        self._looked_at = 0
        self._count = 0

    def begin(self) -> None:
        self._now = None
        state = self._core.state
        self._looked_at = max((e.step for e in state.live_evaluations if e.step <= state.step), default=0)
        self._count = len(state.live_evaluations)

    def close(self) -> None:
        """Training is over: what counts is evaluated from here on."""
        self._now = None

    # ------------------------------------------------------------------ out

    def go_on(self) -> None:
        if self._now is None and self._is_due():
            self._start()
        now = self._now
        if now is None:
            return
        member = self._core.members.get(now.worker_id)
        if member is None or member.incarnation != now.incarnation or not self._may_lead(member):
            self._start()
            return
        now_s, timings = self._core.now.monotonic_s, self._core.config.timings
        for index, since_s in list(now.out.items()):
            if now_s - since_s > timings.forward_lease_s:
                self._again(now, index, f"{now.worker_id} did not answer in time")
                if self._now is not now:
                    return
        while now.pool and len(now.out) < OUT_MOST and member.here:
            index = now.pool.popleft()
            now.out[index] = now_s
            self._core.desk.send(member, LeaseGrant((self._lease(now, index),)))

    def _is_due(self) -> bool:
        """Evenly over the job, and not at its end."""
        job, step = self._core.config.job, self._core.state.step
        wanted, total = job.train.evaluations, job.steps_total
        if not wanted or not self._core.config.held_out_count or step >= total:
            return False
        return step * (wanted + 1) // total > self._looked_at * (wanted + 1) // total

    def _may_lead(self, member: Member) -> bool:
        span = self._core.state.spans.get(member.worker_id)
        return span is not None and span.first_stage == 0 and member.leaving is None

    def _start(self) -> None:
        """With those that hold everything in turns, or where there is none with those that hold the first stage."""
        core, last = self._core, len(self._core.state.stages) - 1
        leaders = [h for h in core.holders if self._may_lead(h) and h.here]
        whole = [h for h in leaders if core.state.spans[h.worker_id].last_stage == last]
        able = sorted(whole or leaders, key=lambda h: h.worker_id)
        if not able:
            self._now = None
            return
        member = able[self._count % len(able)]
        parts = deque([LeaseKind.EVALUATE])
        if self._have_averaged():
            parts.append(LeaseKind.EVALUATE_AVERAGE)
        self._now = _Evaluation(core.state.step, member.worker_id, member.incarnation, parts)
        self._fill(self._now)

    def _have_averaged(self) -> bool:
        """Whether replicas of each stage have met; of a stage with a single one there is nothing to average."""
        core, stages = self._core, self._exchanges.stages
        several = [rounds for rounds in stages if len(core.holders_of(rounds.stage)) > 1]
        return bool(several) and all(rounds.book.rounds_averaged > 0 for rounds in several)

    def _fill(self, now: _Evaluation) -> None:
        microbatch = self._core.config.job.train.microbatch
        now.pool = deque(range(math.ceil(len(self._samples) / microbatch)))
        now.out, now.tries = {}, {}
        now.loss_sum, now.target_count = 0.0, 0

    @property
    def _samples(self) -> tuple[int, ...]:
        """The same ones each time, so that figures can be compared."""
        held_out = self._core.config.held_out_count
        count = min(SAMPLES_MOST, held_out)
        return tuple(place * held_out // count for place in range(count))

    def _lease(self, now: _Evaluation, index: int) -> Lease:
        microbatch = self._core.config.job.train.microbatch
        samples = self._samples[index * microbatch : (index + 1) * microbatch]
        key = MicrobatchKey(now.parts[0], KEYS_FROM + now.step, now.tries.get(index, 0), index)
        return Lease(key, samples, 1.0, self._core.config.timings.forward_lease_s)

    # ------------------------------------------------------------------ back

    def _find(self, key: MicrobatchKey) -> _Evaluation | None:
        now = self._now
        if (
            now is None
            or (key.kind, key.step) != (now.parts[0], KEYS_FROM + now.step)
            or key.index not in now.out
            or key.attempt != now.tries.get(key.index, 0)
        ):
            self._core.dropped_messages += 1
            return None
        return now

    def microbatch_done(self, member: Member, message: MicrobatchDone) -> None:
        """From the holder of the last stage."""
        core, now = self._core, self._find(message.key)
        if now is None:
            return
        ends_here = bool(message.route) and message.route[-1].worker_id == member.worker_id
        if not ends_here or way_flaw(message.route, now.worker_id, len(core.state.stages)):
            core.refused_reports += 1
            return
        del now.out[message.key.index]
        now.loss_sum += message.loss_sum
        now.target_count += message.target_count
        if now.pool or now.out:
            return
        now.losses[now.parts.popleft()] = now.loss_sum / max(1, now.target_count)
        if now.parts:
            self._fill(now)
        else:
            self._record(now)

    def _record(self, now: _Evaluation) -> None:
        self._close(now)
        core, loss = self._core, now.losses[LeaseKind.EVALUATE]
        average = now.losses.get(LeaseKind.EVALUATE_AVERAGE)
        if not all(map(math.isfinite, now.losses.values())):
            core.desk.announce("evaluation", f"step {now.step}: the validation loss is not finite")
            return
        at_s = core.now.monotonic_s - core.started_at_s
        core.desk.record(LiveEvaluated(now.step, loss, average, now.worker_id, at_s))
        words = f", {average:.4f} with those that were averaged last" if average is not None else ""
        core.desk.announce(
            "evaluation",
            f"step {now.step}: validation loss {loss:.4f} with weights of {now.worker_id}{words}",
        )

    def _close(self, now: _Evaluation) -> None:
        self._now, self._looked_at = None, max(self._looked_at, now.step)
        self._count += 1

    def microbatch_failed(self, message: MicrobatchFailed) -> None:
        now = self._find(message.key)
        if now is not None:
            self._again(now, message.key.index, message.reason)

    def _again(self, now: _Evaluation, index: int, reason: str) -> None:
        del now.out[index]
        now.tries[index] = now.tries.get(index, 0) + 1
        if now.tries[index] < TRIES:
            now.pool.appendleft(index)
            return
        self._close(now)
        words = f"step {now.step} is not evaluated, {TRIES} tries failed: {reason}"
        self._core.desk.announce("evaluation", words)
