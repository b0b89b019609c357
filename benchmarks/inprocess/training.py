"""Synchronous training of a swarm in one process, on the samples, batches and rates that a job would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inprocess.swarm import Swarm
from inprocess.text import Text
from starlings_job.data.batch import Batch
from starlings_job.sampling import samples_of_step
from starlings_job.schedule import learning_rate
from starlings_job.sections import TrainSection

# (step, mean loss in nats per target before its update, norm of its gradient)
StepHook = Callable[[int, float, float], None]
# (step), between the exchange of its gradients and the optimizer.
RoundHook = Callable[[int], None]
# (a microbatch of each replica, what each loss is divided by) -> sums of losses; `Swarm.train_all`, `Stacked.train`.
Compute = Callable[[Sequence[Batch], Sequence[float]], list[float]]


def train_synchronously(
    swarm: Swarm,
    text: Text,
    train: TrainSection,
    *,
    seed: int,
    steps: int,
    first_step: int = 0,
    steps_total: int = 0,
    on_step: StepHook | None = None,
    on_round: RoundHook | None = None,
    compute: Compute | None = None,
) -> list[float]:
    """Returns each step's mean loss before its update.

    Args:
        seed: of the order of samples. Microbatches go to the replicas in turn.
        first_step: the version that the swarm is at.
        steps_total: steps of the learning rate's schedule; 0 = until the last one that is trained.
        compute: how gradients are added up; None: by the swarm's own runs.
    """
    compute = compute or swarm.train_all
    together = train.microbatch * swarm.setup.replicas
    losses = []
    for step in range(first_step, first_step + steps):
        samples = samples_of_step(seed, text.population, step, train.batch)
        denominator = text.target_count(samples)
        total = 0.0
        for begin in range(0, len(samples), together):
            batches = [
                text.batch(samples[first : first + train.microbatch])
                for first in range(begin, min(begin + together, len(samples)), train.microbatch)
            ]
            total += sum(compute(batches, [denominator] * len(batches)))
        norm = swarm.exchange(step)
        if on_round is not None:
            on_round(step)
        # As `starlings_coordinator.core.stepping` does.
        clip = min(1.0, train.clip / (norm + 1e-6)) if train.clip > 0 else 1.0
        swarm.apply(step, learning_rate(train, step, steps_total or first_step + steps), clip)
        losses.append(total / denominator)
        if on_step is not None:
            on_step(step, losses[-1], norm)
    return losses
