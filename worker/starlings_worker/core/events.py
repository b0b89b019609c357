"""What can happen to a worker. Past tense; every event is a frozen record.

Tensors never enter the core: the shell keeps them under the microbatch's key, or under (step, attempt, group, part) for
exchanges, and the core says what to do with them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from starlings_protos.messages import (
    ExchangeHeader,
    MicrobatchHeader,
    MicrobatchKey,
    Receipt,
    ToWorker,
    WorkerId,
)


class Direction(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Leg(enum.Enum):
    CONTRIBUTION = "contribution"
    AGGREGATE = "aggregate"


@dataclass(frozen=True, slots=True)
class ControlReceived:
    """A message of the control stream. The records of a LeaseGrant were stored by the shell under each lease's key."""

    message: ToWorker


@dataclass(frozen=True, slots=True)
class ControlLost:
    pass


@dataclass(frozen=True, slots=True)
class ControlRestored:
    pass


@dataclass(frozen=True, slots=True)
class MicrobatchArrived:
    """A peer pushed a microbatch. The shell asks the core *before* it reads the tensors (see `WorkerCore.admit`)."""

    direction: Direction
    header: MicrobatchHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A contribution for a part that this worker owns, or an owner's aggregate. Its bytes are kept by the shell."""

    leg: Leg
    header: ExchangeHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class SpanLoaded:
    """The assignment's blocks are on the device."""

    plan_version: int
    version: int
    block_digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    plan_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardComputed:
    """`loss_sum`, `target_count` and `next_token` are meaningful when the run ended in the model's last stage."""

    key: MicrobatchKey
    seconds: float
    loss_sum: float = 0.0
    target_count: int = 0
    next_token: int = 0


@dataclass(frozen=True, slots=True)
class BackwardComputed:
    key: MicrobatchKey
    seconds: float


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """A forward or backward raised, e.g. out of memory or a non-finite loss."""

    key: MicrobatchKey
    reason: str


@dataclass(frozen=True, slots=True)
class PartReduced:
    """The owner's aggregate of its part is encoded and ready to be sent."""

    step: int
    attempt: int
    group: str


@dataclass(frozen=True, slots=True)
class AggregateAssembled:
    """All parts of a group are decoded into the group's gradient (or state) vector."""

    step: int
    attempt: int
    group: str
    digest: int
    squared_norm: float


@dataclass(frozen=True, slots=True)
class ExchangeRefused:
    """A contribution or an aggregate was malformed or non-finite; names the culprit."""

    step: int
    attempt: int
    group: str
    culprit: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The optimizer ran; the weights are now version step + 1."""

    step: int


@dataclass(frozen=True, slots=True)
class StateDigested:
    version: int
    block_digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class MicrobatchSent:
    direction: Direction
    key: MicrobatchKey
    to: WorkerId
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class MicrobatchNotSent:
    """`certain`: the receiver surely did not take it (refused, or never connected), so another peer may get it.

    Otherwise the receiver may hold it, and only the coordinator can settle that by a new attempt.
    """

    direction: Direction
    key: MicrobatchKey
    to: WorkerId
    certain: bool
    busy: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PartSent:
    leg: Leg
    header: ExchangeHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class PartNotSent:
    leg: Leg
    header: ExchangeHeader
    to: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    reason: str
    within_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Comes a few times a second; deadlines and retries are looked at then."""


Event = (
    ControlReceived
    | ControlLost
    | ControlRestored
    | MicrobatchArrived
    | PartArrived
    | SpanLoaded
    | LoadFailed
    | ForwardComputed
    | BackwardComputed
    | ComputeFailed
    | PartReduced
    | AggregateAssembled
    | ExchangeRefused
    | StepApplied
    | StateDigested
    | MicrobatchSent
    | MicrobatchNotSent
    | PartSent
    | PartNotSent
    | DrainRequested
    | Ticked
)
