"""Training in which every replica takes its own steps, on the samples that a synchronous one would take together."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from inprocess.rounds import Rounds
from inprocess.swarm import Swarm, Worker
from inprocess.text import Text
from starlings_job.data.batch import Batch
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_job.sections import TrainSection
from starlings_worker.digest import squared_norm
from starlings_worker.runs import Run

# How much of its gradient's usual size a stage forgets per step.
_FORGETS = 0.02


def train_locally(
    swarm: Swarm,
    text: Text,
    train: TrainSection,
    rounds: Rounds,
    *,
    seed: int,
    steps: int,
    first_step: int = 0,
    steps_total: int = 0,
    delayed: bool = False,
) -> list[float]:
    """Trains without a barrier; returns each step's mean loss over the replicas. The final average is the caller's
    (`rounds.finish`).

    Args:
        seed: of the order of samples. Each step's batch is cut among the replicas, one microbatch each.
        first_step, steps_total: of the schedule; 0 = as many steps as are trained.
        delayed: microbatches travel through the stages one hop per step, so that a gradient is as many steps old as its
            way back is long.
    """
    replicas = len(swarm.replicas)
    if train.microbatch * replicas != train.batch:
        raise ValueError(f"{train.batch} samples are no {replicas} microbatches of {train.microbatch}")
    pipelines = [_Pipeline(swarm, number, delayed) for number in range(replicas)]
    losses: list[float] = []
    for step in range(first_step, first_step + steps):
        samples = samples_of_step(seed, text.population, step, train.batch)
        rate = learning_rate(train, step, steps_total or first_step + steps)
        found = []
        for number, pipeline in enumerate(pipelines):
            own = samples[number * train.microbatch : (number + 1) * train.microbatch]
            denominator = text.target_count(own)
            loss_sum, stepping = pipeline.advance(text.batch(own), denominator)
            if loss_sum is not None:
                found.append(loss_sum / denominator)
            for worker in stepping:
                clip = pipeline.clip_factor(worker, train.clip)
                rounds.inner_step(worker, pipeline.steps_done(worker), rate, clip)
        if found:
            losses.append(sum(found) / len(found))
        rounds.after_step(step - first_step)
    return losses


@dataclass(slots=True)
class _Way:
    """A microbatch under way: what each stage made of it, then the gradient on its way back."""

    batch: Batch
    denominator: float
    runs: list[Run] = field(default_factory=list)
    gradient: Tensor | None = None


class _Pipeline:
    """The stages of one replica. Undelayed, a microbatch passes all of them at once."""

    def __init__(self, swarm: Swarm, replica: int, delayed: bool) -> None:
        self._swarm, self._replica = swarm, replica
        self._workers = swarm.replicas[replica]
        self._delayed = delayed
        count = len(self._workers)
        self._forward: list[deque[_Way]] = [deque() for _ in range(count)]
        self._backward: list[deque[_Way]] = [deque() for _ in range(count)]
        self._done = [worker.held.version for worker in self._workers]
        # Usual squared norms of the stages' gradients.
        self._usual = [math.nan] * count

    def steps_done(self, worker: Worker) -> int:
        """Counts it as done."""
        self._done[worker.stage] += 1
        return self._done[worker.stage] - 1

    def advance(self, batch: Batch, denominator: float) -> tuple[float | None, list[Worker]]:
        """One tick: every stage does a forward and a backward pass, as far as there is one to do.

        Returns the loss that came out, and the stages with a new gradient. A microbatch that begins now reaches stage
        s at its s-th tick, and comes back to it after another 2 (stages - 1 - s).
        """
        if not self._delayed:
            return self._swarm.train(self._replica, batch, denominator), list(self._workers)
        self._forward[0].append(_Way(batch, denominator))
        loss, last = None, len(self._workers) - 1
        # What moves in this tick, before anything has moved.
        going = [ways.popleft() if ways else None for ways in self._forward]
        coming = [ways.popleft() if ways else None for ways in self._backward]
        for stage, way in enumerate(going):
            if way is None:
                continue
            before = way.runs[-1] if way.runs else None
            way.runs.append(self._swarm.forward(self._workers[stage], before, way.batch, way.denominator))
            if stage < last:
                self._forward[stage + 1].append(way)
            else:
                loss, coming[last] = way.runs[-1].loss_sum, way
        stepping = []
        for stage, way in enumerate(coming):
            if way is None:
                continue
            way.gradient = self._swarm.backward(self._workers[stage], way.runs[stage], way.gradient)
            stepping.append(self._workers[stage])
            if stage > 0:
                self._backward[stage - 1].append(way)
        return loss, stepping

    def clip_factor(self, worker: Worker, most: float) -> float:
        """Of the present gradient: a stage's part of `most` is its usual part of the whole gradient."""
        (vector,) = worker.held.vectors.values()
        square = squared_norm(vector.gradient)
        usual = self._usual[worker.stage]
        self._usual[worker.stage] = square if math.isnan(usual) else usual + _FORGETS * (square - usual)
        if most <= 0:
            return 1.0
        whole = sum(value for value in self._usual if not math.isnan(value))
        part = math.sqrt(self._usual[worker.stage] / whole) if whole > 0 else 1.0
        return min(1.0, most * part / (math.sqrt(square) + 1e-6))
