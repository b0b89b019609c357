"""Members of one group whose exchanges go through memory instead of a network."""

from __future__ import annotations

import torch

from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangeMember, ExchangePurpose, WorkerId
from starlings_worker.core.events import Leg
from starlings_worker.exchange import ExchangeBuffers
from starlings_worker.flat import Entry, FlatVector

GROUP = "stage:0"


class Swarm:
    """Members of one group, and an exchange among them without a network."""

    def __init__(self, sizes: list[int], count: int, codec: str, state_names: tuple[str, ...] = ()) -> None:
        self.ids = [WorkerId(f"w{i}") for i in range(count)]
        entries = [Entry("layers.0", f"p{i}", (size,)) for i, size in enumerate(sizes)]
        self.vectors = [FlatVector(GROUP, entries, state_names, torch.device("cpu")) for _ in self.ids]
        self.buffers = [
            ExchangeBuffers(i, codec, {GROUP: v}) for i, v in zip(self.ids, self.vectors, strict=True)
        ]

    def group(self, weights: list[float], shares: list[float]) -> ExchangeGroup:
        members = zip(self.ids, weights, shares, strict=True)
        return ExchangeGroup(GROUP, tuple(ExchangeMember(i, w, s) for i, w, s in members))

    def open(self, group: ExchangeGroup, step: int = 0, attempt: int = 0, state: bool = False) -> None:
        purpose = ExchangePurpose.STATE if state else ExchangePurpose.GRADIENT
        for own, buffers in enumerate(self.buffers):
            buffers.open(step, attempt, group, purpose, own)

    def contribute(self, group: ExchangeGroup, step: int = 0, attempt: int = 0) -> None:
        for sender, member in enumerate(group.members):
            for part, owner in enumerate(group.members):
                if part == sender or member.weight <= 0 or owner.share <= 0:
                    continue
                header = ExchangeHeader(step, attempt, GROUP, part, 1)
                sent = self.buffers[sender].outgoing(Leg.CONTRIBUTION, header)
                assert sent is not None
                self.buffers[part].keep(Leg.CONTRIBUTION, header, member.worker_id, bytes(sent[2]))

    def aggregate(self, group: ExchangeGroup, step: int = 0, attempt: int = 0) -> list[tuple[int, float]]:
        for part, owner in enumerate(group.members):
            if owner.share <= 0:
                continue
            self.buffers[part].reduce(step, attempt, GROUP)
            header = ExchangeHeader(step, attempt, GROUP, part, 1)
            sent = self.buffers[part].outgoing(Leg.AGGREGATE, header)
            assert sent is not None
            for receiver, buffers in enumerate(self.buffers):
                if receiver != part:
                    buffers.keep(Leg.AGGREGATE, header, owner.worker_id, bytes(sent[2]))
        return [b.assemble(step, attempt, GROUP) for b in self.buffers]

    def exchange(self, weights: list[float], shares: list[float], step: int = 0) -> list[tuple[int, float]]:
        group = self.group(weights, shares)
        self.open(group, step)
        if len(group.members) > 1:
            self.contribute(group, step)
            return self.aggregate(group, step)
        return [b.assemble(step, 0, GROUP) for b in self.buffers]
