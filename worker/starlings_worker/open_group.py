"""What is kept of one group of one exchange in progress: the vector, and what each pass sums up."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from starlings_compression.codec import Codec
from starlings_compression.linear import LinearRounds
from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangePurpose, WorkerId
from starlings_worker.core.events import Leg
from starlings_worker.digest import Fingerprint
from starlings_worker.flat import FlatVector
from starlings_worker.wire import Buffer

# (leg, step, attempt, group, pass, part, sender)
ArrivedKey = tuple[Leg, int, int, str, int, int, WorkerId]


class RefusedPart(Exception):
    """Something in an exchange was malformed or not finite; `culprit` sent it."""

    def __init__(self, culprit: WorkerId, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


@dataclass(slots=True)
class Pass:
    """What is summed up at once. `values` is this worker's summand until the sum is assembled in its place."""

    values: Tensor
    bounds: tuple[tuple[int, int], ...]
    # This worker's encoded parts by part number, and its encoded aggregate of its own part.
    contributions: dict[int, Buffer] = field(default_factory=dict)
    # What it adds to its own part, where that is not encoded first.
    own_summand: Tensor | None = None
    aggregate: Buffer | None = None
    # Elements of the own part, counted from its beginning, that hold what the aggregate decodes to already.
    placed: range = range(0)


@dataclass(slots=True)
class OpenGroup:
    """One group of one exchange in progress."""

    group: ExchangeGroup
    purpose: ExchangePurpose
    own: int
    vector: Tensor
    # In which contributions and aggregates travel.
    codecs: dict[Leg, Codec]
    # Where the vector's factors are summed up in two passes.
    rounds: LinearRounds | None = None
    passes: list[Pass] = field(default_factory=list)
    # Of what the vector becomes, piece by piece as it is written; None where that is not the sum itself.
    result: Fingerprint | None = None

    @property
    def present(self) -> Pass:
        return self.passes[-1]

    @property
    def contributes(self) -> bool:
        return self.group.members[self.own].weight > 0.0

    @property
    def adds_own_as_it_is(self) -> bool:
        """Whether what this worker adds to its own part goes into the sum as it is: it does not travel, so a codec
        would cost time, and a lossy one precision, for nothing. Not so where few values are kept: the sum travels as
        the union of the contributions' places, and all places of one of them would crowd out the rest. Nor of factors,
        which are few: what is not finite is best found before anybody multiplies by it.
        """
        codec = self.codecs[Leg.CONTRIBUTION]
        return self.contributes and codec.spec.reducer is None and self.rounds is None


def arrived_key(leg: Leg, header: ExchangeHeader, sender: WorkerId) -> ArrivedKey:
    return (leg, header.step, header.attempt, header.group, header.pass_number, header.part, sender)


def rounds_of(vectors: Mapping[str, FlatVector], rank: int) -> dict[str, LinearRounds]:
    """For every group that has matrices; the others' vectors are summed up as they are."""
    rounds = {
        group: LinearRounds(
            rank,
            [slot.shape for slot in vector.slots],
            vector.gradient.device,
            seed=zlib.crc32(group.encode()),
        )
        for group, vector in vectors.items()
    }
    return {group: linear for group, linear in rounds.items() if linear.reduces}
