"""A round of exchange as one member sees it: contributions out and in, one part reduced, aggregates out and
in, assembled.

Part j of a group belongs to members[j]. Each member of positive weight sends part j to its owner; the owner
reduces when all those have come, and sends the encoded aggregate to every other member; whoever has the
aggregates of all parts assembles. Parts of share 0 are empty and nobody speaks of them. A group of one
assembles at once. Both legs are idempotent: an equal part may be sent twice, so every failed transfer is
simply repeated until the round's deadline.

A group may need two *passes*: what is assembled in the first decides what is contributed to the second
(`lowrank`). Whether it does, only the device knows: it answers Assemble with ExchangePrepared of the next pass.
Members may be a pass apart, so what was sent in the first is still sent, and taken, during the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starlings_protos.messages import (
    ExchangeGroup,
    ExchangeHeader,
    ExchangeOpened,
    ExchangePurpose,
    PreparedGroup,
    WorkerId,
)
from starlings_worker.core.effects import Assemble, DeviceEffect, Effect, OpenExchange, ReducePart, SendPart
from starlings_worker.core.events import AggregateAssembled, Leg
from starlings_worker.core.parts import PartStore
from starlings_worker.core.timings import WorkerTimings

# Of a gradient's exchange; state is summed up once.
PASSES_MOST = 2


@dataclass(slots=True)
class PartTransfer:
    """One outgoing part. `wanted_at_s` is when to try (again)."""

    leg: Leg
    header: ExchangeHeader
    to: WorkerId
    sending: bool = False
    done: bool = False
    tries: int = 0
    wanted_at_s: float = 0.0


@dataclass(slots=True)
class GroupRound:
    """`reducing`, `reduced` and `assembling` are of the present pass, `transfers` of all."""

    group: ExchangeGroup
    position: int
    opened: bool = False
    pass_number: int = 0
    reducing: bool = False
    reduced: bool = False
    assembling: bool = False
    result: AggregateAssembled | None = None
    transfers: list[PartTransfer] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.group.group

    @property
    def contributors(self) -> list[WorkerId]:
        return [member.worker_id for member in self.group.members if member.weight > 0.0]

    @property
    def owns_part(self) -> bool:
        return self.group.members[self.position].share > 0.0

    def begin_pass(self, pass_number: int) -> None:
        self.pass_number = pass_number
        self.reducing = self.reduced = self.assembling = False

    @property
    def alone(self) -> bool:
        return len(self.group.members) == 1

    def others(self) -> Iterator[tuple[int, WorkerId]]:
        for index, member in enumerate(self.group.members):
            if index != self.position:
                yield index, member.worker_id


class Round:
    """All groups of this worker in one exchange of (step, attempt)."""

    def __init__(
        self,
        worker_id: WorkerId,
        timings: WorkerTimings,
        message: ExchangeOpened,
        plan_version: int,
        parts: PartStore,
        push: Callable[[DeviceEffect], None],
        emit: Callable[[Effect], None],
        now_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._timings = timings
        self._plan_version = plan_version
        self._parts = parts
        self._push = push
        self._emit = emit
        self.step = message.step
        self.attempt = message.attempt
        self.purpose: ExchangePurpose = message.purpose
        patience_s = message.deadline_s if message.deadline_s > 0 else timings.exchange_deadline_s
        self.deadline_at_s = now_s + patience_s
        self.failed = False
        # Set once all members are known to have everything: nothing is sent (again) after that.
        self.closed = False
        self.groups: dict[str, GroupRound] = {}
        for group in message.groups:
            position = next(
                (index for index, member in enumerate(group.members) if member.worker_id == worker_id), None
            )
            if position is not None:
                self.groups[group.group] = GroupRound(group, position)

    @property
    def epoch(self) -> tuple[int, int]:
        return (self.step, self.attempt)

    @property
    def assembled(self) -> bool:
        return all(group.result is not None for group in self.groups.values())

    @property
    def delivered(self) -> bool:
        """Whether every part that others need from this worker has reached them."""
        return all(transfer.done for group in self.groups.values() for transfer in group.transfers)

    def open(self) -> None:
        for group in self.groups.values():
            self._push(OpenExchange(self.step, self.attempt, group.group, self.purpose, group.position))

    # ------------------------------------------------------------------ device outcomes

    def prepared(self, name: str, pass_number: int, now_s: float) -> None:
        """The vector is flat, or what the next pass sums up is: send its parts to their owners."""
        group = self.groups.get(name)
        if group is None:
            return
        if pass_number == 0 and not group.opened:
            group.opened = True
        elif group.assembling and group.result is None and pass_number == group.pass_number + 1:
            group.begin_pass(pass_number)
        else:
            return
        if self._worker_id in group.contributors:
            for index, owner in group.others():
                if group.group.members[index].share > 0.0:
                    self._queue(group, Leg.CONTRIBUTION, index, owner, now_s)
        self.advance(now_s)

    def reduced(self, name: str, now_s: float) -> None:
        group = self.groups.get(name)
        if group is None:
            return
        group.reduced = True
        for _, member in group.others():
            self._queue(group, Leg.AGGREGATE, group.position, member, now_s)
        self.advance(now_s)

    def assembled_group(self, event: AggregateAssembled) -> None:
        group = self.groups.get(event.group)
        if group is not None:
            group.result = event

    def _queue(self, group: GroupRound, leg: Leg, part: int, to: WorkerId, now_s: float) -> None:
        header = ExchangeHeader(
            self.step, self.attempt, group.name, part, self._plan_version, group.pass_number
        )
        group.transfers.append(PartTransfer(leg, header, to, wanted_at_s=now_s))

    # ------------------------------------------------------------------ progress

    def advance(self, now_s: float) -> None:
        """Start what has become possible: reductions, assemblies, transfers that are due."""
        if self.closed:
            return
        for group in self.groups.values():
            if not group.opened:
                continue
            if self._may_reduce(group):
                group.reducing = True
                self._push(ReducePart(self.step, self.attempt, group.name, group.pass_number))
            if not group.assembling and (group.alone or not self._missing_aggregates(group)):
                group.assembling = True
                self._push(Assemble(self.step, self.attempt, group.name, group.pass_number))
            for transfer in group.transfers:
                if not transfer.done and not transfer.sending and transfer.wanted_at_s <= now_s:
                    transfer.sending = True
                    self._emit(SendPart(transfer.leg, transfer.header, transfer.to))

    def _may_reduce(self, group: GroupRound) -> bool:
        if group.alone or not group.owns_part or group.reducing:
            return False
        return not self._missing_contributions(group)

    def _missing_contributions(self, group: GroupRound) -> list[WorkerId]:
        return [
            worker_id
            for worker_id in group.contributors
            if worker_id != self._worker_id
            and not self._here(Leg.CONTRIBUTION, group, group.position, worker_id)
        ]

    def _here(self, leg: Leg, group: GroupRound, part: int, sender: WorkerId) -> bool:
        return self._parts.here(leg, self.epoch, group.name, group.pass_number, part, sender)

    def _missing_aggregates(self, group: GroupRound) -> list[WorkerId]:
        missing = [
            worker_id
            for index, worker_id in group.others()
            if group.group.members[index].share > 0.0
            and not self._here(Leg.AGGREGATE, group, index, worker_id)
        ]
        if group.owns_part and not group.reduced:
            missing.append(self._worker_id)
        return missing

    def sent(self, leg: Leg, header: ExchangeHeader, to: WorkerId) -> None:
        transfer = self._transfer(leg, header, to)
        if transfer is not None:
            transfer.sending = False
            transfer.done = True

    def not_sent(self, leg: Leg, header: ExchangeHeader, to: WorkerId, now_s: float) -> int:
        """Puts the repetition off, later and later. Returns the failures of this transfer so far."""
        transfer = self._transfer(leg, header, to)
        if transfer is None:
            return 0
        transfer.sending = False
        transfer.tries += 1
        timings = self._timings
        transfer.wanted_at_s = now_s + timings.growing(
            timings.retry_first_s, timings.retry_most_s, transfer.tries
        )
        return transfer.tries

    def _transfer(self, leg: Leg, header: ExchangeHeader, to: WorkerId) -> PartTransfer | None:
        group = self.groups.get(header.group)
        for transfer in group.transfers if group is not None else ():
            if (transfer.leg, transfer.header, transfer.to) == (leg, header, to):
                return transfer
        return None

    # ------------------------------------------------------------------ questions

    def expects(self, leg: Leg, header: ExchangeHeader, sender: WorkerId) -> bool:
        """Whether this part has a place in the round."""
        group = self.groups.get(header.group)
        if group is None or sender == self._worker_id or not 0 <= header.part < len(group.group.members):
            return False
        if not 0 <= header.pass_number < (PASSES_MOST if self.purpose is ExchangePurpose.GRADIENT else 1):
            return False
        if leg is Leg.CONTRIBUTION:
            return header.part == group.position and group.owns_part and sender in group.contributors
        owner = group.group.members[header.part]
        return owner.worker_id == sender and owner.share > 0.0

    def waits_for(self) -> tuple[str, str]:
        """For people: the first group that is not complete, and what is missing in all."""
        missing: list[tuple[str, str]] = []
        for name, group in self.groups.items():
            if not group.opened:
                missing.append((name, "its own vector"))
                continue
            if group.owns_part and not group.alone and not group.reduced:
                missing += [
                    (name, f"the contribution of {who}{_of_pass(group)}")
                    for who in self._missing_contributions(group)
                ]
            if group.result is None and not group.alone:
                others = (who for who in self._missing_aggregates(group) if who != self._worker_id)
                missing += [(name, f"the aggregate of {who}{_of_pass(group)}") for who in others]
            missing += [
                (name, f"the receipt of {transfer.to}") for transfer in group.transfers if not transfer.done
            ]
        text = "; ".join(f"{name}: {what}" for name, what in missing[:8]) or "the device"
        return (missing[0][0] if missing else next(iter(self.groups), "")), text

    def results(self, accumulated: dict[int, set[int]]) -> tuple[PreparedGroup, ...]:
        """What Prepared says, sorted by group name. "tied" lists no microbatches: its stages do."""
        prepared = []
        for name in sorted(self.groups):
            result = self.groups[name].result
            assert result is not None
            kind, _, stage = name.partition(":")
            indices = accumulated.get(int(stage), set()) if kind == "stage" else set()
            prepared.append(PreparedGroup(name, tuple(sorted(indices)), result.digest, result.squared_norm))
        return tuple(prepared)

    def wake_at_s(self) -> float | None:
        if self.closed:
            return None
        times = [
            transfer.wanted_at_s
            for group in self.groups.values()
            for transfer in group.transfers
            if not transfer.done and not transfer.sending
        ]
        if not self.failed and not (self.assembled and self.delivered):
            times.append(self.deadline_at_s)
        return min(times, default=None)


def _of_pass(group: GroupRound) -> str:
    return f" in pass {group.pass_number + 1}" if group.pass_number else ""
