"""The durable state: a fold over records. Everything else that the core knows can be asked for again after
a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import assert_never

from pydantic import TypeAdapter, ValidationError

from starlings_coordinator.core.leased import Leased, fold_leased
from starlings_coordinator.core.records import (
    CheckpointRecorded,
    EvaluationRecorded,
    JobFinished,
    LeaseBlockGranted,
    LeaseBlockReturned,
    LiveEvaluated,
    PauseRecorded,
    PlanAdopted,
    PlanDropped,
    PlanLoaded,
    Record,
    RecordError,
    ReplicasShared,
    ResumeRecorded,
    SampleEpochOpened,
    SamplesAcknowledged,
    SamplesQuarantined,
    SamplesRepeated,
    SamplesUnmerged,
    SlotsReserved,
    StepRecorded,
    StepRetried,
    StopRecorded,
    StreamAdvanced,
    TextRecorded,
    WorkerAdmitted,
    WorkerEvicted,
    WorkerGone,
    WorkerMeasured,
    WorkerReadmitted,
)
from starlings_protos.messages import Hello, PlannedWorker, ProbeReport, Span, Stage, WorkerId
from starlings_protos.status import LiveEvaluation, LossPoint

SNAPSHOT_LIMIT_BYTES = 256 << 20
# Points of the loss curve beyond this are thinned to every second one, so that a long job's snapshot stays small.
LOSS_POINTS_LIMIT = 4096
# Evaluations on the way; the oldest are forgotten.
LIVE_EVALUATIONS_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Life:
    """What must be known of a worker to go on with it after a restart."""

    incarnation: int
    hello: Hello
    probe: ProbeReport | None = None


@dataclass(slots=True)
class Durable:
    """Changed by `fold` only."""

    incarnations: dict[WorkerId, int] = field(default_factory=dict)
    # The newest life of each worker.
    lives: dict[WorkerId, Life] = field(default_factory=dict)
    plan_version: int = 0
    stages: tuple[Stage, ...] = ()
    spans: dict[WorkerId, Span] = field(default_factory=dict)
    # Slots, memory and recomputation of the holders, as the planner chose them.
    planned: dict[WorkerId, PlannedWorker] = field(default_factory=dict)
    # Whether the spans are in force, and whether training under them has begun.
    plan_live: bool = False
    plan_loaded: bool = False
    # The newest plan whose holders loaded a saved version.
    base_plan_version: int = 0
    # The newest commit, for holders that did not hear of it; None before the first and after a rewind.
    commit: StepRecorded | None = None
    # The step to train next = the version of the committed weights, and the highest attempt at it so far.
    step: int = 0
    attempt: int = 0
    # No (step, attempt) is ever used twice, so that a late message of a void line of steps cannot be mistaken: after a
    # rewind, steps up to `repeat_until` begin at `repeat_attempt`, above every attempt before.
    highest_attempt: int = 0
    repeat_attempt: int = 0
    repeat_until: int = -1
    tokens: int = 0
    samples_trained: int = 0
    # Distinct (epoch, sample) of all steps that were ever committed, also of those that a rewind undid.
    samples_leased: int = 0
    # Samples that a committed step should have had and had not: a defect if it is ever positive.
    samples_lost: int = 0
    worker_tokens: dict[WorkerId, int] = field(default_factory=dict)
    loss_curve: list[LossPoint] = field(default_factory=list)
    # Version 0 comes from `starlings prepare`.
    checkpoints: dict[int, str] = field(default_factory=dict)
    stop_reason: str = ""
    # The owner's pause, while it lasts; and whom the owner has sent away, while that lasts.
    pause: PauseRecorded | None = None
    evicted: dict[WorkerId, WorkerEvicted] = field(default_factory=dict)
    # Samples that are never leased again, and how that came.
    quarantined: set[int] = field(default_factory=set)
    quarantines: list[SamplesQuarantined] = field(default_factory=list)
    validation_loss: float | None = None
    # `async`: on the way.
    live_evaluations: list[LiveEvaluation] = field(default_factory=list)
    validation_version: int = -1
    text_version: int = -1
    text_prompt_sample: int = 0
    text_tokens: tuple[int, ...] = ()
    finished: JobFinished | None = None
    # Blocks of samples of an `async` job; empty in `sync`, where leases of an open attempt need no record.
    leased: Leased = field(default_factory=Leased)
    # `async`: acknowledged samples whose weights were lost, all of them (training went on from a saved version, and
    # does as many others instead), or those of one replica.
    samples_rewound: int = 0
    samples_of_lost_replicas: int = 0
    # `async`: samples that stages behind a lost worker may have added twice.
    samples_sent_again: int = 0
    # `async`: of `worker_tokens`, what is not in the worker's replicas alone (or not in them at all); and how many
    # acknowledged samples those totals stand for.
    shared_tokens: dict[WorkerId, int] = field(default_factory=dict)
    samples_credited: int = 0
    # `async`: by saved version, what was acknowledged by then and is in replicas that were not saved.
    beside_checkpoints: dict[int, int] = field(default_factory=dict)
    # `async`: the highest number of a slot that may have been spoken of, in any stage.
    slots_reserved: int = 0

    @property
    def samples_unmerged(self) -> int:
        return max(0, self.samples_rewound) + self.samples_of_lost_replicas

    @property
    def samples_repeated(self) -> int:
        return self.leased.samples_repeated + self.samples_sent_again

    @property
    def restart_version(self) -> int:
        """The newest version that the keeper has: training can always begin again there."""
        return max((version for version in self.checkpoints if version <= self.step), default=0)

    def first_attempt(self, step: int) -> int:
        """The attempt with which `step` begins after the step before it was committed."""
        return self.repeat_attempt if step <= self.repeat_until else 0


def fold(state: Durable, record: Record, batch: int, tokens_per_sample: int) -> None:
    """Apply one record. Total: every record that was ever written is understood."""
    match record:
        case WorkerAdmitted():
            state.incarnations[record.worker_id] = record.incarnation
            if record.hello is not None:
                state.lives[record.worker_id] = Life(record.incarnation, record.hello)
        case WorkerMeasured():
            life = state.lives.get(record.worker_id)
            if life is not None and life.incarnation == record.incarnation:
                state.lives[record.worker_id] = replace(life, probe=record.probe)
        case WorkerGone():
            state.lives.pop(record.worker_id, None)
        case PlanAdopted():
            if record.step != state.step:
                state.repeat_until = max(state.repeat_until, state.step)
                state.repeat_attempt = record.attempt
                _move_to(state, record.step, batch, tokens_per_sample)
            elif record.loads and state.leased.next_lease:
                _count_from(state, record.step, batch, tokens_per_sample)
            _begin_alone(state, record)
            state.plan_version = record.plan_version
            state.stages = record.stages
            state.spans = dict(record.spans)
            known = state.planned | {planned.worker_id: planned for planned in record.planned}
            state.planned = {w: planned for w, planned in known.items() if w in state.spans}
            state.plan_live = True
            if record.loads:
                state.plan_loaded, state.commit = False, None
                state.leased.first_valid = state.leased.next_lease
                state.samples_of_lost_replicas += state.beside_checkpoints.pop(record.step, 0)
                state.base_plan_version = record.plan_version
            state.step, state.attempt = record.step, record.attempt
            state.highest_attempt = max(state.highest_attempt, record.attempt)
            state.finished = None
        case PlanLoaded():
            state.plan_loaded = True
        case PlanDropped():
            state.plan_live = state.plan_loaded = False
            state.commit = None
        case StepRetried():
            state.attempt = record.attempt
            state.highest_attempt = max(state.highest_attempt, record.attempt)
        case StepRecorded():
            state.commit = record
            state.step, state.attempt = record.step + 1, state.first_attempt(record.step + 1)
            state.tokens += record.tokens
            state.samples_trained += record.samples
            state.samples_leased = max(state.samples_leased, (record.step + 1) * batch)
            state.samples_lost += batch - record.samples
            _credit(state, record)
        case StreamAdvanced():
            _credit(state, record)
            state.samples_credited = state.leased.samples_acknowledged
        case SamplesUnmerged():
            state.samples_of_lost_replicas += record.samples
        case SamplesRepeated():
            state.samples_sent_again += record.samples
        case ReplicasShared():
            shared = state.shared_tokens
            shared |= {w: tokens for w, tokens in record.tokens if w in shared}
        case SlotsReserved():
            state.slots_reserved = max(state.slots_reserved, record.until)
        case CheckpointRecorded():
            state.checkpoints[record.version] = record.path
            if record.beside:
                state.beside_checkpoints[record.version] = record.beside
        case StopRecorded():
            state.stop_reason = record.reason
        case PauseRecorded():
            state.pause = record
        case ResumeRecorded():
            state.pause = None
        case WorkerEvicted():
            state.evicted[record.worker_id] = record
        case SamplesQuarantined():
            state.quarantined.update(record.samples)
            state.quarantines.append(record)
        case WorkerReadmitted():
            state.evicted.pop(record.worker_id, None)
        case EvaluationRecorded():
            state.validation_loss, state.validation_version = record.loss, record.version
        case LiveEvaluated():
            average = record.average_loss
            evaluation = LiveEvaluation(
                record.step,
                record.step * batch * tokens_per_sample,
                record.loss,
                average or 0.0,
                average is not None,
                record.worker_id,
                record.at_s,
            )
            state.live_evaluations = [*state.live_evaluations, evaluation][-LIVE_EVALUATIONS_LIMIT:]
        case TextRecorded():
            state.text_version, state.text_tokens = record.version, record.tokens
            state.text_prompt_sample = record.prompt_sample
        case JobFinished():
            state.finished = record
            state.stop_reason = ""
            state.plan_live = state.plan_loaded = False
        case SampleEpochOpened() | LeaseBlockGranted() | SamplesAcknowledged() | LeaseBlockReturned():
            fold_leased(state.leased, record)
            state.samples_trained = state.leased.samples_acknowledged - state.samples_rewound
            state.tokens = state.samples_trained * tokens_per_sample
            state.step = state.samples_trained // batch
        case _:
            assert_never(record)


def _begin_alone(state: Durable, record: PlanAdopted) -> None:
    """Who has a span from here on, and had none, has weights that others have too."""
    for worker_id, _ in record.spans:
        if record.loads or worker_id not in state.shared_tokens:
            state.shared_tokens[worker_id] = state.worker_tokens.get(worker_id, 0)
    for gone in state.shared_tokens.keys() - {worker_id for worker_id, _ in record.spans}:
        del state.shared_tokens[gone]


def _credit(state: Durable, record: StepRecorded | StreamAdvanced) -> None:
    for worker_id, microbatch_tokens in record.credits:
        state.worker_tokens[worker_id] = state.worker_tokens.get(worker_id, 0) + microbatch_tokens
    state.loss_curve.append(LossPoint(record.step, state.tokens, record.loss, record.at_s))
    if len(state.loss_curve) > LOSS_POINTS_LIMIT:
        state.loss_curve = state.loss_curve[::2]


def _move_to(state: Durable, step: int, batch: int, tokens_per_sample: int) -> None:
    """Training goes on from another version: steps after it are lost with their weights, and trained again on the same
    samples. (Forward only when checkpoints outlived their log.)
    """
    _count_from(state, step, batch, tokens_per_sample)
    state.loss_curve = [point for point in state.loss_curve if point.step < step]
    state.live_evaluations = [e for e in state.live_evaluations if e.step <= step]
    state.checkpoints = {version: path for version, path in state.checkpoints.items() if version <= step}


def _count_from(state: Durable, step: int, batch: int, tokens_per_sample: int) -> None:
    """What the ledger of `async` acknowledged stays so; progress is what the weights have."""
    state.samples_rewound = state.leased.samples_acknowledged - step * batch
    state.tokens = step * batch * tokens_per_sample
    state.samples_trained = step * batch


_SNAPSHOT: TypeAdapter[Durable] = TypeAdapter(Durable)


def snapshot_to_json(state: Durable) -> bytes:
    return _SNAPSHOT.dump_json(state)


def snapshot_from_json(data: bytes) -> Durable:
    """Raises RecordError when malformed."""
    if len(data) > SNAPSHOT_LIMIT_BYTES:
        raise RecordError(f"a snapshot of {len(data)} bytes is above the limit of {SNAPSHOT_LIMIT_BYTES}")
    try:
        return _SNAPSHOT.validate_json(data)
    except ValidationError as error:
        raise RecordError(f"unreadable snapshot: {error.errors()[0]['msg']}") from None
