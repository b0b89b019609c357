"""The numbers of a job that its workers' streams go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlings_job.exchange_rules import ExchangeRules
from starlings_job.schedule import learning_rate
from starlings_job.sections import TrainSection
from starlings_job.spec import JobSpec

# More in a row would only be a probability near 1.
PULLS_MOST = 64


@dataclass(frozen=True, slots=True)
class StreamRules:
    train: TrainSection
    # Microbatches whose gradients make one step of a stage.
    inner_batch: int
    tokens_per_step: int
    steps_total: int
    # None: replicas go their own ways, and are averaged at the end.
    pairs: ExchangeRules | None = None

    @classmethod
    def of(cls, job: JobSpec) -> StreamRules:
        inner_batch = job.train.microbatches_per_inner_step
        return cls(job.train, inner_batch, job.tokens_per_step, job.steps_total, job.pair_rules)

    def learning_rate(self, tokens: float) -> float:
        """When the swarm has trained so many tokens: that of the step which they would make in `sync`."""
        return learning_rate(self.train, tokens / self.tokens_per_step, self.steps_total)

    def pulls(self, dice: Callable[[], float]) -> int:
        return pulls_before_a_step(self.pairs, dice) if self.pairs is not None else 0


def pulls_before_a_step(rules: ExchangeRules, dice: Callable[[], float]) -> int:
    """palsgd: how many pulls come before the next step of the optimizer, p / (1 - p) on average; else none.

    Naganuma et al. 2025, "Pseudo-Asynchronous Local SGD", algorithm 1: each step is a pull with probability p.
    """
    count = 0
    while count < PULLS_MOST and dice() < rules.pull_probability:
        count += 1
    return count
