"""Training in which every replica takes its own steps, on the samples that a synchronous one would take together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inprocess.rounds import Rounds
from inprocess.stacked import Stacked
from inprocess.swarm import Swarm, Worker
from inprocess.text import Text
from starlings_job.data.batch import Batch
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_job.sections import TrainSection
from starlings_worker.digest import squared_norm

# (step, replica) to the samples of its microbatch.
Deal = Callable[[int, int], Sequence[int]]

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
    deal: Deal | None = None,
    compiled: bool = False,
) -> list[float]:
    """Trains without a barrier; returns each step's mean loss over the replicas. The final average is the caller's
    (`rounds.finish`).

    Args:
        seed: of the order of samples. Each step's batch is cut among the replicas, one microbatch each.
        first_step, steps_total: of the schedule; 0 = as many steps as are trained.
        delayed: microbatches travel through the stages one hop per step, so that a gradient is as many steps old as its
            way back is long.
        deal: which samples each replica trains on in a step; left out, everybody draws from everything.
        compiled: as in `Stacked`.
    """
    replicas = len(swarm.replicas)
    if train.microbatch * replicas != train.batch:
        raise ValueError(f"{train.batch} samples are no {replicas} microbatches of {train.microbatch}")
    pipelines, clips = _Pipelines(swarm, delayed, compiled), _Clips(swarm)
    done = [swarm.workers[0].held.version] * swarm.setup.stages
    losses: list[float] = []
    for step in range(first_step, first_step + steps):
        samples = samples_of_step(seed, text.population, step, train.batch)
        rate = learning_rate(train, step, steps_total or first_step + steps)
        parts: list[Sequence[int]] = [
            samples[begin : begin + train.microbatch] for begin in range(0, train.batch, train.microbatch)
        ]
        if deal is not None:
            parts = [deal(step, replica) for replica in range(replicas)]
        denominators = [float(text.target_count(own)) for own in parts]
        found, stepping = pipelines.advance([text.batch(own) for own in parts], denominators)
        for stage in stepping:
            for worker in swarm.replicas_of(stage):
                rounds.inner_step(worker, done[stage], rate, clips.factor(worker, train.clip))
            done[stage] += 1
        if found is not None:
            losses.append(found)
        rounds.after_step(step - first_step)
    return losses


@dataclass(slots=True)
class _Way:
    """A microbatch of every replica under way: what each stage gets of it, then the gradient on its way back."""

    batches: Sequence[Batch]
    denominators: Sequence[float]
    # (replicas, samples, positions) at first, then with a width.
    values: list[Tensor]
    gradient: Tensor | None = None


class _Pipelines:
    """The stages of all replicas, in step. Undelayed, a microbatch passes all of them at once."""

    def __init__(self, swarm: Swarm, delayed: bool, compiled: bool) -> None:
        stackable = delayed or swarm.workers[0].held.description.family == "llama"
        self._stacked = Stacked(swarm, compiled=compiled) if stackable else None
        self._train = swarm.train_all if self._stacked is None else self._stacked.train
        self._delayed = delayed
        self._count = swarm.setup.stages
        self._forward: list[deque[_Way]] = [deque() for _ in range(self._count)]
        self._backward: list[deque[_Way]] = [deque() for _ in range(self._count)]

    def advance(
        self, batches: Sequence[Batch], denominators: Sequence[float]
    ) -> tuple[float | None, Sequence[int]]:
        """One tick: every stage does a forward and a backward pass, as far as there is one to do.

        Returns the mean loss that came out, and the stages with a new gradient. A microbatch that begins now reaches
        stage s at its s-th tick, and comes back to it after another 2 (stages - 1 - s).
        """
        if not self._delayed:
            return _mean(self._train(batches, denominators), denominators), range(self._count)
        assert self._stacked is not None
        self._forward[0].append(_Way(batches, denominators, [torch.stack([b.inputs for b in batches])]))
        loss, last = None, self._count - 1
        # What moves in this tick, before anything has moved.
        going = [ways.popleft() if ways else None for ways in self._forward]
        coming = [ways.popleft() if ways else None for ways in self._backward]
        for stage, way in enumerate(going[:last]):
            if way is not None:
                way.values.append(self._stacked.forward(stage, way.values[-1]))
                self._forward[stage + 1].append(way)
        stepping = []
        ended = going[last]
        if ended is not None:
            sums, ended.gradient = self._stacked.end(ended.values.pop(), ended.batches, ended.denominators)
            loss = _mean(sums, ended.denominators)
        for stage, way in enumerate([*coming[:last], ended]):
            if way is None:
                continue
            if stage < last:
                assert way.gradient is not None
                way.gradient = self._stacked.backward(stage, way.values.pop(), way.gradient)
            stepping.append(stage)
            if stage > 0:
                self._backward[stage - 1].append(way)
        return loss, stepping


def _mean(sums: Sequence[float], denominators: Sequence[float]) -> float:
    return sum(one / count for one, count in zip(sums, denominators, strict=True)) / len(sums)


class _Clips:
    """Usual squared norms of every worker's gradient, by replica and stage."""

    def __init__(self, swarm: Swarm) -> None:
        self._usual = {id(worker): math.nan for worker in swarm.workers}
        self._replica = {
            id(worker): [id(w) for w in replica] for replica in swarm.replicas for worker in replica
        }

    def factor(self, worker: Worker, most: float) -> float:
        """Of the present gradient: a stage's part of `most` is its usual part of the whole gradient."""
        (vector,) = worker.held.vectors.values()
        square = squared_norm(vector.gradient)
        usual = self._usual[id(worker)]
        usual = square if math.isnan(usual) else usual + _FORGETS * (square - usual)
        self._usual[id(worker)] = usual
        if most <= 0:
            return 1.0
        whole = sum(v for w in self._replica[id(worker)] if not math.isnan(v := self._usual[w]))
        part = math.sqrt(usual / whole) if whole > 0 else 1.0
        return min(1.0, most * part / (math.sqrt(square) + 1e-6))
