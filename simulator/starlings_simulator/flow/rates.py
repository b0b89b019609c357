"""How much flows through holders, and through whom: the planner's linear programme for what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starlings_coordinator.planner.linear.node_form import solve
from starlings_coordinator.planner.linear.problem import Floats
from starlings_protos.messages import Stage
from starlings_simulator.flow.holders import Holder, gather
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.machines import Swarm


@dataclass(frozen=True, eq=False)
class Rates:
    """Microbatches/s; per holder: [n, s] what it does at stage s, and seconds of work per second."""

    rate: float
    at_stage: Floats
    load: Floats
    # Bytes/s that leave workers, forward and backward, if none leaves that could stay.
    forward_bytes_per_s: float
    backward_bytes_per_s: float
    # Seconds that a microbatch is under way.
    latency_s: float


def rates_of(
    costs: Costs, swarm: Swarm, stages: Sequence[Stage], holders: Sequence[Holder], rtt_s: float
) -> Rates:
    """`rtt_s`: between typical holders."""
    nothing = np.zeros((len(holders), len(stages)))
    covered = {s for holder in holders for s in holder.span.stages}
    if len(covered) < len(stages):
        return Rates(0.0, nothing, np.zeros(len(holders)), 0.0, 0.0, 0.0)
    gathered = gather(costs, swarm, stages, holders)
    problem = gathered.problem
    flow = solve(problem, gathered.choice)
    share = np.zeros((problem.workers, problem.stages))
    np.add.at(share, (flow.entries.worker, flow.entries.stage), flow.share)
    at_stage = share[gathered.group] * gathered.part[:, None]
    for number, holder in enumerate(holders):
        nothing[number, holder.span.first_stage : holder.span.last_stage + 1] = holder.seconds
    return Rates(
        flow.rate,
        at_stage,
        (at_stage * nothing).sum(axis=1),
        float(np.maximum(0.0, -np.diff(at_stage, axis=1)).sum(axis=0) @ problem.forward_bytes),
        float(np.maximum(0.0, np.diff(at_stage, axis=1)).sum(axis=0) @ problem.backward_bytes),
        _latency_s(costs, swarm, stages, holders, rtt_s),
    )


def _latency_s(
    costs: Costs, swarm: Swarm, stages: Sequence[Stage], holders: Sequence[Holder], rtt_s: float
) -> float:
    """From a microbatch's first stage until its gradient is back there: computing at typical holders, bytes over
    typical links, round trips; nobody waits.
    """
    sites = [swarm.sites[holder.machine.site] for holder in holders]
    carries = 1 / float(np.mean([1 / min(s.up_bytes_per_s, s.down_bytes_per_s) for s in sites]) or 1e-300)
    # From entering a stage until it is back there.
    entering = np.zeros(len(stages) + 1)
    for stage in range(len(stages) - 1, -1, -1):
        there = [holder for holder in holders if stage in holder.span]
        rest = []
        for holder in there:
            last = holder.span.last_stage
            seconds = float(holder.seconds[stage - holder.span.first_stage :].sum()) + float(
                entering[last + 1]
            )
            if last + 1 < len(stages):
                size = sum(costs.boundary_bytes(stages[last], backward=back) for back in (False, True))
                seconds += rtt_s + size / carries
            rest.append(seconds)
        entering[stage] = np.average(rest, weights=[1 / holder.seconds.sum() for holder in there])
    return float(entering[0])
