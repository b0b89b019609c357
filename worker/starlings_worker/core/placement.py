"""This worker's place in the plan: assigned, loaded, caught up with, left. Composes the parts that hold by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from starlings_protos.messages import Assignment, Ready, StepCommitted, WorkerId
from starlings_worker.core.admission import boundaries_of
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import Effect, Load, Stop, UpdatePeers
from starlings_worker.core.events import LoadFailed, ReplayFailed, SpanLoaded, StepApplied, StepReplayed
from starlings_worker.core.flow import Flow
from starlings_worker.core.observing import Observing
from starlings_worker.core.outbox import Outbox
from starlings_worker.core.parts import PartStore
from starlings_worker.core.peers import PeerTable, own_span_prior
from starlings_worker.core.streaming.stream import Stream
from starlings_worker.core.table import MicrobatchTable, Place
from starlings_worker.core.timings import WorkerTimings
from starlings_worker.core.training import Training

# Below that of any step.
ALL_EPOCHS = (-1, -1)


class Placement:
    """`assignment` is the place; `loaded` says that this worker is a holder: everything of its span is here, perhaps
    but for a commit that is being applied.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        timings: WorkerTimings,
        device: DeviceQueue,
        peers: PeerTable,
        table: MicrobatchTable,
        parts: PartStore,
        flow: Flow,
        training: Training,
        stream: Stream | None,
        outbox: Outbox,
        counters: Counter[str],
        emit: Callable[[Effect], None],
        stop: Callable[[Stop], None],
    ) -> None:
        self._worker_id = worker_id
        self._timings = timings
        self._device = device
        self._peers = peers
        self._table = table
        self._parts = parts
        self._flow = flow
        self._training = training
        # None: steps are transactions.
        self._stream = stream
        self._outbox = outbox
        self._counters = counters
        self._emit = emit
        self._stop = stop
        self.observing = Observing(device, outbox.say)
        self.assignment: Assignment | None = None
        self.loaded = False
        # Why this worker has no place, in the coordinator's words.
        self.standby_reason = ""
        # What the last Load was for: its outcome counts only then.
        self._loading: Assignment | None = None
        self._loaded_digests: tuple[int, dict[str, str]] = (-1, {})
        # By stage: of the optimizer whose state came with the weights.
        self._loaded_steps: Mapping[int, int] = {}
        self._load_failures = 0
        self.load_again_at_s: float | None = None

    @property
    def plan_version(self) -> int:
        return self.assignment.plan_version if self.assignment is not None else 0

    @property
    def takes_part(self) -> bool:
        """Whether the plan counts on this worker, now or soon."""
        return self.assignment is not None and not self.assignment.observer

    def is_for_another(self, load: Load) -> bool:
        """Whether the place changed since `load` began."""
        return load.assignment != self._loading

    # ------------------------------------------------------------------ coming and going

    def assigned(self, new: Assignment, now_s: float) -> None:
        """A new plan:

        load the span, or only take note of other peers when weights and span stay as they are.
        """
        old = self.assignment
        if old is not None and new.plan_version < old.plan_version:
            self._counters["stale_messages"] += 1
            return
        if new.observer:
            self._observe(new)
            return
        self.observing.forget_failure()
        if not self.loaded and self.observing.same_place(new, any_version=self._stream is not None):
            self._admitted(new, now_s)
            return
        if old is not None and new.plan_version == old.plan_version and not old.observer:
            # Said again after a reconnection.
            if self.loaded:
                self._raise_attempt(new)
                self._report_ready()
            return
        self.standby_reason = ""
        epoch = (new.step, new.attempt)
        training = self._training
        committed_version = training.version + (1 if training.commit is not None else 0)
        same_place = (
            old is not None
            and self.loaded
            and (new.stages, new.span) == (old.stages, old.span)
            and (self._goes_on(new) or (new.version == committed_version and epoch >= training.epoch))
        )
        self.assignment = new
        self._peers.update(new)
        if not same_place:
            self._begin_load(new)
            return
        before = self._table.place
        assert before is not None
        place = _place(self._worker_id, new, before.base_plan_version)
        if before.workers - place.workers:
            # What is under way may still change workers where the lost one's span began or ended.
            place = replace(place, boundaries=place.boundaries | before.boundaries)
        self._table.resettle(place)
        self._table.drop_forward_only()
        self._emit(UpdatePeers(new))
        self._raise_attempt(new)
        self._flow.leave_out_absent(epoch if self._stream is None else ALL_EPOCHS)
        self._report_ready()

    def _goes_on(self, new: Assignment) -> bool:
        """Without a barrier, weights have no version that could be compared: nobody has loaded any since."""
        place = self._table.place
        return (
            self._stream is not None
            and place is not None
            and place.base_plan_version >= new.base_plan_version
        )

    def _raise_attempt(self, new: Assignment) -> None:
        """Attempts are of steps."""
        if self._stream is None or not self._stream.running:
            self._training.raise_attempt(new.step, new.attempt)

    def _observe(self, new: Assignment) -> None:
        """Catch up from `new.version`, or only take note of other donors when that is what goes on."""
        if self.observing.hopeless(new):
            self._counters["stale_messages"] += 1
            return
        self.standby_reason = ""
        goes_on = not self.loaded and self.observing.same_base(new)
        self._peers.update(new)
        if goes_on:
            self.assignment = new
            self._emit(UpdatePeers(new))
            return
        self._begin_load(new)
        self.observing.begin(new)

    def _admitted(self, new: Assignment, now_s: float) -> None:
        """This observer holds its span from step `new.step` on. Commits that are still to be replayed are to it what an
        optimizer step that has not run yet is to others: what comes early for `new.step` waits.
        """
        observing = self.observing
        self.assignment = new
        self._peers.update(new)
        self._table.settle(_place(self._worker_id, new, new.plan_version))
        self._flow.stage_seconds = own_span_prior(new)
        self._emit(UpdatePeers(new))
        self._outbox.forget(Ready)
        self.loaded = True
        if observing.queue:
            self._training.begin_behind(observing.queue[-1], new.attempt)
        else:
            observing.end()
            self._training.begin((new.step, new.attempt), new.version)
            self._begin_stream(new, new.version, now_s)

    def step_replayed(self, event: StepReplayed, now_s: float) -> None:
        observing = self.observing
        if not observing.replayed(event.step):
            return
        if not self.loaded:
            observing.report(event.digests, self.plan_version)
        elif not observing.queue:
            observing.end()
            self._training.applied(StepApplied(event.step), self.plan_version, now_s)

    def _catch_up_failed(self, reason: str) -> None:
        """Also of a newcomer that is a holder already: the plan counts on it, so a new attempt must follow."""
        failure = self.observing.give_up(reason)
        self.leave()
        self._outbox.say(failure)

    def _begin_load(self, assignment: Assignment) -> None:
        self.leave()
        self.assignment = self._loading = assignment
        self._flow.stage_seconds = own_span_prior(assignment)
        self._load_failures = 0
        if self._device.running != Load(assignment):
            self._device.push(Load(assignment))

    def leave(self) -> None:
        """Nothing of the present assignment matters any more."""
        self.assignment = self._loading = None
        self.loaded = False
        self.observing.end()
        self.load_again_at_s = None
        self._outbox.forget_all()
        self._device.purge(lambda _: True)
        self._table.reset(self._table.epoch)
        self._parts.clear()
        self._training.round = None
        if self._stream is not None:
            self._stream.left()

    def _begin_stream(self, assignment: Assignment, version: int, now_s: float) -> None:
        if self._stream is not None:
            self._stream.begin(assignment, version, now_s, self._loaded_steps)

    def span_loaded(self, event: SpanLoaded, now_s: float) -> None:
        assignment = self.assignment
        assert assignment is not None
        self._loaded_steps = event.optimizer_steps
        if assignment.observer:
            self.observing.loaded(self.plan_version)
            return
        self._table.settle(_place(self._worker_id, assignment, assignment.plan_version))
        self._training.begin((assignment.step, assignment.attempt), event.version)
        self._begin_stream(assignment, event.version, now_s)
        self.loaded = True
        self._loaded_digests = (event.version, dict(event.block_digests))
        self._report_ready()

    def load_failed(self, event: LoadFailed, now_s: float) -> None:
        if self.observing.active:
            self._catch_up_failed(event.reason)
            return
        timings = self._timings
        delay_s = timings.growing(
            timings.load_retry_first_s, timings.load_retry_most_s, self._load_failures + 1
        )
        # Without the coordinator its keeper is away as well, and nobody could say otherwise: that counts for nothing.
        self._load_failures += self._outbox.up
        if self._load_failures >= timings.load_tries:
            self._stop(Stop(False, f"the assigned span could not be loaded: {event.reason}"))
            return
        self.load_again_at_s = now_s + delay_s

    def _report_ready(self) -> None:
        """Say Ready while the loaded version is the present one; later nobody waits for it."""
        version, digests = self._loaded_digests
        if self._training.version == version and self._training.commit is None:
            self._outbox.say(Ready(self.plan_version, version, digests))

    def standby(self, reason: str) -> None:
        self.standby_reason = reason
        self.observing.forget_failure()
        self.leave()

    # ------------------------------------------------------------------ catching up

    def committed_elsewhere(self, message: StepCommitted) -> None:
        """An observer hears that the others committed a step."""
        if flaw := self.observing.committed(message):
            self._catch_up_failed(flaw)

    def replay_failed(self, event: ReplayFailed) -> None:
        if self.observing.replays(event.step):
            self._catch_up_failed(event.reason)

    def look_at_time(self, now_s: float) -> None:
        again_at_s = self.load_again_at_s
        if again_at_s is not None and now_s >= again_at_s and self.assignment is not None:
            self.load_again_at_s = None
            self._loading = self.assignment
            self._device.push(Load(self.assignment))


def _place(worker_id: WorkerId, assignment: Assignment, base_plan_version: int) -> Place:
    spans = [assignment.span, *(peer.span for peer in assignment.peers if peer.span is not None)]
    return Place(
        assignment.span,
        len(assignment.stages),
        assignment.slots,
        assignment.plan_version,
        base_plan_version,
        boundaries_of(spans, len(assignment.stages)),
        frozenset({worker_id, *(peer.worker_id for peer in assignment.peers)}),
        sum(span.first_stage == 0 for span in spans),
        min(sum(stage in span for span in spans) for stage in range(len(assignment.stages))),
    )
