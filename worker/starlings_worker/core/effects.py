"""What the worker's core asks its shell to do. Imperative; each effect's outcome comes back as an event.

At most one of the device effects (Load, ComputeForward, ComputeBackward, ReducePart, Assemble, ApplyStep, AdoptState,
DigestState) is outstanding at a time: the core owns the device's queue, so that backward work goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.messages import (
    Assignment,
    ExchangeGroup,
    ExchangeHeader,
    ExchangePurpose,
    MicrobatchHeader,
    MicrobatchKey,
    ToCoordinator,
    WorkerId,
)
from starlings_worker.core.events import Direction, Leg


@dataclass(frozen=True, slots=True)
class SendControl:
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class SendMicrobatch:
    """FORWARD: the output of the last ComputeForward of `header.key` (or, for a re-send, the same output again).

    BACKWARD: the gradient at this worker's entry. -> MicrobatchSent | MicrobatchNotSent
    """

    direction: Direction
    header: MicrobatchHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendPart:
    """CONTRIBUTION: this worker's encoded part `header.part`. AGGREGATE: the encoded result of ReducePart.

    -> PartSent | PartNotSent
    """

    leg: Leg
    header: ExchangeHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Load:
    """Device effect. Fetch the span's blocks at the assignment's version from its donors. -> SpanLoaded | LoadFailed"""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class UpdatePeers:
    """Same span and weights as before under a newer plan: only peers, slots and the signature changed."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class ComputeForward:
    """Device effect. Stages first..last on the microbatch kept under `key`. -> ForwardComputed | ComputeFailed"""

    key: MicrobatchKey
    first_stage: int
    last_stage: int
    loss_denominator: float


@dataclass(frozen=True, slots=True)
class ComputeBackward:
    """Device effect. Adds to the gradient accumulators of the stages the forward ran. -> BackwardComputed | ComputeFailed"""

    key: MicrobatchKey


@dataclass(frozen=True, slots=True)
class ForgetMicrobatch:
    """Free every tensor kept under `key`."""

    key: MicrobatchKey


@dataclass(frozen=True, slots=True)
class ClearGradients:
    """Zero all accumulators and drop every exchange buffer of (step, < attempt); codec state returns to the last commit."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class OpenExchange:
    """Prepare a group's vector for exchange: `part` is this worker's own; contributions to the others can be sent after it.

    For a group of one, no bytes are made: Assemble follows at once.
    """

    step: int
    attempt: int
    group: ExchangeGroup
    purpose: ExchangePurpose
    part: int


@dataclass(frozen=True, slots=True)
class ReducePart:
    """Device effect. All members of positive weight have contributed to this worker's part: weighted sum, then encode.

    -> PartReduced | ExchangeRefused
    """

    step: int
    attempt: int
    group: str


@dataclass(frozen=True, slots=True)
class Assemble:
    """Device effect. Every part's aggregate is here: decode them all into the group's vector. -> AggregateAssembled | ExchangeRefused"""

    step: int
    attempt: int
    group: str


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Device effect. Clip, apply the optimizer, zero the accumulators, commit codec state; copy the state when `snapshot`.

    -> StepApplied
    """

    step: int
    learning_rate: float
    clip_factor: float
    snapshot: bool


@dataclass(frozen=True, slots=True)
class AdoptState:
    """Device effect after a STATE exchange: the assembled vector becomes parameters and optimizer state. -> StateDigested"""

    version: int


@dataclass(frozen=True, slots=True)
class DigestState:
    """Device effect. SHA-256 of each block's parameters and optimizer state; keep a copy when `snapshot`. -> StateDigested"""

    version: int
    snapshot: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Training is over for this worker. `done`: the job ended well."""

    done: bool
    reason: str


Effect = (
    SendControl
    | SendMicrobatch
    | SendPart
    | Load
    | UpdatePeers
    | ComputeForward
    | ComputeBackward
    | ForgetMicrobatch
    | ClearGradients
    | OpenExchange
    | ReducePart
    | Assemble
    | ApplyStep
    | AdoptState
    | DigestState
    | Stop
)
