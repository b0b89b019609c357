"""The microbatches of a worker whose stages step on their own: there are no epochs, and a key is used once for ever."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

from starlings_protos.messages import (
    Hop,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Receipt,
    Refusal,
    WorkerId,
)
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import ForgetMicrobatch
from starlings_worker.core.events import Direction
from starlings_worker.core.in_flight import most_by_age
from starlings_worker.core.losses import Fate, stream_fate_of
from starlings_worker.core.microbatches import Held
from starlings_worker.core.table import LEASES_AT_MOST, Epoch, MicrobatchTable, Place

# Routes of what was added here, and keys that were given up, are remembered for messages that come twice or late.
REMEMBERED = 4096


class StreamTable(MicrobatchTable):
    """While `running` every training microbatch is of the present; before and after, none is."""

    def __init__(
        self,
        worker_id: WorkerId,
        device: DeviceQueue,
        counters: Counter[str],
        forget: Callable[[ForgetMicrobatch], None],
    ) -> None:
        super().__init__(worker_id, device, counters, forget)
        self.running = False
        # Begins no more leases: it leaves, and others can.
        self.parting = False
        # The owner has paused the job: nothing more begins here, whatever is loaded.
        self.paused = False
        # How many leases to have in store beside those that could begin at once.
        self.stock = 0
        # As many may go by while one is under way, where each stage has one replica: else gradients get too old.
        self.staleness_room = LEASES_AT_MOST
        # Said before a forward and a backward pass; see stream.py.
        self.on_forward: Callable[[Held], None] = lambda held: None
        self.stale_stages: Callable[[Held], tuple[int, ...]] = lambda held: ()
        self.on_added: Callable[[Held], None] = lambda held: None
        self._taken: dict[MicrobatchKey, tuple[Hop, ...]] = {}
        self._given_up: deque[MicrobatchKey] = deque()

    # ------------------------------------------------------------------ the present

    def is_past(self, key: MicrobatchKey) -> bool:
        return not self.running

    def is_current(self, key: MicrobatchKey) -> bool:
        return self.running and not (self.parting and key not in self.held)

    def taken_route(self, key: MicrobatchKey) -> tuple[Hop, ...]:
        return self._taken.get(key, ())

    def fate_of(self, held: Held, present: Collection[WorkerId]) -> Fate:
        return stream_fate_of(held, present)

    def _judge_time(self, header: MicrobatchHeader, receipt: Receipt) -> Admission | None:
        if not self.running:
            return Rejection(Refusal.STALE, "training is paused here")
        if header.key in self.failed:
            return Rejection(Refusal.STALE, "the microbatch was given up")
        route = self._taken.get(header.key)
        # On another route it comes again because somebody on the first was lost: it is added twice, and passed on.
        return Duplicate(receipt) if route and route[: len(header.route)] == header.route else None

    def admit(
        self, direction: Direction, header: MicrobatchHeader, sender: WorkerId, receipt: Receipt
    ) -> Admission:
        place = self.place
        if direction is Direction.BACKWARD and place is not None and header.key.kind is LeaseKind.TRAIN:
            # Who was lost on its way has done its part.
            if header.plan_version < place.base_plan_version:
                return Rejection(Refusal.STALE, f"plan {header.plan_version} is over")
            return self._admit_backward(header, sender, receipt)
        return super().admit(direction, header, sender, receipt)

    def most_own(self, place: Place) -> int:
        by_age = most_by_age(self.staleness_room, place.leaders, place.narrowest)
        return min(super().most_own(place), by_age)

    # ------------------------------------------------------------------ leases

    def promote(self, now_s: float) -> None:
        if self.paused:
            self.held_back = False
        else:
            super().promote(now_s)

    def wish(self) -> int:
        """In large numbers, and not for each microbatch that is done."""
        at_once = super().wish()
        if not self.running or self.place is None or self.place.span.first_stage != 0:
            return at_once
        if self.parting or self.paused:
            return 0
        most = min(self.in_flight.limit + 1 + self.stock, LEASES_AT_MOST)
        if at_once == 0 and len(self.leases) > most // 2:
            return 0
        return max(at_once, most - len(self.leases))

    def take_back_leases(self) -> tuple[MicrobatchKey, ...]:
        """Everything that has not begun, and is begun here no more."""
        keys = tuple(key for key in self.leases if key.kind is LeaseKind.TRAIN)
        self._drop_leases(keys)
        return keys

    # ------------------------------------------------------------------ what is done, and what is over

    def begins_forward(self, held: Held) -> None:
        self.on_forward(held)

    def unadded_stages(self, held: Held) -> tuple[int, ...]:
        return self.stale_stages(held)

    def accumulate(self, held: Held) -> None:
        if held.key in self._taken:
            self._counters["added_again"] += 1
        self._taken[held.key] = held.full_route
        if len(self._taken) > REMEMBERED:
            del self._taken[next(iter(self._taken))]
        self.on_added(held)

    def void(self, keys: Iterable[MicrobatchKey]) -> None:
        """Somebody on their routes gave them up."""
        for key in keys:
            self.fail(key)
            if (held := self.held.get(key)) is not None:
                self.drop(held)
            if key in self.leases:
                self._drop_leases([key])

    def fail(self, key: MicrobatchKey) -> None:
        if key not in self.failed:
            self.failed.add(key)
            self._given_up.append(key)
            if len(self._given_up) > REMEMBERED:
                self.failed.discard(self._given_up.popleft())

    def begin_epoch(self, epoch: Epoch) -> None:
        """Nothing of training goes on: the span is another one, or training is paused."""
        self.take_back_leases()
        self._drop_all([held for held in self.held.values() if held.trains])
        self.running = self.parting = False
        self._taken.clear()
        self.failed.clear()
        self._given_up.clear()
        super().begin_epoch(epoch)
