"""What replicas exchange beside training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from starlings_job.exchange_traffic import round_bytes
from starlings_job.spec import JobSpec
from starlings_protos.messages import Stage
from starlings_simulator.timed.costs import Costs


def exchange_bytes_per_s(
    costs: Costs, stages: Sequence[Stage], replicas: Sequence[tuple[int, float]], tokens: int
) -> float:
    """By all replicas together, `tokens` after the beginning.

    Args:
        replicas: the stage of each, and microbatches/s that it does there.
    """
    job: JobSpec = costs.job
    members = Counter(stage for stage, _ in replicas)
    rules = job.pair_rules
    if not job.train.streams:
        steps_per_s = sum(rate for stage, rate in replicas if stage == 0) / job.microbatches_per_step
        sent = 0.0
        for stage, count in members.items():
            parts = [
                costs.part_bytes(costs.trained(stages[stage]), 1 / count, count, aggregate=aggregate)
                for aggregate in (False, True)
            ]
            sent += count * (count - 1) * sum(parts)
        return sent * steps_per_s
    if rules is None:
        return 0.0
    phase = rules.phase_at(tokens, job.job.tokens)
    per_slot = phase.inner_steps * job.train.microbatches_per_inner_step
    size = {s: round_bytes(rules, phase, costs.trained(stages[s]), n) / per_slot for s, n in members.items()}
    return sum(rate * size[stage] for stage, rate in replicas)
