"""Members of one group whose exchanges go through memory instead of a network."""

from __future__ import annotations

import itertools

import torch

from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangeMember, ExchangePurpose, WorkerId
from starlings_worker.core.events import Leg
from starlings_worker.exchange import ExchangeBuffers
from starlings_worker.flat import Entry, FlatVector, keeps

GROUP = "stage:0"


class Swarm:
    """Members of one group, and an exchange among them without a network."""

    def __init__(
        self,
        sizes: list[int] | list[tuple[int, ...]],
        count: int,
        codec: str,
        state_names: tuple[str, ...] = (),
    ) -> None:
        """`sizes`: of the tensors in the vector, or their shapes."""
        self.ids = [WorkerId(f"w{i}") for i in range(count)]
        shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
        entries = [Entry("layers.0", f"p{i}", shape) for i, shape in enumerate(shapes)]
        self.vectors = [
            FlatVector(GROUP, entries, keeps(*state_names), torch.device("cpu")) for _ in self.ids
        ]
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

    def contribute(self, group: ExchangeGroup, step: int = 0, attempt: int = 0, pass_number: int = 0) -> None:
        for sender, member in enumerate(group.members):
            for part, owner in enumerate(group.members):
                if part == sender or member.weight <= 0 or owner.share <= 0:
                    continue
                header = ExchangeHeader(step, attempt, GROUP, part, 1, pass_number)
                sent = self.buffers[sender].outgoing(Leg.CONTRIBUTION, header)
                assert sent is not None
                self.buffers[part].keep(Leg.CONTRIBUTION, header, member.worker_id, bytes(sent[2]))

    def aggregate(
        self, group: ExchangeGroup, step: int = 0, attempt: int = 0, pass_number: int = 0
    ) -> list[tuple[int, float] | None]:
        """What each member assembled; None of all of them: another pass follows."""
        for part, owner in enumerate(group.members):
            if owner.share <= 0:
                continue
            self.buffers[part].reduce(step, attempt, GROUP)
            header = ExchangeHeader(step, attempt, GROUP, part, 1, pass_number)
            sent = self.buffers[part].outgoing(Leg.AGGREGATE, header)
            assert sent is not None
            for receiver, buffers in enumerate(self.buffers):
                if receiver != part:
                    buffers.keep(Leg.AGGREGATE, header, owner.worker_id, bytes(sent[2]))
        return [b.assemble(step, attempt, GROUP) for b in self.buffers]

    def exchange(
        self, weights: list[float], shares: list[float], step: int = 0, attempt: int = 0
    ) -> list[tuple[int, float]]:
        """A whole exchange, in as many passes as its codec needs."""
        group = self.group(weights, shares)
        self.open(group, step, attempt)
        if len(group.members) == 1:
            return [_ended(b.assemble(step, attempt, GROUP)) for b in self.buffers]
        for number in itertools.count():
            self.contribute(group, step, attempt, number)
            results = self.aggregate(group, step, attempt, number)
            if results[0] is not None:
                return [_ended(result) for result in results]
            assert not any(results)
        raise AssertionError

    def owed(self) -> torch.Tensor:
        """All that codecs have dropped on any member and still owe, as a vector in float64."""
        owed = torch.zeros(self.vectors[0].size, dtype=torch.float64)
        for buffers in self.buffers:
            for _, (begin, end), residual in buffers.owed():
                owed[begin:end] += residual.double()
        return owed

    def commit(self, step: int) -> None:
        for buffers in self.buffers:
            buffers.commit(step)


def _ended(result: tuple[int, float] | None) -> tuple[int, float]:
    assert result is not None, "another pass follows"
    return result
