"""One round of a group, as one of its seats or as an adopter sees it. Steps and failures: the package's docstring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from starlings_protos.group_messages import (
    GroupClosed,
    GroupDecided,
    GroupDropped,
    GroupHeader,
    GroupHeld,
    GroupLeg,
    GroupMatched,
    GroupPart,
    GroupPrepared,
)
from starlings_protos.messages import Receipt, Refusal, WorkerId
from starlings_protos.pair_messages import RoundOutcome, SoloReason, SwapResult
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.groups.work import (
    AdoptAnchor,
    AnchorAdopted,
    AnchorEncoded,
    AnchorsDigested,
    Applied,
    Apply,
    Displace,
    Displaced,
    EncodeAnchor,
    ForgetGroup,
    GroupKey,
    GroupNetworkEffect,
    GroupResult,
    GroupTask,
    GroupWork,
    Judge,
    Judged,
    Reduce,
    Reduced,
    SendGroup,
    TaskFailed,
)

# Parts of the time from slot to deadline: what is here by then is said, whatever is missing.
HELD_AT = 0.5
PREPARED_AT = 0.85
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 1.0
NOBODY = WorkerId("")

# (leg, place of the sender) of what is coming or here.
_Place = tuple[GroupLeg, int]


@dataclass(slots=True)
class _Delivery:
    """Something that is repeated until its receiver has it, or will never take it."""

    header: GroupHeader
    to: WorkerId
    under_way: bool = False
    over: bool = False
    tries: int = 0
    again_at_s: float = 0.0


@dataclass(slots=True)
class GroupRound:
    match: GroupMatched
    worker_id: WorkerId
    # With training going on beside the round.
    overlapped: bool
    push: Callable[[GroupWork], None]
    emit: Callable[[GroupNetworkEffect], None]
    say: Callable[[GroupHeld | GroupPrepared], None]
    key: GroupKey = field(init=False)
    # This worker's seat; None: it copies the anchor.
    me: int | None = field(init=False)
    began_at_s: float = math.inf
    digests: tuple[str, ...] | None = None
    # Digests of what is here, and of what is being read.
    here: dict[_Place, str] = field(default_factory=dict)
    coming: dict[_Place, str] = field(default_factory=dict)
    judging: set[int] = field(default_factory=set)
    # By part: aggregates that can be applied.
    sound: dict[int, str] = field(default_factory=dict)
    dropped: list[GroupDropped] = field(default_factory=list)
    # Said so far.
    held: tuple[WorkerId, ...] | None = None
    prepared: GroupPrepared | None = None
    closed: GroupClosed | None = None
    decided: GroupDecided | None = None
    # The device applies it: nothing ends the round before that is done.
    applying: bool = False
    expired: bool = False
    outcome: RoundOutcome | None = None
    deliveries: list[_Delivery] = field(default_factory=list)
    # After Apply or AdoptAnchor.
    anchor: str | None = None
    forgotten: bool = False

    def __post_init__(self) -> None:
        self.key = GroupKey.of(self.match)
        self.me = next(
            (k for k, seat in enumerate(self.match.seats) if seat.worker_id == self.worker_id), None
        )

    # ------------------------------------------------------------------ questions

    @property
    def over(self) -> bool:
        return self.outcome is not None

    @property
    def seated(self) -> bool:
        return self.me is not None

    @property
    def holds_training(self) -> bool:
        """Steps that are taken now would be overwritten."""
        begun = self.began_at_s < math.inf
        return self.seated and begun and not (self.overlapped or self.expired or self.over)

    @property
    def _owner(self) -> bool:
        """Of a part that has elements."""
        return self.me is not None and self.digests is not None and bool(self.digests[self.me])

    def _at(self, part_of_time: float) -> float:
        return self.began_at_s + part_of_time * self.match.deadline_s

    # ------------------------------------------------------------------ the slot

    def begin(self, slot_at_s: float, *, warmup: bool) -> None:
        self.began_at_s = slot_at_s
        if self.me is not None:
            self.push(GroupWork(Displace(self.key, self.match.seats, self.me, warmup)))

    def look_at_time(self, now_s: float) -> None:
        if self.began_at_s == math.inf:
            return
        if not self.over and now_s >= self._at(1.0):
            self.expired = True
        self.advance(now_s)

    def wake_at_s(self) -> float | None:
        if self.began_at_s == math.inf:
            return None
        times = [d.again_at_s for d in self.deliveries if not (d.over or d.under_way)]
        if self.me is not None and not self.over:
            if self.held is None and self.digests is not None:
                times.append(self._at(HELD_AT))
            if self.prepared is None and self.digests is not None:
                times.append(self._at(PREPARED_AT))
            if not self.expired:
                times.append(self._at(1.0))
        return min(times, default=None)

    # ------------------------------------------------------------------ what peers send

    def admit(self, header: GroupHeader, sender: WorkerId, receipt: Receipt) -> Admission:
        place = self._place(header, sender)
        if place is None:
            return Rejection(Refusal.MALFORMED, "the round has nothing of that kind from this sender")
        if self.forgotten or (self.over and header.leg is not GroupLeg.AGGREGATE):
            return Rejection(Refusal.STALE, "the round is over here")
        known = self.here.get(place)
        if known is not None:
            if known == header.sha256:
                return Duplicate(receipt)
            return Rejection(Refusal.MALFORMED, "another payload came for this round")
        if place in self.coming:
            return Rejection(Refusal.BUSY, "this payload is being read")
        self.coming[place] = header.sha256
        return receipt

    def _place(self, header: GroupHeader, sender: WorkerId) -> _Place | None:
        """Whether a payload is of this very round, and who may send it sends it."""
        if GroupKey.of(header) != self.key:
            return None
        if header.leg is GroupLeg.ANCHOR:
            fits = self.me is None and sender == self.match.donor
            return (header.leg, 0) if fits else None
        seat = next((k for k, s in enumerate(self.match.seats) if s.worker_id == sender), None)
        if seat is None or self.me is None or seat == self.me:
            return None
        part = self.me if header.leg is GroupLeg.CONTRIBUTION else seat
        return (header.leg, seat) if header.part == part else None

    def arrived(self, header: GroupHeader, sender: WorkerId, now_s: float) -> None:
        place = self._place(header, sender)
        if place is None or self.coming.pop(place, None) != header.sha256:
            return
        self.here[place] = header.sha256
        if header.leg is GroupLeg.ANCHOR and not self.over:
            self.push(GroupWork(AdoptAnchor(self.key)))
        self.advance(now_s)

    def aborted(self, header: GroupHeader, sender: WorkerId) -> None:
        place = self._place(header, sender)
        if place is not None and self.coming.get(place) == header.sha256:
            del self.coming[place]

    def sent(self, header: GroupHeader, to: WorkerId) -> None:
        for delivery in self._deliveries_of(header, to):
            delivery.over, delivery.under_way = True, False

    def not_sent(self, header: GroupHeader, to: WorkerId, refusal: Refusal, now_s: float) -> None:
        for delivery in self._deliveries_of(header, to):
            delivery.under_way = False
            delivery.tries += 1
            delivery.over = refusal in (Refusal.STALE, Refusal.MALFORMED, Refusal.LIMIT, Refusal.NOT_HELD)
            delivery.again_at_s = now_s + min(RETRY_MOST_S, RETRY_FIRST_S * 2.0 ** min(delivery.tries - 1, 8))

    def _deliveries_of(self, header: GroupHeader, to: WorkerId) -> Iterable[_Delivery]:
        return (d for d in self.deliveries if d.header == header and d.to == to)

    # ------------------------------------------------------------------ what the coordinator says

    def close_members(self, message: GroupClosed, now_s: float) -> None:
        if self.closed is None and not self.over and self.me is not None:
            self.closed = message
            self._reduce_if_due()
            self.advance(now_s)

    def decide(self, message: GroupDecided, now_s: float) -> None:
        if self.decided is not None or self.over or self.me is None:
            return
        self.decided = message
        self._apply_if_possible(now_s)

    # ------------------------------------------------------------------ what the device did

    def worked(self, task: GroupTask, result: GroupResult, now_s: float) -> None:
        match result:
            case TaskFailed(reason):
                self._failed(task, reason)
            case Displaced():
                self._displaced(result)
            case Reduced():
                self._reduced(result)
            case Judged(refused):
                assert isinstance(task, Judge)
                self._judged(task.part, refused)
            case Applied():
                self.applying = False
                self._end(SwapResult.COMMITTED, applied=result, now_s=now_s)
            case AnchorEncoded():
                for adopter in self.match.adopters:
                    header = self.key.header(GroupLeg.ANCHOR, 0, result.sha256)
                    self.deliveries.append(_Delivery(header, adopter))
            case AnchorAdopted(anchor):
                self.anchor = anchor
                words = f"took the starting point of {self.match.donor}"
                self._end(SwapResult.SOLO, SoloReason.BEHIND, words, now_s=now_s)
            case AnchorsDigested():
                pass
            case _:
                assert_never(result)
        self.advance(now_s)

    def _failed(self, task: GroupTask, reason: str) -> None:
        """The others go on without what did not come of it."""
        if isinstance(task, Judge):
            self._judged(task.part, reason)
        elif not self.over and not isinstance(task, EncodeAnchor | Reduce):
            self.applying = False
            self._end(SwapResult.SOLO, SoloReason.FAILED, reason, now_s=self.began_at_s)

    def _displaced(self, result: Displaced) -> None:
        if self.me is None or self.over:
            return
        self.digests = result.sha256
        for part, digest in enumerate(result.sha256):
            if digest and part != self.me:
                header = self.key.header(GroupLeg.CONTRIBUTION, part, digest)
                self.deliveries.append(_Delivery(header, self.match.seats[part].worker_id))
        self._reduce_if_due()

    def _reduce_if_due(self) -> None:
        if self.closed is None or not self._owner or self.over or self.me is None:
            return
        seats = self.match.seats
        members = tuple(k for k, seat in enumerate(seats) if seat.worker_id in self.closed.members)
        if members:
            self.push(GroupWork(Reduce(self.key, seats, members, self.me)))

    def _reduced(self, result: Reduced) -> None:
        assert self.me is not None
        self.dropped += result.dropped
        self.sound[self.me] = result.sha256
        header = self.key.header(GroupLeg.AGGREGATE, self.me, result.sha256)
        self.deliveries += [
            _Delivery(header, seat.worker_id) for k, seat in enumerate(self.match.seats) if k != self.me
        ]

    def _judged(self, part: int, refused: str) -> None:
        if refused:
            self.dropped.append(
                GroupDropped(self.match.seats[part].worker_id, f"its aggregate: {refused}"[:200])
            )
        else:
            self.sound[part] = self.here[GroupLeg.AGGREGATE, part]

    # ------------------------------------------------------------------ decisions

    def advance(self, now_s: float) -> None:
        """Whatever has become possible or is due."""
        if self.me is not None and self.digests is not None and not self.over:
            self._tell_held(now_s)
            self._judge_arrivals()
            self._tell_prepared(now_s)
            if self.decided is not None:
                self._apply_if_possible(now_s)
        if not self.forgotten:
            for delivery in self.deliveries:
                if not (delivery.over or delivery.under_way) and now_s >= delivery.again_at_s:
                    delivery.under_way = True
                    self.emit(SendGroup(delivery.header, delivery.to))

    def _tell_held(self, now_s: float) -> None:
        seats = self.match.seats
        members = tuple(
            seat.worker_id
            for k, seat in enumerate(seats)
            if not self._owner or k == self.me or (GroupLeg.CONTRIBUTION, k) in self.here
        )
        due = len(members) == len(seats) or now_s >= self._at(HELD_AT)
        if due and members != self.held and self.closed is None:
            self.held = members
            self.say(GroupHeld(self.key.stage, self.key.slot, self.key.round_id, members))

    def _judge_arrivals(self) -> None:
        for leg, seat in list(self.here):
            if leg is GroupLeg.AGGREGATE and seat not in self.judging:
                self.judging.add(seat)
                self.push(GroupWork(Judge(self.key, seat)))

    def _tell_prepared(self, now_s: float) -> None:
        assert self.digests is not None
        complete = all(part in self.sound for part, digest in enumerate(self.digests) if digest)
        if self.decided is not None or not (complete or now_s >= self._at(PREPARED_AT)):
            return
        parts = tuple(GroupPart(part, digest) for part, digest in sorted(self.sound.items()))
        key = self.key
        message = GroupPrepared(key.stage, key.slot, key.round_id, parts, tuple(self.dropped), complete)
        if message != self.prepared:
            self.prepared = message
            self.say(message)

    def _apply_if_possible(self, now_s: float) -> None:
        """At once, or when the device has looked at what is here."""
        decided = self.decided
        if decided is None or self.applying or self.over:
            return
        if not decided.parts:
            why = "; ".join(f"{d.worker_id}: {d.reason}" for d in decided.dropped)
            self._end(SwapResult.SOLO, SoloReason.LATE, why or "too few took part", now_s=now_s)
            return
        missing = [p.part for p in decided.parts if self.sound.get(p.part) != p.sha256]
        if not missing:
            self.applying = True
            parts = tuple(p.part for p in decided.parts)
            self.push(GroupWork(Apply(self.key, parts, self.overlapped or self.expired)))
            return
        coming = any(
            self.here.get((GroupLeg.AGGREGATE, part), self.coming.get((GroupLeg.AGGREGATE, part)))
            and part not in self.sound
            for part in missing
        )
        if not coming:
            owners = ", ".join(self._name_of(part) for part in missing)
            self._end(SwapResult.SOLO, SoloReason.LATE, f"no aggregate came from {owners}", now_s=now_s)

    def _name_of(self, part: int) -> str:
        return self.match.seats[part].worker_id if part < len(self.match.seats) else f"part {part}"

    # ------------------------------------------------------------------ the end

    def close(self, reason: SoloReason, detail: str, now_s: float) -> None:
        """Nothing is applied any more, unless the device is about to."""
        if not self.over and not self.applying:
            self._end(SwapResult.SOLO, reason, detail, now_s=now_s)

    def forget(self) -> None:
        if not self.forgotten:
            self.forgotten = True
            self.emit(ForgetGroup(self.key))

    def _end(
        self,
        result: SwapResult,
        reason: SoloReason = SoloReason.UNSPECIFIED,
        detail: str = "",
        applied: Applied | None = None,
        *,
        now_s: float,
    ) -> None:
        match, decided = self.match, self.decided
        dropped = decided.dropped if decided is not None else tuple(self.dropped)
        if applied is not None:
            self.anchor = applied.anchor
        self.outcome = RoundOutcome(
            match.stage,
            match.slot,
            match.fragment,
            0,
            match.round_id,
            match.donor if self.me is None else NOBODY,
            result,
            reason,
            detail[:200],
            applied.fraction if applied is not None else 0.0,
            applied.distance if applied is not None and math.isfinite(applied.distance) else 0.0,
            max(0.0, now_s - self.began_at_s) if applied is not None else 0.0,
            decided.members if decided is not None and applied is not None else (),
            dropped,
        )
        if self.me is not None and match.adopters and match.donor == self.worker_id:
            self.push(GroupWork(EncodeAnchor(self.key)))
