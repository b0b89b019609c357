"""R replicas of S stages in one process: microbatches through boundary codecs, groups in exchange, steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inprocess.exchange import equal_members, exchange
from starlings_job.data.batch import Batch, loss_sum
from starlings_job.description import ModelDescription
from starlings_job.model import build_stage
from starlings_job.model.tensors import raw_tensor
from starlings_job.state import PARAMETER
from starlings_protos.messages import Span, Stage, WorkerId
from starlings_worker import wire
from starlings_worker.boundary import BoundaryCodecs
from starlings_worker.core.events import Direction
from starlings_worker.exchange import ExchangeBuffers
from starlings_worker.optimizers.elementary import Optimizer
from starlings_worker.runs import Run, Runner
from starlings_worker.stage import HeldSpan

_CPU = torch.device("cpu")
# {block: {name: float32 tensor}}, as `starlings_job.model.initial_state` gives it.
State = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything about a swarm that is not its model."""

    optimizer: Optimizer
    replicas: int = 2
    stages: int = 1
    gradient_codec: str = "exact"
    boundary_codec: str = "exact"
    # A stage computes again in its backward pass, with the weights that it has then.
    recompute: bool = False


def cut_evenly(description: ModelDescription, stages: int) -> tuple[Stage, ...]:
    """Layers in equal runs, the first ones longer; embedding and head go with the ends.

    Raises:
        ValueError: fewer layers than stages.
    """
    count = len(description.blocks)
    layers = count - 2
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers make no {stages} stages")
    cuts, begin = [], 0
    for stage in range(stages):
        end = 1 + sum(layers // stages + (s < layers % stages) for s in range(stage + 1))
        end = count if stage == stages - 1 else end
        cuts.append(Stage(begin, end - 1))
        begin = end
    return tuple(cuts)


class Worker:
    """One stage of one replica, with all that an engine has of it."""

    def __init__(
        self,
        worker_id: WorkerId,
        description: ModelDescription,
        stages: tuple[Stage, ...],
        stage: int,
        state: State,
        setup: Setup,
    ) -> None:
        self.worker_id, self.stage = worker_id, stage
        self.held = HeldSpan(
            description,
            stages,
            Span(stage, stage),
            lambda first, last: build_stage(description, first, last),
            setup.optimizer,
            _CPU,
        )
        for block in self.held.blocks:
            tensors = {PARAMETER + name: raw_tensor(tensor) for name, tensor in state[block].items()}
            self.held.load_block(block, tensors, 0)
        self.runner = Runner(self.held, loss_sum, recompute=setup.recompute, bf16=False)
        self.buffers = ExchangeBuffers(worker_id, setup.gradient_codec, self.held.vectors)


class Swarm:
    """Workers by replica and stage. Whoever trains with it says when there is a microbatch, a round, a step."""

    def __init__(self, description: ModelDescription, state: State, setup: Setup) -> None:
        """All replicas begin with `state`."""
        self.setup = setup
        stages = cut_evenly(description, setup.stages)
        self.replicas = [
            [
                Worker(WorkerId(f"{replica}.{stage}"), description, stages, stage, state, setup)
                for stage in range(setup.stages)
            ]
            for replica in range(setup.replicas)
        ]
        self._boundary = BoundaryCodecs(setup.boundary_codec)
        self._exact = BoundaryCodecs("exact")
        # What would have travelled so far.
        self.boundary_bytes = 0
        self.exchange_bytes = 0

    @property
    def workers(self) -> list[Worker]:
        return [worker for replica in self.replicas for worker in replica]

    def replicas_of(self, stage: int) -> list[Worker]:
        return [replica[stage] for replica in self.replicas]

    # ---------------------------------------------------------------- microbatches

    def train(self, replica: int, batch: Batch, loss_denominator: float) -> float:
        """Adds a microbatch's gradient to the replica's accumulators; returns the sum of its losses in nats."""
        runs: list[Run] = []
        for worker in self.replicas[replica]:
            runs.append(self.forward(worker, runs[-1] if runs else None, batch, loss_denominator))
        gradient: Tensor | None = None
        for worker, run in zip(reversed(self.replicas[replica]), reversed(runs), strict=True):
            gradient = self.backward(worker, run, gradient)
        return runs[-1].loss_sum

    def train_all(self, batches: Sequence[Batch], loss_denominators: Sequence[float]) -> list[float]:
        """`train`, one microbatch per replica, of the first ones where there are fewer."""
        return [
            self.train(replica, batch, denominator)
            for replica, (batch, denominator) in enumerate(zip(batches, loss_denominators, strict=True))
        ]

    def forward(self, worker: Worker, before: Run | None, batch: Batch, loss_denominator: float) -> Run:
        """One stage of a microbatch's way; `before`: what the stage before it made."""
        value = (
            batch.inputs if before is None else self._across(before.output, Direction.FORWARD, self._boundary)
        )
        return worker.runner.forward(
            worker.stage, worker.stage, value, batch=batch, loss_denominator=loss_denominator, train=True
        )

    def backward(self, worker: Worker, run: Run, gradient: Tensor | None) -> Tensor | None:
        """Adds to the stage's accumulator; returns what the stage before it gets, None at the first one."""
        before = worker.runner.backward(run, gradient)
        return None if before is None else self._across(before, Direction.BACKWARD, self._boundary)

    def evaluate(self, replica: int, batches: Iterable[Batch], *, through_codec: bool) -> float:
        """Mean loss in nats per target of one replica.

        Args:
            through_codec: boundaries are crossed in their codec, as in a swarm that evaluates while it trains;
                without, it is the model as it is exported.
        """
        codecs = self._boundary if through_codec else self._exact
        total, targets, bytes_before = 0.0, 0, self.boundary_bytes
        for batch in batches:
            value, run = batch.inputs, None
            for worker in self.replicas[replica]:
                if run is not None:
                    value = self._across(run.output, Direction.FORWARD, codecs)
                run = worker.runner.forward(
                    worker.stage, worker.stage, value, batch=batch, loss_denominator=1.0, train=False
                )
            assert run is not None
            total, targets = total + run.loss_sum, targets + run.target_count
        self.boundary_bytes = bytes_before
        return total / targets

    def _across(self, tensor: Tensor | None, direction: Direction, codecs: BoundaryCodecs) -> Tensor:
        """What the next stage makes of a tensor's bytes."""
        assert tensor is not None
        plain = tensor.detach().float()
        shape = tuple(plain.shape)
        codec = codecs.of(direction, shape)
        data = wire.encode(codec, plain, direction.value)
        self.boundary_bytes += memoryview(data).nbytes
        return wire.decode(codec, data, shape, _CPU)

    # ---------------------------------------------------------------- rounds and steps

    @torch.no_grad()
    def exchange(self, step: int) -> float:
        """Every group exchanges its gradients; returns the norm of the whole summed gradient."""
        groups: dict[str, list[WorkerId]] = {}
        for worker in self.workers:
            for group in worker.held.vectors:
                groups.setdefault(group, []).append(worker.worker_id)
        buffers = {worker.worker_id: worker.buffers for worker in self.workers}
        square = 0.0
        for group, members in groups.items():
            done = exchange(buffers, equal_members(group, members), step)
            square += done.squared_norm
            self.exchange_bytes += done.sent_bytes
        return float(square**0.5)

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, clip_factor: float) -> None:
        """One optimizer step everywhere; codec state counts from now on."""
        for worker in self.workers:
            worker.held.apply_step(step, learning_rate, clip_factor)
            worker.buffers.commit(step)
