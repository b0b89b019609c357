"""The step transaction of one worker: (step, attempt), the round of exchange, commit and apply, and the job's
last exchange.

Attempts of a step begin at 0. The coordinator's word about a higher attempt of this step, in whatever message
it comes first, voids the lower one: accumulators are cleared before anything of the new attempt is computed.
StepCommitted(s) ends step s here; what came early for step s + 1 waits until the optimizer has run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from starlings_protos.messages import (
    ExchangeFailed,
    ExchangeHeader,
    ExchangeOpened,
    ExchangePurpose,
    PeerUnreachable,
    Prepared,
    Ready,
    Receipt,
    Refusal,
    StateReport,
    StateWanted,
    StepCommitted,
    StepRestarted,
    WorkerId,
)
from starlings_worker.core.admission import Admission, Rejection
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    DeviceEffect,
    DigestState,
    Effect,
    OpenExchange,
    ReducePart,
)
from starlings_worker.core.events import (
    AggregateAssembled,
    ExchangePrepared,
    ExchangeRefused,
    Leg,
    PartNotSent,
    PartReduced,
    PartSent,
    StateDigested,
    StepApplied,
)
from starlings_worker.core.exchange import PASSES_MOST, Round
from starlings_worker.core.outbox import Outbox
from starlings_worker.core.parts import PartStore, group_is_held
from starlings_worker.core.table import Epoch, MicrobatchTable
from starlings_worker.core.timings import WorkerTimings


class Training:
    """`version` is that of the weights on the device; the epoch (step, attempt) lives in the table."""

    def __init__(
        self,
        worker_id: WorkerId,
        timings: WorkerTimings,
        table: MicrobatchTable,
        parts: PartStore,
        device: DeviceQueue,
        outbox: Outbox,
        counters: Counter[str],
        emit: Callable[[Effect], None],
    ) -> None:
        self._worker_id = worker_id
        self._timings = timings
        self._table = table
        self._parts = parts
        self._device = device
        self._outbox = outbox
        self._counters = counters
        self._emit = emit
        self.version = 0
        self.round: Round | None = None
        self.commit: StepCommitted | None = None
        self.applying = False
        # What came for the next step before this one was applied here.
        self.next_opened: ExchangeOpened | None = None
        self.next_attempt = 0
        self.wanted: StateWanted | None = None
        # The attempts in which digests and averages were ordered of the device, oldest first.
        self._digest_attempts: deque[int] = deque()

    @property
    def epoch(self) -> Epoch:
        return self._table.epoch

    def begin(self, epoch: Epoch, version: int) -> None:
        """The span was loaded afresh at `version`; `epoch` comes next."""
        self.version = version
        self.round = None
        self.commit = None
        self.applying = False
        self.next_opened = None
        self.next_attempt = 0
        self.wanted = None
        self._digest_attempts.clear()
        self._parts.clear()
        self._table.begin_epoch(epoch)

    def begin_behind(self, commit: StepCommitted, attempt: int) -> None:
        """A holder from the step after `commit` on, whose device is still on its way there: `applied` ends that."""
        self.begin((commit.step, commit.attempt), commit.step)
        self.commit = commit
        self.applying = True
        self.next_attempt = attempt

    # ------------------------------------------------------------------ what the coordinator says

    def restarted(self, message: StepRestarted) -> None:
        self.raise_attempt(message.step, message.attempt)

    def raise_attempt(self, step: int, attempt: int) -> None:
        """A higher attempt of this step clears everything; of the next step it is remembered; else it is old
        news.
        """
        present_step, present_attempt = self.epoch
        if step == present_step + 1:
            self.next_attempt = max(self.next_attempt, attempt)
            return
        if step != present_step or attempt <= present_attempt:
            return
        if self.commit is not None:
            self._counters["restarts_after_commit"] += 1
            return
        self._counters["restarts"] += 1
        self.round = None
        self._outbox.forget_step()
        self._table.begin_epoch((step, attempt))
        self._parts.begin_epoch((step, attempt))
        self._device.purge(lambda effect: self._is_of_step(effect, step))
        self._device.push(ClearGradients(step, attempt))

    @staticmethod
    def _is_of_step(effect: DeviceEffect, step: int) -> bool:
        return (
            isinstance(effect, OpenExchange | ReducePart | Assemble | ClearGradients) and effect.step == step
        )

    def opened(self, message: ExchangeOpened, plan_version: int, now_s: float) -> None:
        epoch = (message.step, message.attempt)
        if message.step == self.epoch[0] + 1:
            if self.next_opened is None or self.next_opened.attempt < message.attempt:
                self.next_opened = message
            return
        if epoch > self.epoch and message.step == self.epoch[0]:
            self.raise_attempt(*epoch)
        if epoch != self.epoch or self.applying or (self.round is not None and self.round.epoch == epoch):
            self._counters["stale_messages"] += 1
            return
        self.round = Round(
            self._worker_id,
            self._timings,
            message,
            plan_version,
            self._parts,
            self._device.push,
            self._emit,
            now_s,
        )
        expects = self.round.expects
        self._parts.drop(
            lambda leg, header, sender: (
                (header.step, header.attempt) == epoch and not expects(leg, header, sender)
            )
        )
        self.round.open()

    def committed(self, message: StepCommitted) -> None:
        if (message.step, message.attempt) != self.epoch or self.commit is not None:
            self._counters["stale_messages"] += 1
            return
        self.commit = message
        self._apply_if_possible()

    def state_wanted(self, message: StateWanted) -> None:
        if message.version < self.version:
            self._counters["stale_messages"] += 1
            return
        self.wanted = message
        self._digest_if_possible()

    def _digest_if_possible(self) -> None:
        wanted = self.wanted
        if wanted is None or wanted.version != self.version or self.commit is not None:
            return
        effect = DigestState(wanted.version, wanted.snapshot, wanted.hand_over)
        if effect in self._device.waiting and self._digest_attempts[-1] == self.epoch[1]:
            return  # Asked for again before the device came to it.
        self._digest_attempts.append(self.epoch[1])
        self._device.push(effect)

    # ------------------------------------------------------------------ parts coming in

    def admit_part(
        self, leg: Leg, header: ExchangeHeader, sender: WorkerId, receipt: Receipt, peer_count: int
    ) -> Admission:
        place = self._table.place
        if place is None:
            return Rejection(Refusal.NOT_HELD, "this worker holds no stage")
        epoch = (header.step, header.attempt)
        if header.plan_version < place.base_plan_version or epoch < self.epoch:
            return Rejection(Refusal.STALE, f"step {header.step} attempt {header.attempt} is over")
        if header.step > self.epoch[0] + 1:
            return Rejection(Refusal.BUSY, f"step {header.step} is further than the next one")
        if not group_is_held(header.group, place.span, place.stage_count):
            return Rejection(Refusal.NOT_HELD, f"this worker is not in group {header.group!r:.40}")
        is_open = self.round is not None and self.round.epoch == epoch
        if is_open and self.round is not None and not self.round.expects(leg, header, sender):
            return Rejection(Refusal.MALFORMED, "this part has no place in the round")
        if not 0 <= header.part <= peer_count:
            return Rejection(Refusal.MALFORMED, f"part {header.part} of a group that is smaller")
        if not 0 <= header.pass_number < PASSES_MOST:
            return Rejection(Refusal.MALFORMED, f"there is no pass {header.pass_number}")
        # Per group and peer one contribution and one aggregate can come early, for this step or the next. Of a second
        # pass only where nobody had to wait for this worker; what is too much then is asked again.
        limit = 4 * (len(place.span.stages) + 1) * (peer_count + 1)
        open_epoch = self.round.epoch if self.round is not None else None
        return self._parts.admit(leg, header, sender, receipt, open_epoch=open_epoch, limit=limit)

    def part_arrived(self, leg: Leg, header: ExchangeHeader, sender: WorkerId, now_s: float) -> None:
        if not self._parts.arrived(leg, header, sender):
            return
        if self.round is None or self.round.epoch != (header.step, header.attempt):
            self._counters["early_parts"] += 1
            return
        if not self.round.expects(leg, header, sender):
            self._parts.drop(lambda *part: part == (leg, header, sender))
            return
        self.round.advance(now_s)

    # ------------------------------------------------------------------ what the device did

    def exchange_prepared(self, event: ExchangePrepared, now_s: float) -> None:
        if (matching := self._round_of(event)) is not None:
            matching.prepared(event.group, event.pass_number, now_s)

    def part_reduced(self, event: PartReduced, now_s: float) -> None:
        if (matching := self._round_of(event)) is not None:
            matching.reduced(event.group, now_s)

    def aggregate_assembled(self, event: AggregateAssembled) -> None:
        matching = self._round_of(event)
        if matching is None:
            return
        matching.assembled_group(event)
        if not matching.assembled:
            return
        if matching.purpose is ExchangePurpose.STATE:
            self._adopt_if_possible()
            return
        step, attempt = matching.epoch
        self._outbox.say(Prepared(step, attempt, matching.results(self._table.accumulated)))
        self._apply_if_possible()

    def exchange_refused(self, event: ExchangeRefused) -> None:
        matching = self._round_of(event)
        if matching is not None:
            self._fail(matching, event.group, f"{event.culprit}: {event.reason}")

    def applied(self, event: StepApplied, plan_version: int, now_s: float) -> None:
        self.version = event.step + 1
        self.round = None
        self.commit = None
        self.applying = False
        epoch = (event.step + 1, self.next_attempt)
        self.next_attempt = 0
        self._outbox.forget_step()
        self._outbox.forget(Ready)
        self._table.begin_epoch(epoch)
        # The shell drops the applied step's parts by itself, but not those of a void attempt of the next one.
        self._parts.drop(lambda _, header, __: epoch > (header.step, header.attempt) >= (epoch[0], 0))
        self._parts.begin_epoch(epoch)
        if self.next_opened is not None:
            message, self.next_opened = self.next_opened, None
            self.opened(message, plan_version, now_s)
        self._digest_if_possible()

    def state_digested(self, event: StateDigested) -> StateReport | None:
        """What to report, if it is still wanted."""
        attempt = self._digest_attempts.popleft()
        if self.wanted is not None and self.wanted.version == event.version == self.version:
            return StateReport(event.version, event.block_digests, attempt)
        return None

    def _apply_if_possible(self) -> None:
        matching = self.round
        if self.commit is None or self.applying or matching is None or not matching.assembled:
            return
        if matching.purpose is ExchangePurpose.GRADIENT:
            self.applying = True
            # Committed means that every member has every aggregate.
            matching.closed = True
            commit = self.commit
            self._device.push(
                ApplyStep(commit.step, commit.learning_rate, commit.clip_factor, commit.snapshot)
            )

    def _adopt_if_possible(self) -> None:
        """No commit ends a STATE exchange, so the parts are kept until all the others have them."""
        matching = self.round
        if matching is None or matching.purpose is not ExchangePurpose.STATE or matching.closed:
            return
        if matching.assembled and matching.delivered:
            matching.closed = True
            snapshot = self.wanted is not None and self.wanted.snapshot
            self._digest_attempts.append(self.epoch[1])
            self._device.push(AdoptState(self.version, snapshot))

    def _round_of(
        self, event: ExchangePrepared | PartReduced | AggregateAssembled | ExchangeRefused
    ) -> Round | None:
        if self.round is not None and self.round.epoch == (event.step, event.attempt):
            return self.round
        return None

    # ------------------------------------------------------------------ transfers and time

    def part_sent(self, event: PartSent) -> None:
        if self.round is not None:
            self.round.sent(event.leg, event.header, event.to)
            self._adopt_if_possible()

    def part_not_sent(self, event: PartNotSent, now_s: float) -> None:
        if self.round is None:
            return
        tries = self.round.not_sent(event.leg, event.header, event.to, now_s)
        if not tries:
            return
        self._counters["resends"] += 1
        if event.refusal is Refusal.MALFORMED:
            self._fail(self.round, event.header.group, f"{event.to} finds the part malformed: {event.reason}")
        elif event.refusal is Refusal.UNSPECIFIED and tries == self._timings.unreachable_after:
            self._outbox.say(PeerUnreachable(event.to, event.reason))

    def look_at_time(self, now_s: float) -> None:
        if self.round is None:
            return
        self.round.advance(now_s)
        if now_s >= self.round.deadline_at_s and not (self.round.assembled and self.round.delivered):
            name, missing = self.round.waits_for()
            self._fail(self.round, name, f"not complete by the deadline; missing: {missing}")

    def _fail(self, failing: Round, group: str, reason: str) -> None:
        """Once per round: the attempt is void, and the coordinator raises it."""
        if not failing.failed:
            failing.failed = True
            self._counters["failed_rounds"] += 1
            self._outbox.say(ExchangeFailed(failing.step, failing.attempt, group, reason))
