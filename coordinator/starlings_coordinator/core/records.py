"""What the coordinator writes down before it acts. State is a fold over these; the log is their JSON, one row each.

A record is a fact in the past. In `sync` the samples of a step follow from the job's seed, so one record per
committed step
holds the whole ledger: leases of an open attempt need none, because a restart of the coordinator begins a new attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from starlings_protos.messages import Hello, PlannedWorker, ProbeReport, Span, Stage, WorkerId

RECORD_LIMIT_BYTES = 16 << 20


class RecordError(ValueError):
    """A row of the log that this version cannot read."""


@dataclass(frozen=True, slots=True)
class WorkerAdmitted:
    """A life of a worker began. `incarnation` rises with every engine start and fences what earlier lives
    still send.
    """

    worker_id: WorkerId
    incarnation: int
    device: str
    # What it said of itself; a restarted coordinator knows the life again by its nonce. (None in old logs.)
    hello: Hello | None = None
    kind: Literal["worker_admitted"] = "worker_admitted"


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    """What a life's device was measured to do: nobody is measured again because the coordinator was restarted."""

    worker_id: WorkerId
    incarnation: int
    probe: ProbeReport
    kind: Literal["worker_measured"] = "worker_measured"


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A life was given up, or ended in order. Whoever comes back under the same id begins another."""

    worker_id: WorkerId
    incarnation: int
    reason: str
    kind: Literal["worker_gone"] = "worker_gone"


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """Who holds what from now on. Training goes on with `step`, on weights of version `step`, as attempt `attempt`."""

    plan_version: int
    stages: tuple[Stage, ...]
    spans: tuple[tuple[WorkerId, Span], ...]
    step: int
    attempt: int
    reason: str
    # What the planner gave each worker whose span is new.
    planned: tuple[PlannedWorker, ...] = ()
    # False when every holder has its span already: the plan before goes on with other members.
    loads: bool = True
    kind: Literal["plan_adopted"] = "plan_adopted"


@dataclass(frozen=True, slots=True)
class PlanLoaded:
    """Every holder has its span, replicas agree, and training under this plan begins."""

    plan_version: int
    kind: Literal["plan_loaded"] = "plan_loaded"


@dataclass(frozen=True, slots=True)
class PlanDropped:
    """Some stage has no holder any more: nobody holds anything until another plan is adopted."""

    plan_version: int
    reason: str
    kind: Literal["plan_dropped"] = "plan_dropped"


@dataclass(frozen=True, slots=True)
class StepRetried:
    step: int
    attempt: int
    reason: str
    kind: Literal["step_retried"] = "step_retried"


@dataclass(frozen=True, slots=True)
class StepRecorded:
    """The commit. Written before any worker hears of it; the weights of version step + 1 exist from here on."""

    step: int
    attempt: int
    loss: float
    learning_rate: float
    clip_factor: float
    gradient_norm: float
    tokens: int
    # Samples in the gradient; the step has exactly `batch` of them, or something is wrong with the ledger.
    samples: int
    # Microbatches whose lease each worker held, and stage-microbatches that each worker computed.
    credits: tuple[tuple[WorkerId, int], ...]
    at_s: float
    kind: Literal["step_recorded"] = "step_recorded"


@dataclass(frozen=True, slots=True)
class StreamAdvanced:
    """`async`: what was acknowledged since the record before, for people; the ledger has records of its own."""

    # Acknowledged samples / batch, rounded down.
    step: int
    # Mean over what was acknowledged since.
    loss: float
    # As in StepRecorded.
    credits: tuple[tuple[WorkerId, int], ...]
    at_s: float
    kind: Literal["stream_advanced"] = "stream_advanced"


@dataclass(frozen=True, slots=True)
class SamplesUnmerged:
    """`async`: at most so many acknowledged samples went with the replica of a stage that others hold too."""

    worker_id: WorkerId
    samples: int
    kind: Literal["samples_unmerged"] = "samples_unmerged"


@dataclass(frozen=True, slots=True)
class SamplesRepeated:
    """`async`: at most so many samples of others' were under way through a lost worker, and were sent along another
    way: stages behind it may have added them twice.
    """

    worker_id: WorkerId
    samples: int
    kind: Literal["samples_repeated"] = "samples_repeated"


@dataclass(frozen=True, slots=True)
class ReplicasShared:
    """`async`: up to this total of its tokens, others have what each worker trained. Below zero where it may have
    trained more than it is credited with.
    """

    tokens: tuple[tuple[WorkerId, int], ...]
    kind: Literal["replicas_shared"] = "replicas_shared"


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """`async`: slots of exchanges up to this number may have been spoken of; after it begins whatever has no clock."""

    until: int
    kind: Literal["slots_reserved"] = "slots_reserved"


@dataclass(frozen=True, slots=True)
class CheckpointRecorded:
    version: int
    path: str
    # `async`: at most so many acknowledged samples are not in it, but in other replicas than those that were saved.
    beside: int = 0
    kind: Literal["checkpoint_recorded"] = "checkpoint_recorded"


@dataclass(frozen=True, slots=True)
class StopRecorded:
    """The owner asked for the orderly end."""

    reason: str
    kind: Literal["stop_recorded"] = "stop_recorded"


@dataclass(frozen=True, slots=True)
class PauseRecorded:
    """The owner paused the job: nothing more is leased until ResumeRecorded, whoever is started again."""

    reason: str
    # Seconds since 1970.
    at_s: float
    kind: Literal["pause_recorded"] = "pause_recorded"


@dataclass(frozen=True, slots=True)
class ResumeRecorded:
    kind: Literal["resume_recorded"] = "resume_recorded"


@dataclass(frozen=True, slots=True)
class WorkerEvicted:
    """The owner sent a worker away: it is not let in before `until_s`, seconds since 1970; 0: for good."""

    worker_id: WorkerId
    reason: str
    at_s: float
    until_s: float
    # As it said of itself, for people.
    device: str = ""
    device_class: str = ""
    kind: Literal["worker_evicted"] = "worker_evicted"


@dataclass(frozen=True, slots=True)
class WorkerReadmitted:
    """The time is over, or the owner let it back."""

    worker_id: WorkerId
    kind: Literal["worker_readmitted"] = "worker_readmitted"


@dataclass(frozen=True, slots=True)
class SamplesQuarantined:
    """A microbatch of these samples failed whoever tried it: they are never leased again (quarantine.py)."""

    samples: tuple[int, ...]
    workers: tuple[WorkerId, ...]
    reason: str
    at_s: float
    kind: Literal["samples_quarantined"] = "samples_quarantined"


@dataclass(frozen=True, slots=True)
class EvaluationRecorded:
    version: int
    loss: float
    kind: Literal["evaluation_recorded"] = "evaluation_recorded"


@dataclass(frozen=True, slots=True)
class TextRecorded:
    """The held-out sample whose beginning was the prompt, and the tokens that the model continued it with."""

    version: int
    prompt_sample: int
    tokens: tuple[int, ...]
    kind: Literal["text_recorded"] = "text_recorded"


@dataclass(frozen=True, slots=True)
class JobFinished:
    """`done` for the orderly end, else the job failed and `reason` says why."""

    version: int
    done: bool
    reason: str
    exit_code: int
    kind: Literal["job_finished"] = "job_finished"


# What the lease book of `async` jobs writes down (lease_book.py). A range of samples is (lease, first, end): positions
# in the epoch's order, `end` not included.
LeasedRange = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LiveEvaluated:
    """`async`: held-out losses at `step`, of live weights and, where replicas meet, of the last averages."""

    step: int
    loss: float
    average_loss: float | None
    worker_id: WorkerId
    at_s: float
    kind: Literal["live_evaluated"] = "live_evaluated"


@dataclass(frozen=True, slots=True)
class SampleEpochOpened:
    """From here on the positions 0 to `samples` - 1 of this epoch are there to be leased. `shards`: into how many parts
    its order is cut where data are unequal, else 0.
    """

    epoch: int
    samples: int
    shards: int = 0
    kind: Literal["sample_epoch_opened"] = "sample_epoch_opened"


@dataclass(frozen=True, slots=True)
class LeaseBlockGranted:
    """Written before the worker hears of it. `lease` numbers blocks through the job's life; only this life of the
    worker (`incarnation`) may acknowledge them.
    """

    lease: int
    worker_id: WorkerId
    incarnation: int
    epoch: int
    first: int
    end: int
    kind: Literal["lease_block_granted"] = "lease_block_granted"


@dataclass(frozen=True, slots=True)
class SamplesAcknowledged:
    """What one worker reported as trained, at most one record a second.

    `repeated`: reported too late, so that they are or will be trained a second time.
    """

    worker_id: WorkerId
    accepted: tuple[LeasedRange, ...]
    repeated: tuple[LeasedRange, ...] = ()
    kind: Literal["samples_acknowledged"] = "samples_acknowledged"


@dataclass(frozen=True, slots=True)
class LeaseBlockReturned:
    """What is not acknowledged of the block may be leased again. `in_doubt`: how many of its samples, the first of what
    is left, may have been trained without a report, at most.
    """

    lease: int
    in_doubt: int
    reason: str
    kind: Literal["lease_block_returned"] = "lease_block_returned"


Record = (
    WorkerAdmitted
    | WorkerMeasured
    | WorkerGone
    | PlanAdopted
    | PlanLoaded
    | PlanDropped
    | StepRetried
    | StepRecorded
    | StreamAdvanced
    | SamplesUnmerged
    | SamplesRepeated
    | ReplicasShared
    | SlotsReserved
    | CheckpointRecorded
    | StopRecorded
    | PauseRecorded
    | ResumeRecorded
    | WorkerEvicted
    | WorkerReadmitted
    | SamplesQuarantined
    | EvaluationRecorded
    | LiveEvaluated
    | TextRecorded
    | JobFinished
    | SampleEpochOpened
    | LeaseBlockGranted
    | SamplesAcknowledged
    | LeaseBlockReturned
)

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def record_to_json(record: Record) -> bytes:
    return _ADAPTER.dump_json(record)


def record_from_json(data: bytes) -> Record:
    """The inverse.

    Raises:
        RecordError: malformed, or of a later version.
    """
    if len(data) > RECORD_LIMIT_BYTES:
        raise RecordError(f"a record of {len(data)} bytes is above the limit of {RECORD_LIMIT_BYTES}")
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise RecordError(f"unreadable record: {error.errors()[0]['msg']}") from None
