"""Who may come in: the three answers to a peer's push, the slots, and the checks of a microbatch's header.

Slots against deadlock (design section 6). A microbatch holds one slot of every worker on its route until its
backward pass has gone by, and needs a further slot at the next worker, so workers could wait for each other
in a circle. They do not: entering at stage s leaves one slot free for each deeper stage of the span. Take the
deepest stage t that somebody waits to enter. Whoever entered a worker at t or deeper waits for nothing, and
those that entered above t left a slot for t. So some holder of t has room, or will have. It needs as many
slots as stages. A worker with fewer keeps nothing free but lets microbatches out only at its span's end: then
none of its guests waits for a stage that it holds itself, and the same argument goes through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlings_protos.messages import LeaseKind, MicrobatchHeader, Receipt, Refusal, Span, WorkerId


@dataclass(frozen=True, slots=True)
class Rejection:
    """The push is refused; nothing of it is kept.

    `refusal` goes to the sender as the status's trailing metadata.
    """

    refusal: Refusal
    message: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The receiver has it already: a success for the sender, nothing to read for the receiver."""

    receipt: Receipt


Admission = Receipt | Duplicate | Rejection


def early_exits(slots: int, span: Span) -> bool:
    """Whether microbatches may leave inside the span: only with a slot to spare for each held stage."""
    return slots >= len(span.stages)


def reserved_slots(slots: int, span: Span, entry_stage: int) -> int:
    """Slots that entering at `entry_stage` must leave free for work already admitted elsewhere."""
    return span.last_stage - entry_stage if early_exits(slots, span) else 0


def may_enter(slots: int, held: int, span: Span, entry_stage: int) -> bool:
    """Whether one more microbatch may enter at `entry_stage` while `held` are here."""
    return slots - held >= 1 + reserved_slots(slots, span, entry_stage)


def lease_room(slots: int, held: int, span: Span) -> int:
    """How many microbatches could enter at the span's first stage now."""
    return max(0, slots - held - reserved_slots(slots, span, span.first_stage))


def check_forward(header: MicrobatchHeader, sender: WorkerId, me: WorkerId, span: Span) -> Rejection | None:
    """None when the route so far is sound, comes from its last hop, and leads into `span`."""
    route = header.route
    if not route or route[-1].worker_id != sender:
        return Rejection(Refusal.MALFORMED, "the route does not end with the sender")
    expected = 0
    seen: set[WorkerId] = set()
    for hop in route:
        if hop.first_stage != expected or hop.last_stage < hop.first_stage or hop.worker_id in seen:
            return Rejection(Refusal.MALFORMED, "the route is not a way through the stages from the first on")
        seen.add(hop.worker_id)
        expected = hop.last_stage + 1
    if header.stage != expected:
        return Rejection(
            Refusal.MALFORMED, f"stage {header.stage} does not follow the route's stage {expected - 1}"
        )
    if me in seen:
        return Rejection(Refusal.MALFORMED, "the microbatch was here before")
    if header.stage not in span:
        return Rejection(
            Refusal.NOT_HELD, f"stage {header.stage} is not in the span {span.first_stage}-{span.last_stage}"
        )
    if header.key.kind is LeaseKind.UNSPECIFIED:
        return Rejection(Refusal.MALFORMED, "the microbatch has no kind")
    if header.key.kind is LeaseKind.TRAIN and not (
        math.isfinite(header.loss_denominator) and header.loss_denominator > 0
    ):
        return Rejection(Refusal.MALFORMED, "the loss denominator is not a positive number")
    return None
