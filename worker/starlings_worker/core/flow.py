"""How microbatches move through a worker:

which the device does next, where they go, and what becomes of failed transfers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import assert_never

from starlings_protos.messages import (
    LeaseKind,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchHeader,
    MicrobatchKey,
    PeerUnreachable,
    Receipt,
    Refusal,
    ToCoordinator,
    WorkerId,
)
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import ComputeBackward, ComputeForward, Effect, SendMicrobatch
from starlings_worker.core.events import (
    BackwardComputed,
    ComputeFailed,
    Direction,
    ForwardComputed,
    MicrobatchNotSent,
    MicrobatchSent,
)
from starlings_worker.core.losses import Fate, absent
from starlings_worker.core.microbatches import Held, Phase
from starlings_worker.core.peers import PeerTable, queue_seconds
from starlings_worker.core.router import choose_exit, choose_next, helpers, onward
from starlings_worker.core.table import Epoch, MicrobatchTable, Place
from starlings_worker.core.timings import WorkerTimings


class Flow:
    """Reads and moves the table's microbatches; emits computations and transfers, tells the coordinator how
    they ended.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        timings: WorkerTimings,
        table: MicrobatchTable,
        device: DeviceQueue,
        peers: PeerTable,
        counters: Counter[str],
        emit: Callable[[Effect], None],
        say: Callable[[ToCoordinator], None],
    ) -> None:
        self._worker_id = worker_id
        self._timings = timings
        self._table = table
        self._device = device
        self._peers = peers
        self._counters = counters
        self._emit = emit
        self._say = say
        # Measured seconds per own stage, forward plus backward.
        self.stage_seconds: dict[int, float] = {}
        self._forward_seconds: dict[int, float] = {}
        # The same without what the plan made one expect before anything was measured.
        self.measured_seconds: dict[int, float] = {}
        # Passes computed; and in the mean: sending one to a peer, and waiting until one had room for it.
        self.passes = 0
        self.push_s = self.room_s = 0.0

    # ------------------------------------------------------------------ the device

    def next_computation(self, now_s: float, rng: random.Random) -> ComputeForward | ComputeBackward | None:
        """Backward before forward, deeper entry before shallower, then the oldest.

        Marks the microbatch as running.
        """
        place = self._table.place
        if place is None:
            return None
        backward = [held for held in self._table.held.values() if held.phase is Phase.GRADIENT_QUEUED]
        if backward:
            held = min(backward, key=lambda held: (-held.entry_stage, held.order))
            held.phase = Phase.BACKWARD
            held.goes_on(now_s)
            return ComputeBackward(held.key, self._table.unadded_stages(held) if held.trains else ())
        forward = [
            held
            for held in self._table.held.values()
            if held.phase is Phase.QUEUED and (not held.trains or self._table.is_current(held.key))
        ]
        if not forward:
            return None
        held = min(forward, key=lambda held: (-held.entry_stage, held.order))
        held.phase = Phase.FORWARD
        held.goes_on(now_s)
        way = choose_exit(
            held.entry_stage,
            place.span,
            place.stage_count,
            self.stage_seconds,
            self._peers.views(now_s),
            self._visited(held),
            early_exits=place.exits,
            margin=self._timings.early_exit_margin,
            rng=rng,
            waiting=min(self._table.in_flight.limit, len(forward) - 1 + len(self._table.leases))
            if held.trains
            else 0,
        )
        held.exit_stage, held.helped = way.exit_stage, way.helped
        if held.trains:
            self._table.begins_forward(held)
        return ComputeForward(held.key, held.entry_stage, held.exit_stage, held.loss_denominator)

    def graph_to_close(self) -> ComputeBackward | None:
        """`async`: backward of a microbatch whose loss has just been computed here. Its graph points to the weights as
        they are, so nothing may change them before. Marks it as running.
        """
        place = self._table.place
        for held in self._table.held.values() if place is not None else ():
            ends = place is not None and held.exit_stage == place.stage_count - 1
            if ends and held.trains and held.phase is Phase.GRADIENT_QUEUED:
                held.phase = Phase.BACKWARD
                return ComputeBackward(held.key, self._table.unadded_stages(held))
        return None

    def forward_computed(self, event: ForwardComputed, now_s: float) -> None:
        held = self._released(event.key)
        if held is None:
            return
        self._measure(held, event.seconds, backward=False)
        place = self._table.place
        if place is None or held.exit_stage != place.stage_count - 1:
            held.phase = Phase.PLACING
            held.waits(now_s)
            held.retry_at_s = held.computed_at_s = now_s
            return
        held.full_route = (*held.route, held.own_hop(self._worker_id))
        held.loss_sum, held.target_count = event.loss_sum, event.target_count
        if held.trains:
            held.phase = Phase.GRADIENT_QUEUED
            held.waits(now_s)
            return
        self._say(
            MicrobatchDone(held.key, held.full_route, event.loss_sum, event.target_count, event.next_token)
        )
        self._table.drop(held)

    def backward_computed(self, event: BackwardComputed, now_s: float) -> None:
        held = self._released(event.key)
        if held is None:
            return
        self._measure(held, event.seconds, backward=True)
        self._table.accumulate(held)
        if held.route:
            held.settle()
            held.phase = Phase.RETURNING
            held.retry_at_s = held.computed_at_s = now_s
            return
        self._table.in_flight.done(now_s - held.began_at_s, held.waited_s)
        self._say(MicrobatchDone(held.key, held.full_route, held.loss_sum, held.target_count))
        self._table.drop(held)

    def compute_failed(self, event: ComputeFailed) -> None:
        held = self._released(event.key)
        if held is not None:
            self._give_up(held, event.reason, out_of_memory=event.out_of_memory)

    def _released(self, key: MicrobatchKey) -> Held | None:
        if self._table.device_released(key):
            return None
        held = self._table.held.get(key)
        assert held is None or held.phase in (Phase.FORWARD, Phase.BACKWARD)
        return held

    def _measure(self, held: Held, seconds: float, *, backward: bool) -> None:
        stages = range(held.entry_stage, held.exit_stage + 1)
        weight = self._timings.measurement_weight
        self.passes += 1
        for stage in stages:
            new_s = seconds / len(stages)
            if not backward:
                self._forward_seconds[stage] = new_s
                continue
            new_s += self._forward_seconds.get(stage, new_s)
            old_s = self.stage_seconds.get(stage, 0.0)
            self.stage_seconds[stage] = old_s + weight * (new_s - old_s) if old_s else new_s
            old_s = self.measured_seconds.get(stage, new_s)
            self.measured_seconds[stage] = old_s + weight * (new_s - old_s)

    # ------------------------------------------------------------------ transfers out

    def send_due(self, now_s: float, rng: random.Random) -> None:
        """Start every transfer whose time has come: oldest first, gradients before activations."""
        waiting = [
            held
            for held in self._table.held.values()
            if held.phase in (Phase.PLACING, Phase.RETURNING) and held.retry_at_s <= now_s
        ]
        for held in sorted(waiting, key=lambda held: (-held.phase, held.order)):
            if held.phase is Phase.RETURNING:
                if not held.sending_backward:
                    self._return(held, now_s)
            elif not held.sending_forward:
                self._place(held, now_s, rng)

    def _place(self, held: Held, now_s: float, rng: random.Random) -> None:
        place = self._table.place
        if place is None:
            return
        stage = held.exit_stage + 1
        if not held.ambiguous:
            views = self._peers.views(now_s)
            visited = self._visited(held)
            table, chosen = onward(place.stage_count, views, visited), None
            if held.helped:
                chosen = choose_next(stage, place.stage_count, helpers(views), visited, rng, table)
            chosen = chosen or choose_next(stage, place.stage_count, views, visited, rng, table)
            if chosen is None:
                self._put_off(held, stage, now_s)
                return
            held.next_worker = chosen.next_worker
        assert held.next_worker is not None
        held.phase = Phase.AWAY
        held.sending_forward = True
        held.sent_at_s = now_s
        self._peers.sending(held.next_worker)
        route = (*held.route, held.own_hop(self._worker_id))
        header = MicrobatchHeader(held.key, stage, route, held.loss_denominator, place.plan_version)
        self._emit(SendMicrobatch(Direction.FORWARD, header, held.next_worker))

    def _put_off(self, held: Held, stage: int, now_s: float) -> None:
        """Nobody can take it now.

        Backed-off holders are asked when their time comes; otherwise the plan must change.
        """
        retry_at_s = self._peers.next_retry_s(stage, now_s)
        held.retry_at_s = now_s + self._timings.retry_most_s if retry_at_s is None else retry_at_s
        if retry_at_s is None and held.failing_since_s is None:
            held.failing_since_s = now_s
        silent = self._peers.silent_holders(stage)
        self._check_patience(held, f"no worker that holds stage {stage} can be reached", now_s, silent)

    def _return(self, held: Held, now_s: float) -> None:
        place, previous = self._table.place, held.previous
        if place is None or previous is None:
            return
        held.sending_backward = True
        held.sent_at_s = now_s
        header = MicrobatchHeader(
            held.key,
            held.entry_stage - 1,
            held.full_route,
            held.loss_denominator,
            place.plan_version,
            held.loss_sum,
            held.target_count,
            held.waited_s + self._peers.link_wait_s(previous),
        )
        self._emit(SendMicrobatch(Direction.BACKWARD, header, previous))

    def sent(self, event: MicrobatchSent, now_s: float) -> None:
        if self._table.outcome_of_orphan(event.direction, event.key, event.to):
            return
        held = self._table.held.get(event.key)
        if held is None:
            self._counters["unexpected_outcomes"] += 1
            return
        self._peers.succeeded(event.to, event.receipt, now_s - held.sent_at_s, now_s)
        weight, took_s = self._timings.measurement_weight, now_s - held.sent_at_s
        self.push_s += (weight if self.push_s else 1.0) * (took_s - self.push_s)
        self.room_s += weight * (held.sent_at_s - held.computed_at_s - self.room_s)
        if event.direction is Direction.FORWARD:
            held.sending_forward = False
            if held.phase is Phase.AWAY:
                held.goes_on(now_s, unavoidable_s=self._peers.link_least_s(event.to))
            held.settle()
            if not held.trains:
                self._table.drop(held)
        else:
            held.sending_backward = False
            self._table.drop(held)

    def not_sent(self, event: MicrobatchNotSent, now_s: float) -> None:
        if self._table.outcome_of_orphan(event.direction, event.key, event.to):
            return
        held = self._table.held.get(event.key)
        if held is None:
            self._counters["unexpected_outcomes"] += 1
            return
        forward = event.direction is Direction.FORWARD
        if forward:
            held.sending_forward = False
            if held.phase is not Phase.AWAY:
                return  # The gradient came back, or is coming: the receiver had it after all.
            held.phase = Phase.PLACING
        else:
            held.sending_backward = False
        self._counters["resends"] += 1
        if self._peers.failed(event.to, event.refusal, now_s):
            self._say(PeerUnreachable(event.to, event.reason))
        held.ambiguous = held.ambiguous or not event.certain
        timings = self._timings
        if event.refusal is Refusal.BUSY:
            held.busy_tries += 1
            if not held.ambiguous:
                held.failing_since_s = None  # It answers; waiting for room is no failure.
            delay_s = timings.growing(timings.busy_first_s, timings.busy_most_s, held.busy_tries)
        else:
            held.tries += 1
            delay_s = timings.growing(timings.retry_first_s, timings.retry_most_s, held.tries)
            if held.failing_since_s is None:
                held.failing_since_s = now_s
        # With a free choice the next try waits for no one: the peer itself is left alone for a while.
        held.retry_at_s = now_s if forward and not held.ambiguous else now_s + delay_s
        reason = f"{'forward' if forward else 'gradient'} to {event.to}: {event.reason or event.refusal.name}"
        if held.ambiguous and held.tries >= timings.ambiguous_tries and event.refusal is not Refusal.BUSY:
            self._give_up(held, reason, [event.to])
        else:
            silent = [event.to] if event.refusal is Refusal.UNSPECIFIED else []
            self._check_patience(held, reason, now_s, silent)

    def room_at(self, sender: WorkerId, now_s: float) -> None:
        """A gradient came back from `sender`, so a slot gets free there:

        one waiting microbatch may try at once.
        """
        self._peers.room_again(sender)
        waiting = [held for held in self._table.held.values() if held.phase is Phase.PLACING]
        if waiting:
            held = min(waiting, key=lambda held: held.order)
            held.retry_at_s = min(held.retry_at_s, now_s)

    def _check_patience(self, held: Held, reason: str, now_s: float, silent: Sequence[WorkerId]) -> None:
        since_s = held.failing_since_s
        if since_s is not None and now_s - since_s > self._timings.give_up_s:
            self._give_up(held, reason, silent)

    def _give_up(
        self, held: Held, reason: str, silent: Sequence[WorkerId] = (), *, out_of_memory: bool = False
    ) -> None:
        """For good: in training only a new attempt of the step can settle who accumulated it.

        The `silent` peers are named first, so that the failure is known to be the network's, not the samples'.
        """
        for peer in silent:
            self._say(PeerUnreachable(peer, reason))
        self._counters["failures"] += 1
        self._table.drop(held)
        if held.trains:
            self._table.fail(held.key)
        self._say(MicrobatchFailed(held.key, reason, out_of_memory))

    # ------------------------------------------------------------------ when others are lost

    def leave_out_absent(self, epoch: Epoch) -> None:
        """The plan has fewer workers, and the attempt goes on (see losses.py). Nothing happens where all are there."""
        table, place = self._table, self._table.place
        assert place is not None
        if table.epoch == epoch:
            for index, route in sorted(table.routes.items()):
                if gone := absent(route, place.workers):
                    self._void(MicrobatchKey(LeaseKind.TRAIN, *epoch, index), gone[0])
        for held in sorted(table.held.values(), key=lambda held: held.order):
            if not held.trains or held.epoch < epoch:
                continue
            match table.fate_of(held, place.workers):
                case Fate.FAILED:
                    self._give_up(held, "it passed through a worker that was lost")
                case Fate.DROPPED:
                    self._counters["dropped_with_a_worker"] += 1
                    table.drop(held)
                case Fate.SENT_AGAIN:
                    self._counters["resends"] += 1
                    table.abandon_forward(held)
                    held.settle()
                    held.phase = Phase.PLACING
                    self._give_up_if_stuck(held, place)
                case Fate.STAYS:
                    self._give_up_if_stuck(held, place)
                case _ as never:
                    assert_never(never)

    def _give_up_if_stuck(self, held: Held, place: Place) -> None:
        """A route may have gone where only the lost worker could have taken it on."""
        if held.phase > Phase.PLACING:
            return
        passable = onward(place.stage_count, self._peers.views(0.0), self._visited(held)).passable
        exits = {place.span.last_stage, *place.exits} if held.exit_stage < 0 else {held.exit_stage}
        if not any(passable[stage + 1] for stage in exits if stage >= held.entry_stage):
            self._give_up(held, "nobody is left who could take it on")

    def refuse(self, key: MicrobatchKey) -> None:
        """A lease that cannot be begun here."""
        self._counters["failures"] += 1
        self._table.fail(key)
        self._say(MicrobatchFailed(key, "its route before this lease is not let go of yet"))

    def _void(self, key: MicrobatchKey, gone: WorkerId) -> None:
        """Something accumulated cannot be taken out of the gradient again."""
        self._counters["failures"] += 1
        if (held := self._table.held.get(key)) is not None:
            self._table.drop(held)
        self._table.fail(key)
        self._say(MicrobatchFailed(key, f"it was accumulated on a route through {gone}, which was lost"))

    # ------------------------------------------------------------------ questions

    def _visited(self, held: Held) -> set[WorkerId]:
        return {hop.worker_id for hop in held.route} | {self._worker_id}

    def receipt(self) -> Receipt:
        """What a sender is told of this worker."""
        place = self._table.place
        if place is None:
            return Receipt()
        waiting = (Phase.QUEUED, Phase.GRADIENT_QUEUED)
        queued = [held for held in self._table.held.values() if held.phase in waiting]
        runs = [
            (held.entry_stage, held.exit_stage if held.exit_stage >= 0 else place.span.last_stage)
            for held in queued
        ]
        free = max(0, place.slots - len(self._table.held))
        return Receipt(len(queued), free, queue_seconds(self.stage_seconds, runs))

    def wake_at_s(self) -> float | None:
        times = [
            held.retry_at_s
            for held in self._table.held.values()
            if (held.phase is Phase.PLACING and not held.sending_forward)
            or (held.phase is Phase.RETURNING and not held.sending_backward)
        ]
        return min(times, default=None)
