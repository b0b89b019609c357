"""The microbatches that a worker holds or was granted, the slots they take, and what was accumulated from
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from starlings_protos.messages import (
    Hop,
    Lease,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Receipt,
    Refusal,
    Span,
    WorkerId,
)
from starlings_worker.core.admission import (
    Admission,
    Duplicate,
    Rejection,
    check_forward,
    early_exits,
    inner_entries,
    lease_room,
    may_enter,
)
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import ForgetMicrobatch
from starlings_worker.core.events import Direction
from starlings_worker.core.in_flight import InFlight
from starlings_worker.core.losses import Fate, absent, fate_of
from starlings_worker.core.microbatches import Held, Phase

# Leases that may wait for a slot; each is a few kilobytes of tokens. The coordinator grants no more than was
# wished for.
LEASES_AT_MOST = 1024
# Beside them, of those that are evaluated or generated.
FORWARD_AT_MOST = 64

Epoch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Place:
    """This worker's place in the plan.

    Pushes under a plan older than `base_plan_version` belong to an earlier life.
    """

    span: Span
    stage_count: int
    slots: int
    plan_version: int
    base_plan_version: int
    # Where microbatches may change workers (see admission.py).
    boundaries: frozenset[int]
    # Everybody in the plan, this worker too.
    workers: frozenset[WorkerId]
    # Of the plan: how many workers begin microbatches, and how many replicas the stage has that has fewest.
    leaders: int = 1
    narrowest: int = 1

    def may_enter(self, held: int, entry_stage: int) -> bool:
        return may_enter(self.slots, held, self.span, entry_stage, self.boundaries)

    def lease_room(self, held: int) -> int:
        return lease_room(self.slots, held, self.span, self.boundaries)

    @property
    def exits(self) -> frozenset[int]:
        """Stages after which a microbatch may leave before the span's end."""
        if not early_exits(self.slots, self.span, self.boundaries):
            return frozenset()
        return frozenset(stage - 1 for stage in inner_entries(self.span, self.boundaries))


class MicrobatchTable:
    """`held` take slots; `leases` wait for one.

    `accumulated` lists, per stage, the indices in the present epoch's gradient.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        device: DeviceQueue,
        counters: Counter[str],
        forget: Callable[[ForgetMicrobatch], None],
    ) -> None:
        self._worker_id = worker_id
        self._device = device
        self._counters = counters
        self._forget = forget
        self._order = 0
        self.place: Place | None = None
        self.epoch: Epoch = (0, 0)
        self.held: dict[MicrobatchKey, Held] = {}
        self.leases: dict[MicrobatchKey, Lease] = {}
        self.accumulated: dict[int, set[int]] = {}
        self.failed: set[MicrobatchKey] = set()
        # The whole route of each index that was accumulated in the present epoch: it may come again, but once.
        self.routes: dict[int, tuple[Hop, ...]] = {}
        # Dropped while the device worked on them: forgotten when it is done.
        self.doomed: set[MicrobatchKey] = set()
        # Transfers out of dropped microbatches whose outcome is still to come, and must not be taken for a
        # later one's.
        self.orphans: Counter[tuple[Direction, MicrobatchKey, WorkerId]] = Counter()
        # Transfers in that were dropped before they were complete: the shell may still keep what comes of them.
        self.late: Counter[MicrobatchKey] = Counter()
        # Of one's own; and leases to have in store beside those that may begin, so that none waits for an answer.
        self.in_flight = InFlight()
        self.prefetch = 0
        # Whether one more microbatch would begin if the limit of `in_flight` were higher.
        self.held_back = False

    # ------------------------------------------------------------------ the place

    def settle(self, place: Place) -> None:
        """The span is here, and nothing of it was computed yet."""
        self.place = place
        self.in_flight = InFlight(place.stage_count, self.most_own(place))

    def resettle(self, place: Place) -> None:
        """The span stays, and others have changed."""
        self.place = place
        self.in_flight.bound(self.most_own(place))

    def most_own(self, place: Place) -> int:
        """Microbatches of its own that a worker may have under way."""
        return place.lease_room(0)

    @property
    def own_count(self) -> int:
        """Those that this worker began, and that are trained."""
        return sum(not held.route and held.trains for held in self.held.values())

    # ------------------------------------------------------------------ coming in

    @property
    def worker_id(self) -> WorkerId:
        return self._worker_id

    def admit(
        self, direction: Direction, header: MicrobatchHeader, sender: WorkerId, receipt: Receipt
    ) -> Admission:
        """Judge a push by its header; on a Receipt the slot is taken and the transfer awaited."""
        if self.place is None:
            return Rejection(Refusal.NOT_HELD, "this worker holds no stage")
        if header.plan_version < self.place.base_plan_version:
            return Rejection(Refusal.STALE, f"plan {header.plan_version} is over")
        if header.key.kind is LeaseKind.TRAIN and (gone := absent(header.route, self.place.workers)):
            return Rejection(Refusal.STALE, f"{gone[0]:.40} of its route is not in the plan")
        if direction is Direction.BACKWARD:
            return self._admit_backward(header, sender, receipt)
        wrong = check_forward(header, sender, self._worker_id, self.place.span)
        return wrong or self._admit_forward(self.place, header, receipt)

    def _admit_forward(self, place: Place, header: MicrobatchHeader, receipt: Receipt) -> Admission:
        key = header.key
        if key.kind is LeaseKind.TRAIN and (answer := self._judge_time(header, receipt)) is not None:
            return answer
        held = self.held.get(key)
        if held is not None:
            if held.route != header.route:
                return Rejection(Refusal.STALE, "the microbatch came here another way")
            if held.phase is Phase.ARRIVING:
                return Rejection(Refusal.BUSY, "a transfer of this microbatch is under way")
            return Duplicate(receipt)
        if key in self.leases:
            return Rejection(Refusal.STALE, "the microbatch is leased to this worker itself")
        if self.is_entangled(key):
            return Rejection(Refusal.BUSY, "the microbatch was here before, and is not let go of yet")
        if not place.may_enter(len(self.held), header.stage):
            return Rejection(Refusal.BUSY, "no free slot")
        self._hold(key, header.stage, header.route, header.loss_denominator, Phase.ARRIVING).arriving = header
        return receipt

    def _judge_time(self, header: MicrobatchHeader, receipt: Receipt) -> Admission | None:
        """The answer to a training microbatch that is not of the present; None for one that is, or comes next."""
        key = header.key
        epoch = (key.step, key.attempt)
        if epoch < self.epoch or key in self.failed:
            return Rejection(Refusal.STALE, f"step {key.step} attempt {key.attempt} is over")
        if key.step > self.epoch[0] + 1:
            return Rejection(Refusal.BUSY, f"step {key.step} is further than the next one")
        if route := self.taken_route(key):
            if route[: len(header.route)] == header.route:
                return Duplicate(receipt)
            return Rejection(Refusal.STALE, "the microbatch was accumulated here on another route")
        return None

    def _admit_backward(self, header: MicrobatchHeader, sender: WorkerId, receipt: Receipt) -> Admission:
        key = header.key
        held = self.held.get(key)
        if held is None:
            if key.kind is LeaseKind.TRAIN and self._was_returned_by(sender, header):
                return Duplicate(receipt)
            return Rejection(Refusal.STALE, "this worker does not hold the microbatch (any more)")
        if held.phase < Phase.AWAY or not held.trains:
            return Rejection(Refusal.MALFORMED, "no gradient is due yet")
        position = len(held.route)
        if (
            held.next_worker != sender
            or header.stage != held.exit_stage
            or header.route[:position] != held.route
            or len(header.route) <= position + 1
            or header.route[position] != held.own_hop(self._worker_id)
            or header.route[position + 1].worker_id != sender
        ):
            return Rejection(Refusal.MALFORMED, "the gradient does not come back the way the microbatch went")
        if held.phase is Phase.GRADIENT_ARRIVING:
            return Rejection(Refusal.BUSY, "a transfer of this gradient is under way")
        if held.phase > Phase.GRADIENT_ARRIVING:
            if header.route != held.full_route:
                return Rejection(Refusal.STALE, "another gradient of the microbatch is here already")
            return Duplicate(receipt)
        held.phase = Phase.GRADIENT_ARRIVING
        held.arriving = header
        return receipt

    def _was_returned_by(self, sender: WorkerId, header: MicrobatchHeader) -> bool:
        """Whether this gradient is in the accumulators already."""
        route = self.taken_route(header.key)
        if not route or route != header.route:
            return False
        return any(
            (one.worker_id, two.worker_id) == (self._worker_id, sender) for one, two in pairwise(route)
        )

    def arrived(self, direction: Direction, header: MicrobatchHeader, sender: WorkerId) -> Held | None:
        """The microbatch whose awaited transfer is complete, now queued; None when it was dropped."""
        held = self.held.get(header.key)
        awaited = Phase.ARRIVING if direction is Direction.FORWARD else Phase.GRADIENT_ARRIVING
        if held is None or held.phase is not awaited or held.arriving != header:
            self._counters["late_arrivals"] += 1
            self._late_is_over(header.key)
            if held is None and header.key not in self.doomed:
                self._forget(ForgetMicrobatch(header.key))
            return None
        held.arriving = None
        if direction is Direction.FORWARD:
            held.phase = Phase.QUEUED
        else:
            held.phase = Phase.GRADIENT_QUEUED
            held.full_route = header.route
            held.loss_sum, held.target_count = header.loss_sum, header.target_count
            held.waited_s += header.waited_s
        return held

    def aborted(self, direction: Direction, header: MicrobatchHeader) -> None:
        """An awaited transfer broke off: as if it had never been admitted."""
        held = self.held.get(header.key)
        if held is None or held.arriving != header:
            self._late_is_over(header.key)
            return
        held.arriving = None
        self._counters["broken_arrivals"] += 1
        if direction is Direction.FORWARD:
            self.drop(held)
        else:
            held.phase = Phase.AWAY

    def _hold(
        self, key: MicrobatchKey, stage: int, route: tuple[Hop, ...], denominator: float, phase: Phase
    ) -> Held:
        self._order += 1
        held = self.held[key] = Held(key, stage, route, denominator, self._order, phase)
        return held

    # ------------------------------------------------------------------ leases

    def grant(self, lease: Lease) -> bool:
        """Queue a lease for a slot. What is over, or here already, is dropped. False: something of the microbatch's
        earlier route is still under way here, so that it cannot be begun anew.
        """
        key = lease.key
        if key in self.held or key in self.leases:
            self._counters["duplicate_leases"] += 1
            return True
        over = key.kind is LeaseKind.TRAIN and (self.is_over(key) or bool(self.taken_route(key)))
        ahead = key.kind is not LeaseKind.TRAIN
        full = len(self.leases) >= LEASES_AT_MOST + (FORWARD_AT_MOST if ahead else 0)
        if over or self.place is None or 0 not in self.place.span or full:
            self._counters["leases_dropped"] += 1
            if key not in self.doomed:
                self._forget(ForgetMicrobatch(key))
            return True
        if self.is_entangled(key):
            if key not in self.doomed:
                self._forget(ForgetMicrobatch(key))
            return False
        # What is only computed forward does not wait behind minutes of training.
        if ahead:
            self.leases = {key: lease, **self.leases}
        else:
            self.leases[key] = lease
        return True

    def promote(self, now_s: float) -> None:
        """Give free slots to leases of the present epoch, oldest first, as many as are to be under way."""
        self.held_back = False
        if self.place is None:
            return
        begun, own = [], self.own_count
        for key, lease in self.leases.items():
            if not self.place.may_enter(len(self.held), 0):
                break
            trains = key.kind is LeaseKind.TRAIN
            if trains and not self.is_current(key):
                continue
            if trains and own >= self.in_flight.limit:
                self.held_back = True
                break
            begun.append(key)
            held = self._hold(key, 0, (), lease.loss_denominator, Phase.QUEUED)
            held.began_at_s = now_s
            held.waits(now_s)
            own += trains
        for key in begun:
            del self.leases[key]

    def wish(self) -> int:
        """How many more leases could be begun now, and as many more as are begun before an answer is here; one at
        least where a single slot would wait for each.
        """
        if self.place is None or self.place.span.first_stage != 0:
            return 0
        limit = self.in_flight.limit
        prefetch = max(self.prefetch, int(min(limit, self.place.lease_room(0)) <= 1))
        room = max(0, min(self.place.lease_room(len(self.held)), limit - self.own_count))
        return max(0, room + prefetch - len(self.leases))

    # ------------------------------------------------------------------ going away

    def drop(self, held: Held) -> None:
        """Free the slot and the tensors; the latter only when the device lets go of them."""
        del self.held[held.key]
        if held.arriving is not None:
            self.late[held.key] += 1
        if held.sending_forward and held.next_worker is not None:
            self.orphans[Direction.FORWARD, held.key, held.next_worker] += 1
        if held.sending_backward and held.previous is not None:
            self.orphans[Direction.BACKWARD, held.key, held.previous] += 1
        if self._device.works_on(held.key):
            self.doomed.add(held.key)
        else:
            self._forget(ForgetMicrobatch(held.key))

    def abandon_forward(self, held: Held) -> None:
        """Whom it is being sent to is gone: the outcome means nothing any more."""
        if held.sending_forward and held.next_worker is not None:
            self.orphans[Direction.FORWARD, held.key, held.next_worker] += 1
        held.sending_forward = False
        held.next_worker = None

    def is_entangled(self, key: MicrobatchKey) -> bool:
        """Whether the device or a transfer still works on an earlier coming of this microbatch, so that a new one's
        tensors could be mistaken for the old one's.
        """
        orphaned = any(other == key for _, other, _ in self.orphans)
        return orphaned or key in self.doomed or key in self.late

    def _late_is_over(self, key: MicrobatchKey) -> None:
        self.late[key] -= 1
        if self.late[key] <= 0:
            del self.late[key]

    def outcome_of_orphan(self, direction: Direction, key: MicrobatchKey, to: WorkerId) -> bool:
        triple = (direction, key, to)
        if self.orphans[triple] <= 0:
            del self.orphans[triple]
            return False
        self.orphans[triple] -= 1
        if not self.orphans[triple]:
            del self.orphans[triple]
        return True

    def device_released(self, key: MicrobatchKey) -> bool:
        """The device is done with `key`; True when it had been dropped meanwhile: it is freed now."""
        if key not in self.doomed:
            return False
        self.doomed.discard(key)
        self._forget(ForgetMicrobatch(key))
        return True

    def drop_forward_only(self) -> None:
        """The plan changed: evaluation and generation begin again under other numbers."""
        self._drop_all(held for held in self.held.values() if not held.trains)
        self._drop_leases(key for key in self.leases if key.kind is not LeaseKind.TRAIN)

    def begin_epoch(self, epoch: Epoch) -> None:
        """Drop what belongs to earlier epochs; what came early for this one becomes current."""
        self.epoch = epoch
        self.accumulated = {}
        self.failed = set()
        self.routes = {}
        self._drop_all(held for held in self.held.values() if held.trains and held.epoch < epoch)
        self._drop_leases(
            key for key in self.leases if key.kind is LeaseKind.TRAIN and (key.step, key.attempt) < epoch
        )

    # ------------------------------------------------------------------ what is of the present, and what was taken

    def is_over(self, key: MicrobatchKey) -> bool:
        """Whether nobody waits for that training microbatch any more."""
        return self.is_past(key) or key in self.failed

    def is_past(self, key: MicrobatchKey) -> bool:
        return (key.step, key.attempt) < self.epoch

    def is_current(self, key: MicrobatchKey) -> bool:
        """Whether a training microbatch may be computed now."""
        return (key.step, key.attempt) == self.epoch

    def taken_route(self, key: MicrobatchKey) -> tuple[Hop, ...]:
        """The whole route of a training microbatch that was accumulated here; empty when it was not."""
        return self.routes.get(key.index, ()) if self.is_current(key) else ()

    def fate_of(self, held: Held, present: Collection[WorkerId]) -> Fate:
        """What becomes of a training microbatch whose step goes on without somebody."""
        return fate_of(held, present)

    def fail(self, key: MicrobatchKey) -> None:
        """A training microbatch was given up: nobody should send it here again."""
        self.failed.add(key)

    def begins_forward(self, held: Held) -> None:
        """The device computes its forward pass next."""

    def unadded_stages(self, held: Held) -> tuple[int, ...]:
        """Stages to whose gradient its backward pass, which is next, must not add."""
        return ()

    def reset(self, epoch: Epoch) -> None:
        """Drop everything: the span changes."""
        self._drop_all(self.held.values())
        self._drop_leases(self.leases)
        self.place = None
        self.begin_epoch(epoch)

    def _drop_leases(self, keys: Iterable[MicrobatchKey]) -> None:
        for key in list(keys):
            del self.leases[key]
            self._forget(ForgetMicrobatch(key))

    def _drop_all(self, doomed: Iterable[Held]) -> None:
        for held in sorted(doomed, key=lambda held: held.order):
            self.drop(held)

    def accumulate(self, held: Held) -> None:
        for stage in range(held.entry_stage, held.exit_stage + 1):
            self.accumulated.setdefault(stage, set()).add(held.key.index)
        assert held.key.index not in self.routes, f"{held.key} is accumulated twice"
        self.routes[held.key.index] = held.full_route
