"""A plan that is in force, with all that amendments are priced by, so that pricing one asks no programme.

`worth[k, o]` has what option o is worth in F by account k. The first accounts, one per stage, say what all who hold a
stage can do there at most; the others are at prices of linear programmes: of this plan, and of its relaxation, which
has no spans and so knows what would be scarce elsewhere. Each bounds what a choice reaches (`improve`), and together
they see both what binds now and what would bind next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.node_form import Flow, Prices, solve
from starlings_coordinator.planner.linear.problem import (
    IDLE,
    Floats,
    Ints,
    Problem,
    build_problem,
    need_table,
)
from starlings_coordinator.planner.linear.relaxed import relax
from starlings_coordinator.planner.linear.values import carried_over, option_values, stage_values
from starlings_protos.messages import PlanWorker, Span, WorkerId


@dataclass(frozen=True, eq=False)
class Standing:
    """`fleet.workers` hold what `choice` says. `copied[s]`: bytes of a replica of stage s as a newcomer copies it."""

    fleet: Fleet
    codec: str
    problem: Problem
    needs: Floats
    choice: Ints
    flow: Flow
    prices: tuple[Prices, ...]
    worth: Floats
    copied: Floats

    @property
    def rate(self) -> float:
        """Microbatches/s."""
        return self.flow.rate

    @property
    def holders(self) -> dict[WorkerId, Span]:
        return {
            worker_id: self.problem.span_of(int(option))
            for worker_id, option in zip(self.problem.worker_ids, self.choice, strict=True)
            if option >= 0
        }

    def problem_of(self, workers: Sequence[PlanWorker]) -> Problem:
        """The same cut for some workers alone, who may hold what they hold or take another span."""
        request = replace(self.fleet.request, workers=tuple(workers))
        return build_problem(
            Fleet(request, self.fleet.profile), request.stages, self.codec, needs=self.needs, movable=True
        )

    def worth_in(self, problem: Problem) -> Floats:
        """[k, o]: what the options of another problem with the same cut are worth, by all accounts."""
        return worths(problem, [carried_over(self.problem, problem, prices) for prices in self.prices])


def worths(problem: Problem, prices: Iterable[Prices]) -> Floats:
    return np.vstack([stage_values(problem), *(option_values(problem, known) for known in prices)])


def standing(fleet: Fleet, codec: str, copied: Floats) -> Standing:
    """What the workers of `fleet` hold (`PlanWorker.held`), in the cut of its request, with its flow and prices.

    It takes two linear programmes: seconds for a thousand workers, in the background.

    Args:
        codec: what boundaries travel in (`[pipeline] codec`).
        copied: per stage.

    Raises:
        ArithmeticError: the solver gave up.
        ValueError: the request has no cut, or nobody can hold some stage.
    """
    stages = fleet.request.stages
    if len(copied) != len(stages) or not stages:
        raise ValueError(f"{len(copied)} sizes for {len(stages)} stages: a plan that stands has a cut")
    needs = need_table(fleet, stages)
    problem = build_problem(fleet, stages, codec, needs=needs, movable=True)
    choice = np.array([_option_of(problem, n, worker.held) for n, worker in enumerate(fleet.workers)])
    flow, relaxed = solve(problem, choice), relax(problem)
    if relaxed is None:
        raise ValueError("nobody can hold some stage")
    prices = tuple(known for known in (flow.prices, relaxed.prices) if known is not None)
    return Standing(fleet, codec, problem, needs, choice, flow, prices, worths(problem, prices), copied)


def _option_of(problem: Problem, worker: int, held: Span | None) -> int:
    if held is None:
        return IDLE
    own = slice(int(problem.starts[worker]), int(problem.starts[worker + 1]))
    same = (problem.first[own] == held.first_stage) & (problem.last[own] == held.last_stage)
    return own.start + int(np.flatnonzero(same)[0])
