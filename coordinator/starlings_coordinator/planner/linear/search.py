"""The spans of one cut: seeds, the best of them by the linear programme, then local search. Any-time, by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from starlings_coordinator.planner.linear.exhaustive import best_of_all, few_choices
from starlings_coordinator.planner.linear.improve import Cuts, Found, improve
from starlings_coordinator.planner.linear.node_form import solve
from starlings_coordinator.planner.linear.problem import Problem
from starlings_coordinator.planner.linear.relaxed import Relaxed, relax
from starlings_coordinator.planner.linear.seeds import covering, islands, repaired, rounded
from starlings_coordinator.planner.linear.values import option_values

# A choice this near the relaxed programme's bound is not improved.
NEAR_ENOUGH = 0.995


def search(
    problem: Problem, *, seed: int, programmes: int, relaxed: Relaxed | None = None
) -> Iterator[Found]:
    """Better and better choices; none at all when no way was found to cover every stage.

    Args:
        programmes: how many linear programmes may be asked at most; nearly all the time goes there.
        relaxed: of this problem, where it is known already.
    """
    relaxed = relaxed or relax(problem)
    if relaxed is None:
        return
    rng = random.Random(seed)
    few = few_choices(problem)
    cuts = Cuts(problem, sure=few)
    cuts.add(relaxed.prices)
    worth = option_values(problem, relaxed.prices)
    half = rounded(problem, relaxed, worth, 0.5)
    candidates = [half, islands(problem, half), covering(problem, cuts.worth)]
    best: Found | None = None
    seen: set[bytes] = set()
    for candidate in candidates:
        choice = None if candidate is None else repaired(problem, candidate)
        if choice is None or choice.tobytes() in seen or programmes <= 0:
            continue
        seen.add(choice.tobytes())
        found = Found(choice, solve(problem, choice))
        programmes -= 1
        if found.flow.prices is not None:
            cuts.add(found.flow.prices)
        if best is None or found.rate > best.rate:
            best = found
            yield best
        if best.rate >= NEAR_ENOUGH * relaxed.rate:
            return
    if best is None:
        return
    more = (
        best_of_all(problem, best, cuts, programmes) if few else improve(problem, best, cuts, rng, programmes)
    )
    for found in more:
        yield found
        if found.rate >= NEAR_ENOUGH * relaxed.rate:
            return
