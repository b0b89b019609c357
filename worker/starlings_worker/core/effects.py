"""What the worker's core asks its shell to do. Imperative; each effect's outcome comes back as an event.

*Device effects* (Load, ClearGradients, ComputeForward, ComputeBackward, OpenExchange, ReducePart, Assemble,
ApplyStep, StepStages, TakeCopy, Settle, ReplayStep, AdoptState, DigestState, GroupWork, those of pairing/work.py) touch
the weights, the accumulators or a graph. At most one of them is outstanding at a time, and each has exactly one outcome
event: the core owns the device's queue, so that backward work goes first. The other effects are done at once, in the
order of the returned tuple. Sends run beside the device; each has exactly one outcome event, whatever becomes of its
key meanwhile (but for those that ForgetPair breaks off).

What the shell keeps under which key is said in events.py.
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
    StateReport,
    ToCoordinator,
    WorkerId,
)
from starlings_worker.core.events import Direction, Leg
from starlings_worker.core.groups.work import GroupNetworkEffect, GroupWork
from starlings_worker.core.pairing.work import PairDeviceEffect, PairNetworkEffect


@dataclass(frozen=True, slots=True)
class SendControl:
    """On the control stream, in order. No outcome; after ControlLost none comes until ControlRestored."""

    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class SendMicrobatch:
    """-> MicrobatchSent | MicrobatchNotSent

    FORWARD: "records" and the output ("hidden") of the ComputeForward of `header.key`. BACKWARD: the
    "gradient" at this worker's entry. A re-send has the same key, perhaps another receiver: the same tensors
    again. When the key was forgotten meanwhile, the shell may break the transfer off (MicrobatchNotSent) or
    finish it.
    """

    direction: Direction
    header: MicrobatchHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendPart:
    """-> PartSent | PartNotSent

    CONTRIBUTION: this worker's own part number `header.part` of the group's vector, encoded, to the part's
    owner. AGGREGATE: the encoded result of ReducePart, to a member. A part may have no elements (a small
    vector among many members): it travels as an empty tensor. A second SendPart of an equal header sends
    equal bytes: encode once, also for error feedback's sake.
    """

    leg: Leg
    header: ExchangeHeader
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Load:
    """Device effect. -> SpanLoaded | LoadFailed

    Drop the old span, every microbatch, part and snapshot; fetch the span's blocks at the assignment's
    version from its donors. The data plane serves under the new assignment's signature from now on.
    """

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class UpdatePeers:
    """Same span and weights as before under a newer plan:

    only peers, slots and the signature changed. No outcome.
    """

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class ComputeForward:
    """Device effect. -> ForwardComputed | ComputeFailed

    Stages first..last on what is kept under `key`: the records when `first_stage` is 0, else the boundary
    input. TRAIN keeps the graph (or what recomputation needs); in the model's last stage it computes loss_sum
    / loss_denominator. EVALUATE and GENERATE keep no graph.
    """

    key: MicrobatchKey
    first_stage: int
    last_stage: int
    loss_denominator: float


@dataclass(frozen=True, slots=True)
class ComputeBackward:
    """Device effect. -> BackwardComputed | ComputeFailed

    Back through what ComputeForward ran, from its loss or from the arrived gradient; adds to the accumulators
    of those stages, but for `unadded_stages`, which only pass the gradient on.
    """

    key: MicrobatchKey
    unadded_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetMicrobatch:
    """Free every tensor kept under `key`, if there is any. Never comes while the device works on `key`."""

    key: MicrobatchKey


@dataclass(frozen=True, slots=True)
class ForgetPart:
    """Free one arrived part that nobody needs, if it is there."""

    leg: Leg
    header: ExchangeHeader
    sender: WorkerId


@dataclass(frozen=True, slots=True)
class ClearGradients:
    """Device effect. -> GradientsCleared

    Zero all accumulators; drop the flat vectors and every exchange part of an attempt of `step` below
    `attempt`; codec state returns to what it was after the last ApplyStep.
    """

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class OpenExchange:
    """Device effect. -> ExchangePrepared | ExchangeRefused

    Bring a group's vector into exchange form: gradients (with the job's codec and error feedback), or for
    purpose STATE the parameters and optimizer state (exact). `part` is this worker's own position among the
    members. A group of one makes no bytes: Assemble follows and the vector is its own aggregate.
    """

    step: int
    attempt: int
    group: ExchangeGroup
    purpose: ExchangePurpose
    part: int


@dataclass(frozen=True, slots=True)
class ReducePart:
    """Device effect. -> PartReduced | ExchangeRefused

    All members of positive weight have contributed to this worker's part in this pass: weighted sum in the members'
    order (its own contribution passes through the codec like the others), then encode.
    """

    step: int
    attempt: int
    group: str
    pass_number: int = 0


@dataclass(frozen=True, slots=True)
class Assemble:
    """Device effect. -> AggregateAssembled | ExchangePrepared | ExchangeRefused

    Every part's aggregate of this pass is here (parts of share 0 are empty and have none): decode them all, one's own
    too, into the vector. Where the codec sums up once more, the next pass's contributions are prepared instead: only
    the device knows that. What was made for this pass stays, since others may still need it.
    """

    step: int
    attempt: int
    group: str
    pass_number: int = 0


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Device effect. -> StepApplied

    Multiply the aggregates by `clip_factor`, apply the optimizer, zero the accumulators, drop the step's
    parts, commit codec state; keep a copy of the new state for the keeper when `snapshot`.
    """

    step: int
    learning_rate: float
    clip_factor: float
    snapshot: bool


@dataclass(frozen=True, slots=True)
class StageStep:
    """One stage's part of StepStages. `number` counts the stage's own steps from 1; `clip_limit` is for the norm of its
    gradient, 0 for none.
    """

    stage: int
    number: int
    clip_limit: float
    # palsgd: pulls towards the last average that follow the step.
    pulls: int = 0
    # predict: what passes the stage now comes back so many of its steps later, as it was measured.
    steps_ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class StepStages:
    """Device effect, `async` only. -> StagesStepped

    The inner optimizer of some held stages, each with its own gradient, whose accumulators are zero afterwards. With a
    positive `joint_clip_limit` these are all stages of the model, and the limit is for the norm over all of them
    instead. A gradient that is not finite is dropped, and changes nothing.
    """

    stages: tuple[StageStep, ...]
    learning_rate: float
    joint_clip_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class TakeCopy:
    """Device effect, `async` only. -> StateDigested

    Call the weights as they are now `version`, digest them, and keep a copy to be fetched.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Device effect, `async` only. -> Settled

    Training is over: zero the accumulators, and call the weights as they are now `version`.
    """

    version: int


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """Device effect of an observer. -> StepReplayed | ReplayFailed

    Fetch what every group of the span exchanged in committed step `step` from the assignment's donors (see
    KeepHistory), decode it, and apply the optimizer with exactly these numbers.
    """

    step: int
    learning_rate: float
    clip_factor: float


@dataclass(frozen=True, slots=True)
class KeepHistory:
    """What observers may fetch here from now on. No outcome.

    Keep the snapshots of `versions` beside the newest ones, and from step `updates_from` on, if that is not None, the
    encoded aggregates of each applied step; forget the rest. The bytes kept are bounded: the oldest updates go first.
    """

    versions: tuple[int, ...]
    updates_from: int | None


@dataclass(frozen=True, slots=True)
class AdoptState:
    """Device effect. -> StateDigested

    The assembled vectors of a STATE exchange become parameters and optimizer state; then as DigestState, with
    `snapshot`.
    """

    version: int
    snapshot: bool


@dataclass(frozen=True, slots=True)
class DigestState:
    """Device effect.

    -> StateDigested. SHA-256 of each block's state at `version`; keep a copy for the keeper when `snapshot`: with
    `hand_over` on the disk, for a process that outlives this one.
    """

    version: int
    snapshot: bool
    hand_over: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing more to do for this worker; no effect follows. `done`: the job ended well. Otherwise `reason`
    says why.

    `drained`: the worker asked to leave (or had to) and may go now; that is a success too. `handed_over`: it leaves the
    state that was written by DigestState behind; the report is for whoever serves that to send.
    """

    done: bool
    reason: str
    drained: bool = False
    handed_over: StateReport | None = None


DeviceEffect = (
    Load
    | ClearGradients
    | ComputeForward
    | ComputeBackward
    | OpenExchange
    | ReducePart
    | Assemble
    | ApplyStep
    | StepStages
    | TakeCopy
    | Settle
    | ReplayStep
    | AdoptState
    | DigestState
    | PairDeviceEffect
    | GroupWork
)

Effect = (
    DeviceEffect
    | SendControl
    | SendMicrobatch
    | SendPart
    | UpdatePeers
    | ForgetMicrobatch
    | ForgetPart
    | KeepHistory
    | Stop
    | PairNetworkEffect
    | GroupNetworkEffect
)
