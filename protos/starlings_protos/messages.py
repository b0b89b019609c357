"""The wire's vocabulary as frozen records: what both pure cores speak, without grpc and without torch.

Every class mirrors the protobuf message of the same name field by field (tests hold them together), and
`convert.py` translates. The .proto files explain the fields; comments here add only what a type cannot say. Exchanges
in pairs and groups have `pair_messages.py` and `group_messages.py`, `async` has `stream_messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlings_protos.group_messages import (
    GroupClosed,
    GroupDecided,
    GroupHeld,
    GroupMatched,
    GroupPrepared,
)
from starlings_protos.pair_messages import PairMatched, RoundOutcome, RoundReady, SlotClock
from starlings_protos.reach_messages import ReachOrder, ReachReport, Routes
from starlings_protos.stream_messages import (
    DrainOrder,
    JobPaused,
    LeasesReturned,
    MicrobatchVoided,
    StageReport,
    SwarmProgress,
    TrainingPaused,
)
from starlings_protos.telemetry import Telemetry
from starlings_protos.vocabulary import KEEPER as KEEPER
from starlings_protos.vocabulary import ExchangePurpose as ExchangePurpose
from starlings_protos.vocabulary import LeaseKind as LeaseKind
from starlings_protos.vocabulary import MicrobatchKey as MicrobatchKey
from starlings_protos.vocabulary import Refusal as Refusal
from starlings_protos.vocabulary import SlowedBy as SlowedBy
from starlings_protos.vocabulary import Span as Span
from starlings_protos.vocabulary import Stage as Stage
from starlings_protos.vocabulary import WorkerId as WorkerId


@dataclass(frozen=True, slots=True)
class Hop:
    worker_id: WorkerId
    first_stage: int
    last_stage: int


@dataclass(frozen=True, slots=True)
class Peer:
    worker_id: WorkerId
    addresses: tuple[str, ...] = ()
    span: Span | None = None
    incarnation: int = 0
    forward_seconds: tuple[float, ...] = ()
    backward_seconds: tuple[float, ...] = ()
    slots: int = 0


@dataclass(frozen=True, slots=True)
class GossipPeer:
    worker_id: WorkerId
    group: str
    weight: float


# ------------------------------------------------------------------ worker -> coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    worker_id: WorkerId
    protocol_min: int
    protocol_max: int
    version: str
    job_digest: str = ""
    numeric_class: str = ""
    host_id: str = ""
    site: str = ""
    region: str = ""
    device: str = ""
    device_class: str = ""
    wall_time_s: float = 0.0
    session_nonce: int = 0
    incarnation: int = 0
    host_name: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    progress: int = 0
    version: int = 0
    busy_s: float = 0.0
    passes: int = 0
    stage_seconds: tuple[float, ...] = ()
    push_s: float = 0.0
    room_s: float = 0.0
    slowed_by: SlowedBy = SlowedBy.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class ProbeReport:
    forward_seconds: Mapping[str, float]
    backward_seconds: Mapping[str, float]
    memory_bytes: int
    addresses: tuple[str, ...] = ()
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    plan_version: int
    version: int
    block_digests: Mapping[str, str]
    aggregate_digests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    count: int


@dataclass(frozen=True, slots=True)
class MicrobatchDone:
    key: MicrobatchKey
    route: tuple[Hop, ...]
    loss_sum: float
    target_count: int
    next_token: int = 0


@dataclass(frozen=True, slots=True)
class MicrobatchFailed:
    key: MicrobatchKey
    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    group: str
    microbatches: tuple[int, ...]
    aggregate_digest: int
    squared_norm: float


@dataclass(frozen=True, slots=True)
class Prepared:
    step: int
    attempt: int
    groups: tuple[PreparedGroup, ...]


@dataclass(frozen=True, slots=True)
class StateReport:
    version: int
    block_digests: Mapping[str, str]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class EngineDown:
    reason: str
    restarting: bool
    at: MicrobatchKey | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    reason: str
    within_s: float


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class ExchangeFailed:
    step: int
    attempt: int
    group: str
    reason: str


ToCoordinator = (
    Hello
    | Heartbeat
    | ProbeReport
    | Ready
    | LeaseRequest
    | MicrobatchDone
    | MicrobatchFailed
    | Prepared
    | StateReport
    | EngineDown
    | Leaving
    | PeerUnreachable
    | ExchangeFailed
    | CatchUpFailed
    | Telemetry
    | StageReport
    | LeasesReturned
    | RoundReady
    | RoundOutcome
    | GroupHeld
    | GroupPrepared
    | ReachReport
)

# ------------------------------------------------------------------ coordinator -> worker


@dataclass(frozen=True, slots=True)
class Welcome:
    protocol: int
    incarnation: int
    job_json: bytes
    job_digest: str
    heartbeat_interval_s: float
    assignment_key_der: bytes
    wall_time_s: float
    profile_json: bytes
    probe_now: bool
    telemetry_interval_s: float = 0.0
    paused: bool = False
    pause_reason: str = ""


@dataclass(frozen=True, slots=True)
class SignedAssignment:
    payload: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class AssignmentClaim:
    job: str
    worker_id: WorkerId
    incarnation: int
    plan_version: int
    # Absent for the keeper.
    span: Span | None
    not_before_s: float
    expires_s: float
    role: str


@dataclass(frozen=True, slots=True)
class Assignment:
    plan_version: int
    stages: tuple[Stage, ...]
    span: Span
    version: int
    donors: tuple[Peer, ...]
    peers: tuple[Peer, ...]
    slots: int
    recompute: bool
    topology: str
    gossip_peers: tuple[GossipPeer, ...]
    seed: int
    step: int
    attempt: int
    tensor_limit_bytes: int
    # The shell signs: the pure core leaves it empty.
    signed: SignedAssignment = SignedAssignment()
    observer: bool = False
    base_plan_version: int = 0


@dataclass(frozen=True, slots=True)
class AssignmentRenewed:
    signed: SignedAssignment


@dataclass(frozen=True, slots=True)
class Lease:
    key: MicrobatchKey
    # Sample ids. GENERATE: the held-out sample whose beginning is the prompt, then the tokens generated so far.
    samples: tuple[int, ...]
    loss_denominator: float
    duration_s: float
    # The shell fills in the samples' bytes: the pure core leaves it empty.
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class StepRestarted:
    step: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExchangeMember:
    worker_id: WorkerId
    weight: float
    share: float


@dataclass(frozen=True, slots=True)
class ExchangeGroup:
    group: str
    members: tuple[ExchangeMember, ...]


@dataclass(frozen=True, slots=True)
class ExchangeOpened:
    step: int
    attempt: int
    groups: tuple[ExchangeGroup, ...]
    deadline_s: float
    purpose: ExchangePurpose = ExchangePurpose.GRADIENT


@dataclass(frozen=True, slots=True)
class StepCommitted:
    step: int
    attempt: int
    learning_rate: float
    clip_factor: float
    gradient_norm: float
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class StateWanted:
    version: int
    snapshot: bool = False
    hand_over: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    done: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    refusal: Refusal
    message: str


@dataclass(frozen=True, slots=True)
class Retain:
    versions: tuple[int, ...] = ()
    updates: bool = False
    updates_from: int = 0


@dataclass(frozen=True, slots=True)
class Standby:
    reason: str


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    wall_time_s: float
    heartbeat_interval_s: float = 0.0


ToWorker = (
    Welcome
    | Assignment
    | AssignmentRenewed
    | LeaseGrant
    | StepRestarted
    | ExchangeOpened
    | StepCommitted
    | StateWanted
    | Finish
    | Refused
    | Standby
    | HeartbeatAck
    | Retain
    | SwarmProgress
    | MicrobatchVoided
    | TrainingPaused
    | JobPaused
    | DrainOrder
    | SlotClock
    | PairMatched
    | GroupMatched
    | GroupClosed
    | GroupDecided
    | ReachOrder
    | Routes
)

# ------------------------------------------------------------------ data plane headers


@dataclass(frozen=True, slots=True)
class MicrobatchHeader:
    key: MicrobatchKey
    stage: int
    route: tuple[Hop, ...]
    loss_denominator: float
    plan_version: int
    loss_sum: float = 0.0
    target_count: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExchangeHeader:
    step: int
    attempt: int
    group: str
    part: int
    plan_version: int
    pass_number: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    queued: int = 0
    free_slots: int = 0
    backlog_seconds: float = 0.0


# ------------------------------------------------------------------ planning


@dataclass(frozen=True, slots=True)
class PlanWorker:
    worker_id: WorkerId
    forward_seconds: Mapping[str, float]
    backward_seconds: Mapping[str, float]
    memory_bytes: int
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    host_id: str = ""
    site: str = ""
    region: str = ""
    held: Span | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    request_id: int
    workers: tuple[PlanWorker, ...]
    seed: int
    microbatch: int
    microbatches_per_step: int
    bytes_per_parameter: float
    stages: tuple[Stage, ...] = ()
    # The shell fills it in: the pure core leaves it empty.
    profile_json: bytes = b""
    stages_most: int = 0
    stages_wanted: int = 0


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    worker_id: WorkerId
    span: Span | None = None
    slots: int = 0
    recompute: bool = False
    memory_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PlanReply:
    request_id: int
    stages: tuple[Stage, ...] = ()
    workers: tuple[PlannedWorker, ...] = ()
    predicted_microbatches_per_s: float = 0.0
    bound_microbatches_per_s: float = 0.0
    binding: str = ""
    impossible: str = ""
