"""`plan_with_links`: cut and spans for a swarm whose links count, with bounds. Pure, by seed, any-time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from starlings_coordinator.planner.cuts import balanced_cut
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.bounds import (
    Bounds,
    binding_words,
    bounds_of,
    compute_bound,
    memory_bound,
)
from starlings_coordinator.planner.linear.improve import Found
from starlings_coordinator.planner.linear.problem import Problem, build_problem
from starlings_coordinator.planner.linear.relaxed import Relaxed, relax
from starlings_coordinator.planner.linear.search import search
from starlings_protos.messages import Stage

# Of cuts whose bounds are this near each other, the coarsest is taken: each boundary costs transfers.
CUTS_ALIKE = 0.01
# The finest cut that is tried: finer ones gain little, and linear programmes take longer.
STAGES_MOST = 42
# Where links do not bind programmes are easier: so many take as long as one where they do.
PROGRAMMES_WITHOUT_LINKS = 2
# Links bind where they are worth this part of F to the relaxed programme.
LINKS_BIND = 0.01
# How much finer each cut that is tried is than the one before.
FINER = 1.6


@dataclass(frozen=True, eq=False)
class LinkPlan:
    """`bounds.all` is never below `found.rate`."""

    stages: tuple[Stage, ...]
    problem: Problem
    found: Found
    bounds: Bounds

    @property
    def part_of_bound(self) -> float:
        return self.found.rate / self.bounds.all

    @property
    def binding(self) -> str:
        return binding_words(self.problem, self.found.flow, self.bounds)


@dataclass(frozen=True, eq=False)
class _Cut:
    stages: tuple[Stage, ...]
    problem: Problem
    relaxed: Relaxed


def plan_with_links(fleet: Fleet, *, codec: str, seed: int, programmes: int) -> Iterator[LinkPlan]:
    """Better and better plans; none when no way was found to hold every stage. The last is the answer.

    Equal arguments give equal plans. Whoever has no time left stops asking: each plan is whole by itself.

    Args:
        codec: what boundaries travel in (`[pipeline] codec`).
        programmes: linear programmes with links for the search at most, over all cuts.
    """
    cuts = _cuts(fleet, codec)
    if not cuts:
        return
    compute, memory = compute_bound(fleet), memory_bound(fleet)
    best = 0.0
    while cuts and programmes > 0:
        most = max(cut.relaxed.rate for cut in cuts)
        cut = next(c for c in cuts if c.relaxed.rate >= most * (1 - CUTS_ALIKE))
        cuts.remove(cut)
        bounds = bounds_of(cut.problem, cut.relaxed, compute, memory)
        worth = float(cut.relaxed.prices.up.sum() + cut.relaxed.prices.down.sum())
        free = worth < LINKS_BIND * cut.relaxed.rate
        allowed = PROGRAMMES_WITHOUT_LINKS * programmes if free else programmes
        for found in search(cut.problem, seed=seed, programmes=allowed, relaxed=cut.relaxed):
            if found.rate > best:
                best = found.rate
                yield LinkPlan(cut.stages, cut.problem, found, bounds)
        if best > 0:
            return


def _cuts(fleet: Fleet, codec: str) -> list[_Cut]:
    """Cuts that somebody can hold every stage of, fewest stages first."""
    cuts = []
    for stages in [fleet.request.stages] if fleet.request.stages else _stages_to_try(fleet):
        problem = build_problem(fleet, stages, codec)
        relaxed = relax(problem)
        if relaxed is not None:
            cuts.append(_Cut(stages, problem, relaxed))
    return cuts


def _stages_to_try(fleet: Fleet) -> list[tuple[Stage, ...]]:
    blocks = len(fleet.profile.blocks)
    wanted = fleet.request.stages_wanted
    most = wanted or min(blocks, STAGES_MOST, fleet.request.stages_most or blocks)
    counts = [most]
    while not wanted and len(counts) < 3 and counts[-1] > 1:
        counts.append(max(1, int(counts[-1] / FINER)))
    times, sizes = fleet.typical_block_seconds(), fleet.block_bytes()
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    mixed = [t / mean_time + s / mean_size for t, s in zip(times, sizes, strict=True)]
    return [balanced_cut(mixed, count) for count in sorted(set(counts) & set(range(1, blocks + 1)) | {most})]
