"""What people see of a job, as frozen records that mirror control.proto: made by the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlings_protos.messages import GossipPeer, Span, Stage, WorkerId
from starlings_protos.pair_messages import RoundOutcome


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class LossPoint:
    step: int
    tokens: int
    loss: float
    at_s: float


@dataclass(frozen=True, slots=True)
class LiveEvaluation:
    step: int
    tokens: int
    loss: float
    average_loss: float
    has_average: bool
    worker_id: WorkerId
    at_s: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker_id: WorkerId
    device: str
    device_class: str
    state: str
    reason: str
    span: Span | None
    gossip_peers: tuple[GossipPeer, ...]
    tokens: int
    tokens_per_second: float
    bytes_sent: Mapping[str, int]
    seconds: Mapping[str, float]
    memory_bytes: int
    planned_memory_bytes: int
    inner_steps: int = 0
    staleness: float = 0.0
    staleness_most: int = 0
    gradients_stale: int = 0
    reach: str = ""
    relays: tuple[str, ...] = ()
    suspect: bool = False
    pace: str = ""
    slowdown: float = 0.0
    cause: str = ""
    capacity_tokens_per_second: float = 0.0
    uplink_bytes_per_s: float = 0.0
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaRounds:
    worker_id: WorkerId
    averaged: int
    alone: int
    alone_in_a_row: int
    one_sided: int
    suspect: bool
    last: RoundOutcome | None = None


@dataclass(frozen=True, slots=True)
class StageExchanges:
    stage: int
    slot: int
    slot_length_s: float
    warmup: bool
    rounds_averaged: int
    rounds_one_sided: int
    reports_unexpected: int
    far_interval_slots: int
    replicas: tuple[ReplicaRounds, ...] = ()
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BusHealth:
    url: str
    connected: bool
    for_s: float
    reason: str
    dropped: int


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str
    since_s: float
    settling: bool


@dataclass(frozen=True, slots=True)
class Quarantined:
    samples: tuple[int, ...]
    workers: tuple[WorkerId, ...]
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Because:
    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class WhyReply:
    worker_id: WorkerId
    state: str
    because: tuple[Because, ...]


@dataclass(frozen=True, slots=True)
class CommandReply:
    changed: bool
    text: str
    phase: str = ""


@dataclass(frozen=True, slots=True)
class StatusReply:
    job: str
    phase: str
    waiting_for: str
    step: int
    steps_total: int
    tokens: int
    tokens_total: int
    tokens_per_second: float
    loss: float
    validation_loss: float
    has_validation_loss: bool
    workers: tuple[WorkerStatus, ...]
    stages: tuple[Stage, ...]
    plan_version: int
    events: tuple[Event, ...]
    loss_curve: tuple[LossPoint, ...]
    samples_leased: int
    samples_trained: int
    samples_lost: int
    checkpoint: str
    checkpoint_trouble: str
    elapsed_s: float
    failure: str
    dropped_messages: int
    step_microbatches: int = 0
    step_microbatches_done: int = 0
    samples_repeated: int = 0
    samples_unmerged: int = 0
    exchanges: tuple[StageExchanges, ...] = ()
    evaluations: tuple[LiveEvaluation, ...] = ()
    pause: Pause | None = None
    quarantined: tuple[Quarantined, ...] = ()
    # The shell decodes it from the generated tokens: the pure core leaves it empty.
    sample_text: str = ""
    # The shell's as well.
    bus: BusHealth | None = None
