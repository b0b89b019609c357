"""Who may come in: the three answers to a peer's push, the slots, and the checks of a microbatch's header.

Slots against deadlock (design section 6). A microbatch holds one slot of every worker on its route until its
backward pass has gone by, and needs a further slot at the next worker, so workers could wait for each other in
a circle. They do not. Microbatches enter and leave only at *boundaries*: where some worker's span of the plan
begins or ends. Entering at stage s leaves one slot free for each boundary deeper in the span. Take the deepest
boundary t that somebody waits to enter. Whoever entered a worker at t or deeper waits for nothing, and those
that entered above t left a slot for t. So some holder of t has room, or will have. That needs a slot for each
way into the span. A worker with fewer keeps nothing free but lets microbatches out only at its span's end: then
none of its guests waits for a stage that it holds itself, and the same argument goes through.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
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


def boundaries_of(spans: Iterable[Span], stage_count: int) -> frozenset[int]:
    """Stages before which a microbatch may change workers: where a span begins, or the stage after its end."""
    begins = {span.first_stage for span in spans if span.first_stage > 0}
    ends = {span.last_stage + 1 for span in spans if span.last_stage + 1 < stage_count}
    return frozenset(begins | ends)


def inner_entries(span: Span, boundaries: Collection[int] | None = None) -> list[int]:
    """Stages of `span` after its first at which microbatches may enter; without `boundaries` all of them."""
    inner = range(span.first_stage + 1, span.last_stage + 1)
    return [stage for stage in inner if boundaries is None or stage in boundaries]


def early_exits(slots: int, span: Span, boundaries: Collection[int] | None = None) -> bool:
    """Whether microbatches may leave inside the span: only with a slot for each way in."""
    return slots > len(inner_entries(span, boundaries))


def reserved_slots(
    slots: int, span: Span, entry_stage: int, boundaries: Collection[int] | None = None
) -> int:
    """Slots that entering at `entry_stage` must leave free for work already admitted elsewhere."""
    entries = inner_entries(span, boundaries)
    return sum(stage > entry_stage for stage in entries) if slots > len(entries) else 0


def may_enter(
    slots: int, held: int, span: Span, entry_stage: int, boundaries: Collection[int] | None = None
) -> bool:
    """Whether one more microbatch may enter at `entry_stage` while `held` are here."""
    return slots - held >= 1 + reserved_slots(slots, span, entry_stage, boundaries)


def lease_room(slots: int, held: int, span: Span, boundaries: Collection[int] | None = None) -> int:
    """How many microbatches could enter at the span's first stage now."""
    return max(0, slots - held - reserved_slots(slots, span, span.first_stage, boundaries))


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
