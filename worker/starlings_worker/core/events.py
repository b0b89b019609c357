"""What can happen to a worker. Past tense; every event is a frozen record.

Tensors never enter the core: the shell keeps them under keys and the core says what to do with them (see
effects.py).

What the shell keeps, under which key, and until when
- *A microbatch*, under its `MicrobatchKey`: the records (from a LeaseGrant or from the previous hop), the
  boundary input, the output of ComputeForward together with its graph, the gradient from the next hop, and
  the gradient at this worker's entry. All of it until ForgetMicrobatch(key). That never comes while the
  device works on the key; it may come while a transfer out runs, and then the shell either finishes the
  transfer or breaks it off.
- *A part of an exchange*, under (leg, step, attempt, group, pass, part, sender): what PartArrived announced; plus
  this worker's own encoded contributions and its encoded aggregate of each pass, so that a second SendPart of an
  equal header sends equal bytes. Until ForgetPart, ClearGradients of a higher attempt, ApplyStep of that step,
  AdoptState, or the next Load.
- *A swap's payloads*, under their PairKey: see pairing/work.py, which has the events of exchanges in pairs.

Order of a transfer in: header read -> `WorkerCore.admit(direction, header, sender, now_s)` or
`admit_part(leg, header, sender, now_s)`. A `Receipt` means: admitted, room is reserved, read the body, then
report MicrobatchArrived or PartArrived with the very same header, or ArrivalAborted / PartAborted when the
transfer breaks off, is malformed or times out: exactly one of the two, always. `Duplicate(receipt)` means:
held already; answer with the receipt (success), do not read the body, report nothing. `Rejection` means:
answer with its refusal and report nothing. The receipt is sent after the body was read; the core never looks
at that moment.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlings_protos.messages import (
    ExchangeHeader,
    MicrobatchHeader,
    MicrobatchKey,
    Receipt,
    Refusal,
    ToWorker,
    WorkerId,
)
from starlings_worker.core.groups.work import GroupNetworkEvent, GroupWorked
from starlings_worker.core.pairing.work import PairDeviceOutcome, PairNetworkEvent


class Direction(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Leg(enum.Enum):
    CONTRIBUTION = "contribution"
    AGGREGATE = "aggregate"


@dataclass(frozen=True, slots=True)
class ControlReceived:
    """A message of the control stream.

    For a LeaseGrant the shell first stores each lease's records under the lease's key, unless it has records
    there already.
    """

    message: ToWorker


@dataclass(frozen=True, slots=True)
class ControlLost:
    """The control stream is down: the core holds its messages back (bounded)."""


@dataclass(frozen=True, slots=True)
class ControlRestored:
    """The control stream is up (also the first time):

    the core sends what waited and repeats what may have been lost.
    """


@dataclass(frozen=True, slots=True)
class MicrobatchArrived:
    """A transfer that `admit` accepted is complete: its tensors are under `header.key`."""

    direction: Direction
    header: MicrobatchHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class ArrivalAborted:
    """A transfer that `admit` accepted broke off; the shell kept nothing of it. Frees the reserved slot."""

    direction: Direction
    header: MicrobatchHeader
    sender: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A contribution for a part that this worker owns, or an owner's aggregate, is complete and kept by the
    shell.
    """

    leg: Leg
    header: ExchangeHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class PartAborted:
    """A part that `admit_part` accepted broke off; the shell kept nothing of it."""

    leg: Leg
    header: ExchangeHeader
    sender: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class SpanLoaded:
    """Outcome of Load.

    The assignment's blocks are on the device, accumulators are zero, codec state is fresh.
    """

    plan_version: int
    version: int
    block_digests: Mapping[str, str]
    # By held stage, how many steps the optimizer has made whose state was loaded; without one, as many as `version`.
    optimizer_steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Outcome of Load; the device holds nothing.

    The core tries again a few times, later and later, then stops.
    """

    plan_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardComputed:
    """Outcome of ComputeForward.

    The last three are meaningful when the run ended in the model's last stage.
    """

    key: MicrobatchKey
    seconds: float
    loss_sum: float = 0.0
    target_count: int = 0
    next_token: int = 0


@dataclass(frozen=True, slots=True)
class BackwardComputed:
    """Outcome of ComputeBackward:

    the gradients are in the accumulators; the graph is gone, the entry gradient is kept.
    """

    key: MicrobatchKey
    seconds: float


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """Outcome of ComputeForward or ComputeBackward that raised, e.g. out of memory or a non-finite loss.

    `out_of_memory`: and nothing smaller can be tried.
    """

    key: MicrobatchKey
    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class GradientsCleared:
    """Outcome of ClearGradients."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ExchangePrepared:
    """Outcome of OpenExchange: the group's vector is flat, contributions can be encoded and sent. And of Assemble,
    where the codec sums up once more: those of the next pass can be.
    """

    step: int
    attempt: int
    group: str
    pass_number: int = 0


@dataclass(frozen=True, slots=True)
class PartReduced:
    """Outcome of ReducePart: this worker's part is summed and encoded and ready to be sent."""

    step: int
    attempt: int
    group: str
    pass_number: int = 0


@dataclass(frozen=True, slots=True)
class AggregateAssembled:
    """Outcome of Assemble: all parts are decoded into the group's gradient (or state) vector."""

    step: int
    attempt: int
    group: str
    digest: int
    squared_norm: float


@dataclass(frozen=True, slots=True)
class ExchangeRefused:
    """Outcome of OpenExchange, ReducePart or Assemble that failed: something was malformed or non-finite;
    names the culprit.

    The culprit is this worker itself when its own vector or codec failed.
    """

    step: int
    attempt: int
    group: str
    culprit: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class StepApplied:
    """Outcome of ApplyStep: the weights are now version step + 1, the accumulators are zero."""

    step: int


@dataclass(frozen=True, slots=True)
class StagesStepped:
    """Outcome of StepStages: per stage the norm of its gradient before clipping; not finite where it was dropped."""

    stages: tuple[int, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """Outcome of Settle."""

    version: int


@dataclass(frozen=True, slots=True)
class StepReplayed:
    """Outcome of ReplayStep: the weights are now version step + 1. `digests`: of each group's aggregate, as in
    PreparedGroup.
    """

    step: int
    digests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReplayFailed:
    """Outcome of ReplayStep: no donor has the step's update (any more), or what they have is malformed. The weights are
    still version `step`.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateDigested:
    """Outcome of DigestState or AdoptState. `left_behind`: as was asked for by `hand_over`, the copy is on the disk."""

    version: int
    block_digests: Mapping[str, str]
    left_behind: bool = False


@dataclass(frozen=True, slots=True)
class MicrobatchSent:
    """Outcome of SendMicrobatch: the receiver has all of it (or said that it had it before)."""

    direction: Direction
    key: MicrobatchKey
    to: WorkerId
    receipt: Receipt = field(default_factory=Receipt)


@dataclass(frozen=True, slots=True)
class MicrobatchNotSent:
    """Outcome of SendMicrobatch.

    `certain`: the receiver surely did not take it: it refused (`refusal` says how), or no connection was
    made. Then another peer may get it. Otherwise the connection broke after the first byte, and the receiver
    may hold it: then only the same receiver is asked again, because a second copy there is recognised by its
    key.
    """

    direction: Direction
    key: MicrobatchKey
    to: WorkerId
    certain: bool
    refusal: Refusal = Refusal.UNSPECIFIED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PartSent:
    """Outcome of SendPart."""

    leg: Leg
    header: ExchangeHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class PartNotSent:
    """Outcome of SendPart. Equal parts may be sent twice: the receiver keeps the first."""

    leg: Leg
    header: ExchangeHeader
    to: WorkerId
    refusal: Refusal = Refusal.UNSPECIFIED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    reason: str
    within_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Comes a few times a second, and soon after `WorkerCore.wake_at_s` if that is earlier; retries are
    looked at then.
    """


Event = (
    ControlReceived
    | ControlLost
    | ControlRestored
    | MicrobatchArrived
    | ArrivalAborted
    | PartArrived
    | PartAborted
    | SpanLoaded
    | LoadFailed
    | ForwardComputed
    | BackwardComputed
    | ComputeFailed
    | GradientsCleared
    | ExchangePrepared
    | PartReduced
    | AggregateAssembled
    | ExchangeRefused
    | StepApplied
    | StagesStepped
    | Settled
    | StepReplayed
    | ReplayFailed
    | StateDigested
    | MicrobatchSent
    | MicrobatchNotSent
    | PartSent
    | PartNotSent
    | DrainRequested
    | Ticked
    | PairDeviceOutcome
    | PairNetworkEvent
    | GroupWorked
    | GroupNetworkEvent
)
