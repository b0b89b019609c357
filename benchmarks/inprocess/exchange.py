"""A group's exchange among buffers in one process: what `starlings_worker.core.exchange` orders, without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangeMember, ExchangePurpose, WorkerId
from starlings_worker.core.events import Leg
from starlings_worker.exchange import ExchangeBuffers

# Low-rank codecs sum up factors in two passes; all others take one.
_PASSES_MOST = 2


@dataclass(frozen=True, slots=True)
class Exchanged:
    """squared_norm: of the vector that everybody has now. sent_bytes: by all members together."""

    squared_norm: float
    sent_bytes: int


def equal_members(group: str, members: Sequence[WorkerId], weight: float = 1.0) -> ExchangeGroup:
    """All with the same weight, and with parts of one size."""
    return ExchangeGroup(
        group, tuple(ExchangeMember(member, weight, 1.0 / len(members)) for member in members)
    )


def exchange(
    buffers: Mapping[WorkerId, ExchangeBuffers],
    group: ExchangeGroup,
    step: int,
    purpose: ExchangePurpose = ExchangePurpose.GRADIENT,
) -> Exchanged:
    """One round of `group`, from opening it to the assembled vectors; `commit` and `adopt` are the caller's.

    Raises:
        RefusedPart: as in the real thing, a vector is not finite, or a part malformed.
        AssertionError: members hold different bits afterwards.
    """
    members = [member.worker_id for member in group.members]
    for own, member in enumerate(members):
        buffers[member].open(step, 0, group, purpose, own)
    sent_bytes = 0
    for number in range(_PASSES_MOST):
        parts = range(len(members))
        if len(members) > 1:
            sent_bytes += sum(
                _hand_over(
                    buffers, Leg.CONTRIBUTION, _header(step, group, part, number), sender, [members[part]]
                )
                for sender in members
                for part in parts
                if members[part] != sender
            )
            for member in members:
                buffers[member].reduce(step, 0, group.group)
            sent_bytes += sum(
                _hand_over(buffers, Leg.AGGREGATE, _header(step, group, part, number), owner, members)
                for part, owner in enumerate(members)
            )
        outcomes = [buffers[member].assemble(step, 0, group.group) for member in members]
        if None in outcomes:
            continue
        assert len(set(outcomes)) == 1, f"members of {group.group} hold different vectors after step {step}"
        return Exchanged(outcomes[0][1], sent_bytes)
    raise AssertionError(f"the exchange of {group.group} has no end")


def _header(step: int, group: ExchangeGroup, part: int, number: int) -> ExchangeHeader:
    return ExchangeHeader(step, 0, group.group, part, 0, number)


def _hand_over(
    buffers: Mapping[WorkerId, ExchangeBuffers],
    leg: Leg,
    header: ExchangeHeader,
    sender: WorkerId,
    receivers: Sequence[WorkerId],
) -> int:
    """Gives one part to each of `receivers` but the sender itself; returns the bytes that would have travelled."""
    found = buffers[sender].outgoing(leg, header)
    if found is None:
        return 0
    codec, _, data = found
    sent_bytes = 0
    for receiver in receivers:
        if receiver == sender:
            continue
        assert buffers[receiver].takes(leg, codec), f"{codec} is not what {receiver} takes"
        buffers[receiver].keep(leg, header, sender, data)
        sent_bytes += memoryview(data).nbytes
    return sent_bytes
