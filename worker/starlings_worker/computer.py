"""Device effects, carried out: one method per effect, each returns its outcome event. Runs on the compute
thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import assert_never

import torch

from starlings_compression import compiled
from starlings_compression.codec import make_codec
from starlings_compression.spec import parse_spec
from starlings_job.errors import JobError
from starlings_job.model import Batch, build_stage, decode_prompt, decode_records, loss_sum
from starlings_job.spec import JobSpec
from starlings_protos.messages import LeaseKind, MicrobatchKey, WorkerId
from starlings_protos.state_transfer import ServedBlock
from starlings_worker import wire
from starlings_worker.ahead import Ahead
from starlings_worker.black_box import FILE, BlackBox
from starlings_worker.boundary import BoundaryCodecs
from starlings_worker.core.effects import (
    AdoptState,
    ApplyStep,
    Assemble,
    ClearGradients,
    ComputeBackward,
    ComputeForward,
    DeviceEffect,
    DigestState,
    KeepHistory,
    Load,
    OpenExchange,
    ReducePart,
    ReplayStep,
    Settle,
    StepStages,
    TakeCopy,
)
from starlings_worker.core.events import (
    AggregateAssembled,
    BackwardComputed,
    ComputeFailed,
    Direction,
    Event,
    ExchangePrepared,
    ExchangeRefused,
    ForwardComputed,
    GradientsCleared,
    PartReduced,
    ReplayFailed,
    Settled,
    StateDigested,
    StepApplied,
    StepReplayed,
)
from starlings_worker.core.groups.work import GroupWork
from starlings_worker.core.pairing.work import CommitPair, EncodePair, JudgePair, TakeOuterStep
from starlings_worker.device import Device
from starlings_worker.emulation import BACKWARD_PART, FORWARD_PART, Throttle
from starlings_worker.errors import EngineFault
from starlings_worker.exchange import ExchangeBuffers, RefusedPart
from starlings_worker.fitting import Fitting
from starlings_worker.group_device import GroupDevice
from starlings_worker.history import PREFIX, History, Part
from starlings_worker.kept import Encoded, Kept, Microbatches
from starlings_worker.left_behind import LeftBehind, leave_behind
from starlings_worker.meters import Meters
from starlings_worker.optimizers.choice import make_optimizer
from starlings_worker.pair_device import PairDevice
from starlings_worker.runs import Run, Runner
from starlings_worker.serving import NotYet
from starlings_worker.snapshots import Snapshots
from starlings_worker.stage import HeldSpan, StageModule, stage_group
from starlings_worker.stage_steps import step_stages

# Small models make quick steps: without this a joiner would have to load within three of them.
_HISTORY_AT_LEAST_BYTES = 64 << 20
# Shorter vectors are summed up faster than the loops for it are compiled, in any number of steps that matters.
_COMPILED_FROM_ELEMENTS = 1 << 20


def compiled_for(exchange_codec: str, pipeline_codec: str, elements: int) -> str | None:
    """The codec whose loops are worth a compiler's second for a vector of so many elements; None: none is.

    Sums and fingerprints of other codecs than int8 use what comes with those loops.
    """
    specs = [parse_spec(spec) for spec in (exchange_codec, pipeline_codec)]
    whole = [spec.text for spec in specs if spec.reducer is None and spec.values.name == "int8"]
    if elements >= _COMPILED_FROM_ELEMENTS:
        return (whole or ["int8:128"])[0]
    return exchange_codec if exchange_codec in whole else None


def history_limit_bytes(span: HeldSpan) -> int:
    """How much a donor keeps of the last steps' updates: as much as its own state, or what any machine can spare."""
    own = sum(vector.byte_count for vector in span.vectors.values())
    return max(own, _HISTORY_AT_LEAST_BYTES)


class Computer:
    """The device's side of one engine life: weights, graphs, exchange buffers, snapshots."""

    def __init__(
        self,
        worker_id: WorkerId,
        job: JobSpec,
        device: Device,
        throttle: Throttle,
        meters: Meters,
        cache: Path | None = None,
    ) -> None:
        """`cache`: a directory for what a worker leaves behind; None: it leaves nothing.

        Raises:
            SpecError: one of the job's codecs needs a library that is missing here.
        """
        self._worker_id = worker_id
        self._job = job
        self._dataset = job.dataset
        self._description = job.description
        self.device = device
        self._throttle = throttle
        self._meters = meters
        self.boundary_codecs = BoundaryCodecs(job.pipeline.codec)
        # Now, and not when the span is there: whoever cannot encode should not begin to load.
        make_codec(job.exchange.codec)
        self.microbatches = Microbatches()
        self.snapshots = Snapshots()
        self.history = History()
        self.held: HeldSpan | None = None
        self.exchange: ExchangeBuffers | None = None
        # In jobs whose replicas exchange in pairs.
        self.pairs: PairDevice | None = None
        # In those whose replicas exchange in groups.
        self.groups: GroupDevice | None = None
        self._runner: Runner | None = None
        self._ahead: Ahead | None = None
        self._fitting = Fitting(job.train.microbatch, device.free_cache)
        self._cache = cache
        self._black_box = BlackBox(cache.with_name(FILE) if cache is not None else None)
        self.left_behind: LeftBehind | None = None

    # ---------------------------------------------------------------- the span

    def drop(self) -> None:
        """Frees everything: the span, every microbatch, part and snapshot."""
        self.held = self._runner = self.exchange = self.pairs = self.groups = self._ahead = None
        self.microbatches.clear()
        self.snapshots.clear()
        self.history.clear()
        self.device.free_cache()

    def prepare(self, load: Load) -> HeldSpan:
        """Builds the span of a new assignment with empty weights, for the loader to fill."""
        self.drop()
        assignment = load.assignment

        def build(first_block: int, last_block: int) -> StageModule:
            return build_stage(self._description, first_block, last_block, self.device.torch)

        held = HeldSpan(
            self._description,
            assignment.stages,
            assignment.span,
            build,
            make_optimizer(self._job.train, self._job.pair_rules),
            self.device.torch,
        )
        held.version = assignment.version
        return held

    def install(self, held: HeldSpan, load: Load) -> dict[str, str]:
        """The filled span takes effect; returns the digests of its blocks.

        Raises:
            EngineFault: a stage cannot be cut into as many fragments as the job's exchange has.
        """
        self.held = held
        self._ahead = Ahead(held) if self._job.train.correction == "predict" else None
        self._runner = Runner(
            held,
            loss_sum,
            recompute=load.assignment.recompute,
            bf16=self.device.bf16,
            streams=self._job.train.streams,
            ahead=self._ahead,
            fitting=self._fitting,
        )
        self.exchange = ExchangeBuffers(self._worker_id, self._job.exchange.codec, held.vectors)
        largest = max((vector.size for vector in held.vectors.values()), default=0)
        spec = compiled_for(self._job.exchange.codec, self._job.pipeline.codec, largest)
        if spec is not None and self.device.torch.type == "cpu":
            # Takes a second, and whoever encodes meanwhile makes the same bytes more slowly.
            threading.Thread(target=compiled.prepare, args=(spec,), daemon=True).start()
        rules = self._job.pair_rules
        if rules is not None:
            vectors = {stage: held.vectors[stage_group(stage)] for stage in held.span.stages}
            if rules.topology == "all":
                self.groups = GroupDevice(rules, vectors)
            else:
                self.pairs = PairDevice(rules, vectors, held.optimizer)
        return held.block_digests()

    # ---------------------------------------------------------------- effects

    def execute(self, effect: DeviceEffect) -> Event:
        """Carries out any device effect but Load, which is mostly waiting for donors.

        Raises:
            Exception: something that leaves the weights undefined; the engine must end.
        """
        match effect:
            case ComputeForward():
                return self._computing(effect.key, lambda: self._forward(effect))
            case ComputeBackward():
                return self._computing(effect.key, lambda: self._backward(effect))
            case ClearGradients():
                self._span().zero_gradients()
                self._buffers().clear(effect.step, effect.attempt)
                return GradientsCleared(effect.step, effect.attempt)
            case OpenExchange() | ReducePart() | Assemble():
                return self._exchanging(effect)
            case ApplyStep():
                return self._apply(effect)
            case StepStages():
                with self._meters.timing("compute"), self._throttle.block(), torch.no_grad():
                    stepped = step_stages(self._span(), effect)
                    self._after_steps(effect)
                    self.device.synchronise()
                return stepped
            case TakeCopy():
                self._span().version = effect.version
                return self._digest(effect.version, snapshot=True)
            case Settle():
                self._span().zero_gradients()
                self._span().version = effect.version
                # Nobody meets any more, and the average of all will need the memory.
                self.pairs = self.groups = None
                return Settled(effect.version)
            case AdoptState():
                self._buffers().adopt()
                if self.pairs is not None:
                    self.pairs.restart()
                if self.groups is not None:
                    self.groups.restart()
                return self._digest(effect.version, effect.snapshot)
            case DigestState():
                if effect.hand_over and (left := self._leave_behind(effect)) is not None:
                    return left
                return self._digest(effect.version, effect.snapshot)
            case TakeOuterStep() | EncodePair() | JudgePair() | CommitPair():
                if self.pairs is None:
                    raise EngineFault("no span that exchanges in pairs is held")
                with self._meters.timing("serialise"), self._throttle.block():
                    met = self.pairs.execute(effect)
                    if self._ahead is not None:
                        self._ahead.moved()
                    self.device.synchronise()
                return met
            case GroupWork():
                if self.groups is None:
                    raise EngineFault("no span that exchanges in groups is held")
                with self._meters.timing("serialise"), self._throttle.block():
                    worked = self.groups.execute(effect)
                    if self._ahead is not None:
                        self._ahead.moved()
                    self.device.synchronise()
                return worked
            case Load() | ReplayStep():
                raise AssertionError("mostly waiting for donors: the loader's and the replayer's")
            case _:
                assert_never(effect)

    def _after_steps(self, effect: StepStages) -> None:
        for step in effect.stages:
            if step.pulls and self.pairs is not None:
                self.pairs.pull(step.stage, step.pulls, effect.learning_rate)
            if self._ahead is not None:
                self._ahead.stepped(step.stage, step.number, step.steps_ahead, effect.learning_rate)

    def _span(self) -> HeldSpan:
        if self.held is None:
            raise EngineFault("no span is held")
        return self.held

    def _buffers(self) -> ExchangeBuffers:
        if self.exchange is None:
            raise EngineFault("no span is held")
        return self.exchange

    # ---------------------------------------------------------------- microbatches

    def _computing(self, key: MicrobatchKey, compute: Callable[[], Event]) -> Event:
        """Whatever a microbatch raises is that microbatch's failure, not the engine's."""
        try:
            with self._black_box.at(key):
                return compute()
        except torch.OutOfMemoryError as error:
            self.device.free_cache()
            # Also of a backward pass, of which nobody knows what it has added: the next are tried in smaller parts.
            reason = f"out of memory: {str(error).splitlines()[0]}"
            return ComputeFailed(key, reason, out_of_memory=not self._fitting.smaller())
        except EngineFault as error:
            return ComputeFailed(key, str(error))
        except Exception as error:
            traceback.print_exc()
            return ComputeFailed(key, f"{type(error).__name__}: {error}")

    def _forward(self, effect: ComputeForward) -> Event:
        begin = time.monotonic()
        kept = self._kept(effect.key)
        with self._throttle.block(FORWARD_PART * self._share(effect.first_stage, effect.last_stage)):
            train = effect.key.kind is LeaseKind.TRAIN
            run = self._fitting.forward(lambda: self._run_forward(effect, kept), train=train)
            self.device.synchronise()
        seconds = time.monotonic() - begin
        self._meters.spent("compute", seconds)
        if run.output is not None:
            kept.hidden = self._encode(run.output, Direction.FORWARD)
            if run.inputs or run.parts or effect.key.kind is not LeaseKind.TRAIN:
                run.output = None
        if effect.key.kind is LeaseKind.TRAIN:
            kept.run = run
        kept.boundary = None
        return ForwardComputed(effect.key, seconds, run.loss_sum, run.target_count, run.next_token)

    def _run_forward(self, effect: ComputeForward, kept: Kept) -> Run:
        assert self._runner is not None
        generate = effect.key.kind is LeaseKind.GENERATE
        ends = effect.last_stage == self._span().stage_count - 1
        batch: Batch | None = None
        if not generate and (effect.first_stage == 0 or ends):
            batch = decode_records(self._records(kept), self._dataset).to(self.device.torch)
        if effect.first_stage > 0:
            if kept.boundary is None:
                raise EngineFault("the microbatch's boundary input is not here")
            value = kept.boundary
        elif generate:
            value = decode_prompt(self._records(kept), self._dataset).to(self.device.torch)
        else:
            assert batch is not None
            value = batch.inputs
        averaged: AbstractContextManager[None] = nullcontext()
        if effect.key.kind is LeaseKind.EVALUATE_AVERAGE and self.pairs is not None:
            averaged = self.pairs.averages(range(effect.first_stage, effect.last_stage + 1))
        with averaged:
            return self._runner.forward(
                effect.first_stage,
                effect.last_stage,
                value,
                batch=batch,
                loss_denominator=effect.loss_denominator,
                train=effect.key.kind is LeaseKind.TRAIN,
                next_token=generate,
            )

    def _backward(self, effect: ComputeBackward) -> Event:
        begin = time.monotonic()
        kept = self._kept(effect.key)
        if kept.run is None or self._runner is None:
            raise EngineFault("the microbatch has no forward pass to go back through")
        with self._throttle.block(BACKWARD_PART * self._share(kept.run.first_stage, kept.run.last_stage)):
            gradient = self._runner.backward(kept.run, kept.output_gradient, effect.unadded_stages)
            self.device.synchronise()
        seconds = time.monotonic() - begin
        self._meters.spent("compute", seconds)
        if gradient is not None:
            kept.entry_gradient = self._encode(gradient, Direction.BACKWARD)
        kept.run = kept.output_gradient = None
        return BackwardComputed(effect.key, seconds)

    def _share(self, first_stage: int, last_stage: int) -> float:
        """Of the model's blocks, those of a run of stages."""
        return self._span().block_share(first_stage, last_stage)

    def _kept(self, key: MicrobatchKey) -> Kept:
        kept = self.microbatches.get(key)
        if kept is None:
            raise EngineFault("the microbatch is not here")
        return kept

    @staticmethod
    def _records(kept: Kept) -> wire.Buffer:
        if kept.records is None:
            raise EngineFault("the microbatch's records are not here")
        return kept.records

    def _encode(self, tensor: torch.Tensor, direction: Direction) -> Encoded:
        with self._meters.timing("serialise"):
            plain = tensor.detach().float()
            shape = tuple(plain.shape)
            codec = self.boundary_codecs.of(direction, shape)
            name = "hidden" if direction is Direction.FORWARD else "gradient"
            return Encoded(shape, codec.spec.text, wire.encode(codec, plain, name))

    # ---------------------------------------------------------------- exchange and step

    def _exchanging(self, effect: OpenExchange | ReducePart | Assemble) -> Event:
        group = effect.group.group if isinstance(effect, OpenExchange) else effect.group
        step, attempt = effect.step, effect.attempt
        try:
            with self._meters.timing("serialise"), torch.no_grad():
                match effect:
                    case OpenExchange():
                        self._buffers().open(step, attempt, effect.group, effect.purpose, effect.part)
                        return ExchangePrepared(step, attempt, group)
                    case ReducePart():
                        self._buffers().reduce(step, attempt, group)
                        return PartReduced(step, attempt, group, effect.pass_number)
                    case Assemble():
                        found = self._buffers().assemble(step, attempt, group)
                        if found is None:
                            return ExchangePrepared(step, attempt, group, effect.pass_number + 1)
                        return AggregateAssembled(step, attempt, group, *found)
        except RefusedPart as refused:
            return ExchangeRefused(step, attempt, group, refused.culprit, str(refused))

    def _apply(self, effect: ApplyStep) -> Event:
        span, buffers = self._span(), self._buffers()
        with self._meters.timing("compute"), self._throttle.block(), torch.no_grad():
            if self.history.wants(effect.step):
                # Before the optimizer, which leaves the gradients undefined.
                self.history.record(effect.step, buffers.updates(effect.step), history_limit_bytes(span))
            span.apply_step(effect.step, effect.learning_rate, effect.clip_factor)
            buffers.commit(effect.step)
            self.device.synchronise()
        self.history.applied(span.version)
        if effect.snapshot:
            self.snapshots.take(span)
        return StepApplied(effect.step)

    def replay(
        self, effect: ReplayStep, updates: Mapping[str, Sequence[Part]]
    ) -> StepReplayed | ReplayFailed:
        """The outcome of ReplayStep, once the updates of all groups are here."""
        span = self._span()
        if span.version != effect.step:
            raise EngineFault(f"asked to replay step {effect.step}, holding version {span.version}")
        with self._meters.timing("compute"), self._throttle.block(), torch.no_grad():
            try:
                digests = self._buffers().replay(updates)
            except RefusedPart as refused:
                return ReplayFailed(effect.step, str(refused))
            span.apply_step(effect.step, effect.learning_rate, effect.clip_factor)
            self.device.synchronise()
        return StepReplayed(effect.step, digests)

    # ---------------------------------------------------------------- what others may fetch

    def keep_history(self, effect: KeepHistory) -> None:
        self.snapshots.pin(effect.versions)
        self.history.keep(effect.updates_from)

    def serve(self, version: int, block: str, *, optimizer: bool) -> ServedBlock:
        """A `serving.Shelf`: snapshots by block name, updates by "update/" and group. Called on the event loop."""
        if block.startswith(PREFIX):
            return self.history.serve(version, block.removeprefix(PREFIX))
        held = self.held
        if held is not None and version > held.version:
            # An observer hears of a commit as soon as its donors do, and may ask before they have applied the step.
            raise NotYet(f"version {held.version} is here; {version} may come")
        return self.snapshots.serve(version, block, optimizer=optimizer)

    def _leave_behind(self, effect: DigestState) -> Event | None:
        """State to the disk; None when the disk does not take it: then it stays in memory, and so does this engine."""
        held = self._span()
        if held.version != effect.version or self._cache is None:
            return None
        blocks = {block: held.block_state(block) for block in held.blocks} if effect.snapshot else {}
        try:
            self.left_behind = leave_behind(self._cache, held.version, blocks)
        except (OSError, JobError):
            traceback.print_exc()
            return None
        return StateDigested(held.version, self.left_behind.digests or held.block_digests(), True)

    def _digest(self, version: int, snapshot: bool) -> Event:
        held = self._span()
        if held.version != version:
            raise EngineFault(f"asked for the digest of version {version}, holding {held.version}")
        digests = held.block_digests()
        if snapshot:
            self.snapshots.take(held)
        return StateDigested(version, digests)
