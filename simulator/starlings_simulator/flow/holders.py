"""What every holder can do, as a problem of the planner's linear programme; alike holders are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from starlings_coordinator.planner.linear.problem import Floats, Ints, Problem
from starlings_protos.messages import PlannedWorker, Span, Stage, WorkerId
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.machines import Machine, Swarm

# Above so many holders those with one span, speed and links are one, as strong as all of them.
APART_MOST = 300
# Speeds and rates within this part of each other count as one.
ALIKE = 0.05


@dataclass(frozen=True, eq=False)
class Holder:
    """`seconds` of one microbatch forward and backward, per stage of the span."""

    machine: Machine
    planned: PlannedWorker
    span: Span
    seconds: Floats


def holder_of(costs: Costs, machine: Machine, stages: Sequence[Stage], planned: PlannedWorker) -> Holder:
    span = planned.span
    assert span is not None, "a holder holds something"
    # A graph is kept over a step only where backward comes at once.
    again = planned.recompute or (costs.job.train.streams and span.last_stage + 1 < len(stages))
    seconds = [
        costs.forward_s(machine, [stages[s]]) + costs.backward_s(machine, [stages[s]], again=again)
        for s in span.stages
    ]
    return Holder(machine, planned, span, np.array(seconds))


@dataclass(frozen=True, eq=False)
class Gathered:
    """`group[n]`: the worker of `problem` that holder n is a part of; `part[n]`: what part of it."""

    problem: Problem
    choice: Ints
    group: Ints
    part: Floats


def gather(costs: Costs, swarm: Swarm, stages: Sequence[Stage], holders: Sequence[Holder]) -> Gathered:
    """Sites of several holders stay as they are: what they pass on to each other is free."""
    at: dict[str, int] = {}
    for holder in holders:
        at[holder.machine.site] = at.get(holder.machine.site, 0) + 1
    apart = len(holders) <= APART_MOST
    index: dict[tuple[object, ...], int] = {}
    members: list[list[int]] = []
    group = np.zeros(len(holders), dtype=np.int64)
    for number, holder in enumerate(holders):
        key: tuple[object, ...] = (number,)
        site = swarm.sites[holder.machine.site]
        if not apart and at[site.name] == 1:
            shape = (float(holder.seconds.sum()), site.up_bytes_per_s, site.down_bytes_per_s)
            with np.errstate(over="ignore"):
                alike = tuple(np.round(np.log(np.minimum(shape, 1e30)) / ALIKE).tolist())
            key = (holder.span, alike)
        if key not in index:
            index[key] = len(members)
            members.append([])
        group[number] = index[key]
        members[index[key]].append(number)
    speed = np.array([1 / holder.seconds.sum() for holder in holders])
    together = np.bincount(group, speed, minlength=len(members))
    count = len(stages)
    seconds = np.zeros((1, len(members), count))
    sites: dict[str, int] = {}
    site_of, up, down = np.zeros(len(members), dtype=np.int64), [], []
    for number, own in enumerate(members):
        first = holders[own[0]]
        # Of the mean speed of all, times as many.
        seconds[0, number] = 1.0
        share = first.seconds / first.seconds.sum()
        seconds[0, number, first.span.first_stage : first.span.last_stage + 1] = share / together[number]
        site = swarm.sites[first.machine.site]
        name = site.name if len(own) == 1 else f"{site.name} and {len(own) - 1} more"
        if name not in sites:
            sites[name] = len(sites)
            links = [swarm.sites[holders[n].machine.site] for n in own]
            up.append(sum(s.up_bytes_per_s for s in links))
            down.append(sum(s.down_bytes_per_s for s in links))
        site_of[number] = sites[name]
    chosen = np.arange(len(members))
    problem = Problem(
        tuple(WorkerId(str(number)) for number in range(len(members))),
        seconds,
        np.array([costs.boundary_bytes(s, backward=False) for s in stages[:-1]], dtype=float),
        np.array([costs.boundary_bytes(s, backward=True) for s in stages[:-1]], dtype=float),
        site_of,
        tuple(sites),
        np.array(up),
        np.array(down),
        np.ones(len(members)),
        np.zeros(count),
        np.arange(len(members) + 1),
        np.array([holders[own[0]].span.first_stage for own in members]),
        np.array([holders[own[0]].span.last_stage for own in members]),
        np.zeros(len(members), dtype=np.int64),
    )
    return Gathered(problem, chosen, group, speed / together[group])
