"""Training without a barrier, one worker's part.

Each held stage counts its own steps. A microbatch notes them at its forward pass; what has come to it by its backward
pass is its *staleness* there. A gradient that is older than the job allows is passed upstream and not added. When
`inner_batch` gradients are added, the stage steps, before the device does anything else. So that an outage of the
coordinator costs nothing, a worker that leads microbatches keeps leases in store for as long as a lease lasts, and the
learning rate follows what the swarm has trained, extrapolated. Replicas meet in pairs on the side (`pairs`), where the
job says so, for as long as training runs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from starlings_protos.messages import Assignment, MicrobatchKey, StateReport, StateWanted
from starlings_protos.stream_messages import (
    LeasesReturned,
    StageReport,
    StageSteps,
    SwarmProgress,
    TrainingPaused,
)
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import Effect, Settle, StageStep, StepStages, TakeCopy
from starlings_worker.core.events import StagesStepped, StateDigested
from starlings_worker.core.groups.group_rounds import GroupRounds
from starlings_worker.core.groups.work import GroupWork
from starlings_worker.core.microbatches import Held
from starlings_worker.core.outbox import Outbox
from starlings_worker.core.pairing.pair_rounds import PairRounds
from starlings_worker.core.pairing.work import CommitPair, EncodePair, JudgePair, TakeOuterStep
from starlings_worker.core.streaming.clock import SwarmClock
from starlings_worker.core.streaming.rules import StreamRules
from starlings_worker.core.streaming.table import StreamTable
from starlings_worker.core.training import Training

# Weight of the newest norm in running means.
NORM_WEIGHT = 0.1
# Reports of microbatches are kept this long, to be repeated after a reconnection; the coordinator records them within
# a second, or workers / 8 seconds.
REPORTED_S = 300.0
# Leases in store are worth this much of a lease's time.
STOCK_S = 600.0
REPORT_EVERY_S = 2.0
# The first steps of a stage are slow ones, and say nothing about those that come.
FIRST_STEPS = 3


class Stream:
    def __init__(
        self,
        rules: StreamRules,
        table: StreamTable,
        training: Training,
        device: DeviceQueue,
        outbox: Outbox,
        counters: Counter[str],
        emit: Callable[[Effect], None],
        dice: Callable[[], float],
    ) -> None:
        """`dice`: uniform in [0, 1)."""
        self._rules = rules
        self._dice = dice
        self._table = table
        self._training = training
        self._device = device
        self._outbox = outbox
        self._counters = counters
        self.clock = SwarmClock()
        self.pairs: PairRounds | GroupRounds | None = None
        if rules.pairs is not None and rules.pairs.topology == "all":
            overlapped = rules.pairs.merge_alpha > 0
            self.pairs = GroupRounds(table.worker_id, overlapped, device.push, emit, outbox.say, counters)
        elif rules.pairs is not None:
            self.pairs = PairRounds(device.push, emit, outbox.say, counters)
        self._stage_count = 0
        self.steps: dict[int, int] = {}
        # Gradients added since the last step.
        self.added: dict[int, int] = {}
        # Target tokens of those; steps since training began here, and when the last one was.
        self._tokens: Counter[int] = Counter()
        self._steps_here: Counter[int] = Counter()
        self._stepped_at_s: dict[int, float] = {}
        # Running means of the norms of stages.
        self.norms: dict[int, float] = {}
        self.staleness: deque[int] = deque(maxlen=64)
        # By stage, running means of the same.
        self._delays: dict[int, float] = {}
        self.staleness_most = 0
        self.gradients_stale = 0
        self.inner_steps = 0
        self._now_s = 0.0
        self._reported: deque[tuple[float, MicrobatchKey]] = deque()
        # Seconds from one own microbatch done to the next, a running mean.
        self._done_at_s: float | None = None
        self._done_every_s = 0.0
        self._told_at_s = float("-inf")
        self._copies: deque[int] = deque()
        table.staleness_room = rules.train.max_staleness * rules.inner_batch
        table.on_forward = self._note_steps
        table.stale_stages = self._stale_stages
        table.on_added = self._added

    @property
    def running(self) -> bool:
        return self._table.running

    # ------------------------------------------------------------------ beginning and end

    def begin(
        self, assignment: Assignment, version: int, now_s: float, optimizer_steps: Mapping[int, int]
    ) -> None:
        """The span is on the device, as it was at step `version` of the job.

        Args:
            optimizer_steps: by stage, what the optimizer has made whose state came with it; without one, `version`.
        """
        self._now_s = now_s
        self._stage_count = len(assignment.stages)
        stages = assignment.span.stages
        # Those of the donor, not of the job: the bias of young moments follows from the number.
        self.steps = {stage: optimizer_steps.get(stage, version) for stage in stages}
        self.added = dict.fromkeys(stages, 0)
        self.norms = {}
        self._delays = {}
        self._tokens.clear()
        self._steps_here.clear()
        self._stepped_at_s = {}
        self._done_at_s, self._done_every_s = None, 0.0
        self._copies.clear()
        self.clock.start(float(version * self._rules.tokens_per_step), now_s)
        self._table.running = True
        if self.pairs is not None:
            self.pairs.hold(assignment.span)

    def left(self) -> None:
        """The span is another one from now on, or none."""
        if self.pairs is not None:
            self.pairs.hold(None)

    def paused(self, message: TrainingPaused) -> None:
        """From here on the steps and attempts of training.py hold."""
        if not self.running:
            if message.version == self._training.version:
                self._training.raise_attempt(message.version, message.attempt)
            return
        of_rounds = TakeOuterStep | EncodePair | JudgePair | CommitPair | GroupWork
        self._device.purge(lambda effect: isinstance(effect, StepStages | TakeCopy | of_rounds))
        if self.pairs is not None:
            self.pairs.hold(None)
        self._copies.clear()
        self._outbox.forget_step()
        self._reported.clear()
        self._training.begin((message.version, message.attempt), message.version)
        self._device.push(Settle(message.version))

    def void(self, keys: tuple[MicrobatchKey, ...]) -> None:
        self._table.void(keys)

    def part(self) -> None:
        """This worker leaves, and others can begin microbatches."""
        if self.running and not self._table.parting:
            self._table.parting = True
            keys = self._table.take_back_leases()
            if keys:
                self._outbox.say(LeasesReturned(keys))

    def pause(self, paused: bool, now_s: float) -> None:
        """By the owner: what is under way goes on, and nothing more begins here; or that ends."""
        if paused == self._table.paused:
            return
        self._table.paused = paused
        if self.pairs is not None:
            self.pairs.pause(paused, now_s)
        if not paused:
            # The pause is nobody's pace.
            self._done_at_s = None
            self._stepped_at_s.clear()
        self._give_back()

    @property
    def held(self) -> bool:
        """Paused by the owner."""
        return self._table.paused

    def _give_back(self) -> None:
        """In a pause, what is leased and not begun, also what was on its way here when it began."""
        if self._table.paused and self.running and self._outbox.up:
            keys = self._table.take_back_leases()
            if keys:
                self._outbox.say(LeasesReturned(keys))

    # ------------------------------------------------------------------ gradients and steps

    def _note_steps(self, held: Held) -> None:
        held.steps_at_forward = tuple(
            self.steps[stage] for stage in range(held.entry_stage, held.exit_stage + 1)
        )

    def _staleness(self, held: Held) -> list[tuple[int, int]]:
        stages = range(held.entry_stage, held.exit_stage + 1)
        return [
            (stage, self.steps[stage] - then)
            for stage, then in zip(stages, held.steps_at_forward, strict=True)
        ]

    def _stale_stages(self, held: Held) -> tuple[int, ...]:
        return tuple(stage for stage, age in self._staleness(held) if age > self._rules.train.max_staleness)

    def _added(self, held: Held) -> None:
        """The device has been back through it. No step was made meanwhile: they wait for the device too."""
        for stage, age in self._staleness(held):
            self.staleness.append(age)
            self.staleness_most = max(self.staleness_most, age)
            self._delays[stage] = (
                age if (old := self._delays.get(stage)) is None else old + NORM_WEIGHT * (age - old)
            )
            if age > self._rules.train.max_staleness:
                self.gradients_stale += 1
            else:
                self.added[stage] += 1
                self._tokens[stage] += held.target_count
        if not held.route:
            self.clock.trained(held.target_count)
            self._done_own(held.key)
        self._step_if_due()

    def _step_if_due(self) -> None:
        due = [stage for stage, count in sorted(self.added.items()) if count >= self._rules.inner_batch]
        if not due:
            return
        rate = self._rules.learning_rate(self.clock.tokens(self._now_s))
        clip = self._rules.train.clip
        joint = clip if len(due) == self._stage_count else 0.0
        parts = []
        for stage in due:
            self.added[stage] = 0
            self.steps[stage] += 1
            limit = 0.0 if joint else clip * self._share(stage)
            pulls, ahead = self._rules.pulls(self._dice), self._steps_ahead(stage)
            parts.append(StageStep(stage, self.steps[stage], limit, pulls, ahead))
        self._device.push(StepStages(tuple(parts), rate, joint))

    def _steps_ahead(self, stage: int) -> float:
        """What comes back later than is allowed is not added, so nothing is predicted for it."""
        if self._rules.train.correction != "predict":
            return 0.0
        return min(self._delays.get(stage, 0.0), float(self._rules.train.max_staleness))

    def _share(self, stage: int) -> float:
        """Of the norm over all stages that is this stage's: so each clips about as one optimizer of all would do."""
        own, whole = self.norms.get(stage, 0.0), self.clock.gradient_norm
        if own > 0 and whole > 0:
            return min(1.0, own / whole)
        return 1.0 / math.sqrt(self._stage_count)

    def stepped(self, event: StagesStepped, now_s: float) -> None:
        for stage, norm in zip(event.stages, event.norms, strict=True):
            self.inner_steps += 1
            self._tell_pairs(stage, now_s)
            if not math.isfinite(norm):
                self._counters["gradients_dropped"] += 1
                continue
            old = self.norms.get(stage)
            self.norms[stage] = norm if old is None else old + NORM_WEIGHT * (norm - old)

    def _tell_pairs(self, stage: int, now_s: float) -> None:
        self._steps_here[stage] += 1
        last_s, self._stepped_at_s[stage] = self._stepped_at_s.get(stage), now_s
        if self.pairs is not None and last_s is not None and self._steps_here[stage] > FIRST_STEPS:
            self.pairs.inner_stepped(stage, self._tokens.pop(stage, 0), max(1e-6, now_s - last_s), now_s)

    # ------------------------------------------------------------------ leases and reports

    def _done_own(self, key: MicrobatchKey) -> None:
        self._reported.append((self._now_s, key))
        last_s, self._done_at_s = self._done_at_s, self._now_s
        if last_s is None:
            return
        took_s = max(1e-3, self._now_s - last_s)
        old_s = self._done_every_s
        self._done_every_s = took_s if not old_s else old_s + NORM_WEIGHT * (took_s - old_s)
        self._table.stock = math.ceil(STOCK_S / self._done_every_s)

    def heard(self, message: SwarmProgress, now_s: float) -> None:
        self.clock.heard(message, now_s)

    def look_at_time(self, now_s: float) -> None:
        self._now_s = now_s
        if self.pairs is not None:
            self.pairs.look_at_time(now_s)
        if not self._outbox.up:
            return
        self._give_back()
        while self._reported and now_s - self._reported[0][0] > REPORTED_S:
            self._outbox.forget_microbatch(self._reported.popleft()[1])
        if self.running and self.norms and now_s - self._told_at_s >= REPORT_EVERY_S:
            self._told_at_s = now_s
            self._outbox.say(
                StageReport(
                    tuple(
                        StageSteps(stage, self.steps[stage], norm * norm)
                        for stage, norm in sorted(self.norms.items())
                    )
                )
            )

    def figures(self) -> dict[str, Any]:
        """For people: fields of TelemetrySample."""
        ages = self.staleness
        return {
            "inner_steps": self.inner_steps,
            "staleness": sum(ages) / len(ages) if ages else 0.0,
            "staleness_most": self.staleness_most,
            "gradients_stale": self.gradients_stale,
        }

    # ------------------------------------------------------------------ copies

    def state_wanted(self, message: StateWanted) -> None:
        if message.version not in self._copies:
            self._copies.append(message.version)
            self._device.push(TakeCopy(message.version))

    def state_digested(self, event: StateDigested) -> StateReport | None:
        if event.version not in self._copies:
            return None
        self._copies.remove(event.version)
        return StateReport(event.version, event.block_digests)
