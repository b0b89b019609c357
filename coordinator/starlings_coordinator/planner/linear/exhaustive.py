"""All choices at once, where they are few: the programme is asked until no other one can be better."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from starlings_coordinator.planner.linear.improve import LEAST_GAIN, Cuts, Found
from starlings_coordinator.planner.linear.node_form import solve
from starlings_coordinator.planner.linear.problem import IDLE, Floats, Problem

CHOICES_MOST = 150_000


def few_choices(problem: Problem) -> bool:
    return math.prod(max(1, int(n)) for n in np.diff(problem.starts)) <= CHOICES_MOST


def best_of_all(problem: Problem, found: Found, cuts: Cuts, programmes: int) -> Iterator[Found]:
    """Better and better choices; the last is the best there is (as far as the surrogate bounds), if programmes suffice.

    Holding more never hurts here, so that idle workers are only those without an option.
    """
    able = [w for w in range(problem.workers) if problem.starts[w] < problem.starts[w + 1]]
    shape = tuple(int(problem.starts[w + 1] - problem.starts[w]) for w in able)

    def surrogate(cut: int) -> Floats:
        sums = np.full(1, cuts.links[cut])
        for w in able:
            worth = cuts.worth[cut, problem.starts[w] : problem.starts[w + 1]]
            sums = (sums[:, None] + worth[None, :]).ravel()
        return sums

    most = surrogate(0)
    for cut in range(1, len(cuts.worth)):
        most = np.minimum(most, surrogate(cut))
    best = found
    while programmes > 0:
        index = int(np.argmax(most))
        if most[index] <= best.rate * (1 + LEAST_GAIN):
            return
        most[index] = 0.0
        choice = np.full(problem.workers, IDLE)
        for w, option in zip(able, np.unravel_index(index, shape), strict=True):
            choice[w] = problem.starts[w] + int(option)
        tried = Found(choice, solve(problem, choice))
        programmes -= 1
        if tried.flow.prices is not None:
            cuts.add(tried.flow.prices)
            most = np.minimum(most, surrogate(len(cuts.worth) - 1))
        if tried.rate > best.rate * (1 + LEAST_GAIN):
            best = tried
            yield best
