"""First choices of spans: what the relaxed programme says, rounded, and greedy ones that need no programme."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from starlings_coordinator.planner.linear.problem import IDLE, Floats, Ints, Problem
from starlings_coordinator.planner.linear.relaxed import Relaxed


def rounded(problem: Problem, relaxed: Relaxed, worth: Floats, offset: float) -> Ints:
    """Each worker takes one of the runs among which its site divides its time in the relaxed programme.

    Alike sites together keep to the shares: the j-th of m takes the run at (j + offset) / m of their sum. The worker's
    option is the one worth most of those that have the whole run, the longest of equals.

    Args:
        worth: of each option at the relaxed programme's prices.
        offset: 0 to 1.
    """
    choice = np.full(problem.workers, IDLE)
    members: dict[int, list[int]] = {}
    for worker in range(problem.workers):
        members.setdefault(int(relaxed.player[problem.site[worker]]), []).append(worker)
    for player, workers in sorted(members.items()):
        first, last = np.nonzero(relaxed.share[player])
        sums = np.cumsum(relaxed.share[player][first, last])
        sites = list(dict.fromkeys(int(problem.site[w]) for w in workers))
        for position, site in enumerate(sites):
            run = None
            if len(sums) and sums[-1] > 0:
                found = int(np.searchsorted(sums, sums[-1] * (position + offset) / len(sites)))
                found = min(found, len(sums) - 1)
                run = int(first[found]), int(last[found])
            together = [w for w in workers if problem.site[w] == site]
            if len(together) == 1:
                choice[together[0]] = _option_with(problem, worth, together[0], run)
            else:
                _fill_site(problem, run or (0, problem.stages - 1), together, choice)
    return choice


def _option_with(problem: Problem, worth: Floats, worker: int, run: tuple[int, int] | None) -> int:
    options = range(int(problem.starts[worker]), int(problem.starts[worker + 1]))

    def rank(option: int) -> tuple[int, float, int, int]:
        first, last = int(problem.first[option]), int(problem.last[option])
        common = 0 if run is None else max(0, min(last, run[1]) - max(first, run[0]) + 1)
        return common, float(f"{worth[option]:.6g}"), last - first, -first

    return max(options, key=rank, default=IDLE)


def _fill_site(problem: Problem, run: tuple[int, int], workers: Sequence[int], choice: Ints) -> None:
    """A site's workers cover its run in consecutive spans; the others go where most of the run's work is left."""
    laid, _ = lay_from(problem, workers, run[0], run[1] + 1)
    speed = {w: float(np.mean(1 / problem.seconds[0, w])) for w in workers}
    left = np.zeros(problem.stages)
    left[run[0] : run[1] + 1] = sum(speed.values()) / (run[1] - run[0] + 1)

    def take(worker: int, option: int) -> None:
        choice[worker] = option
        span = slice(max(int(problem.first[option]), run[0]), min(int(problem.last[option]), run[1]) + 1)
        if span.start < span.stop:
            left[span] -= speed[worker] / (span.stop - span.start)

    for worker, option in laid.items():
        take(worker, option)
    for worker in sorted(workers, key=lambda w: (-speed[w], w)):
        options = range(int(problem.starts[worker]), int(problem.starts[worker + 1]))
        if worker not in laid and options:

            def gain(option: int) -> float:
                return float(np.maximum(left[problem.first[option] : problem.last[option] + 1], 0).sum())

            take(worker, max(options, key=lambda o: (gain(o), -o)))


def covering(problem: Problem, cuts: Floats, rng: random.Random | None = None) -> Ints:
    """Speed first: each worker in turn takes the option that raises the lowest of `cuts` most, softly.

    Args:
        cuts: [k, o]: estimates of what each option adds to F (`improve.Cuts`).
        rng: for an order drawn instead.
    """
    speed = np.mean(1 / problem.seconds[0], axis=1)
    order = sorted(range(problem.workers), key=lambda w: (-speed[w], w))
    if rng is not None:
        rng.shuffle(order)
    sums = np.zeros(len(cuts))
    choice = np.full(problem.workers, IDLE)
    typical = np.maximum(cuts.mean(axis=1), 1e-300)
    for worker in order:
        options = slice(int(problem.starts[worker]), int(problem.starts[worker + 1]))
        if options.start == options.stop:
            continue
        levels = (sums[:, None] + cuts[:, options]) / typical[:, None]
        best = options.start + int(np.argmax(-np.sum(1 / (levels + 1.0), axis=0)))
        choice[worker] = best
        sums += cuts[:, best]
    return choice


def islands(problem: Problem, base: Ints) -> Ints | None:
    """`base`, but sites that can hold the whole model hold it in consecutive spans; None where there is none."""
    choice, changed = base.copy(), False
    for site in np.flatnonzero(problem.site_sizes > 1):
        workers = [int(w) for w in np.flatnonzero(problem.site == site)]
        laid = _lay(problem, workers)
        if laid is not None:
            changed = True
            for worker, option in laid.items():
                choice[worker] = option
    return choice if changed and not np.array_equal(choice, base) else None


def _lay(problem: Problem, workers: Sequence[int]) -> dict[int, int] | None:
    laid, end = lay_from(problem, workers, 0, problem.stages)
    return laid if end == problem.stages else None


def lay_from(problem: Problem, workers: Sequence[int], stage: int, end: int) -> tuple[dict[int, int], int]:
    """Consecutive spans from `stage` to before `end`, who reaches furthest first.

    Returns each used worker's option, and the stage behind the last that they reach.
    """
    laid: dict[int, int] = {}
    while stage < end:
        reach = [
            (int(problem.last[o]), -int(problem.first[o]), -w, o)
            for w in workers
            if w not in laid
            for o in range(int(problem.starts[w]), int(problem.starts[w + 1]))
            if problem.first[o] <= stage <= problem.last[o]
        ]
        if not reach:
            break
        last, _, worker, option = max(reach)
        laid[-worker] = option
        stage = last + 1
    return laid, stage


def repaired(problem: Problem, choice: Ints) -> Ints | None:
    """A choice that covers every stage, near `choice`: bare stages are taken by whoever leaves no other stage bare.

    Where nobody can without another stage falling bare, chains of moves are followed (breadth first); None when there
    is no such chain.
    """
    choice = choice.copy()
    for _ in range(2 * problem.stages + 1):
        counts = problem.covered(choice)
        bare = np.flatnonzero(counts == 0)
        if not len(bare):
            return choice
        moved = _chain(problem, choice, counts, int(bare[0]))
        if moved is None:
            return None
        for option in moved:
            choice[problem.owner[option]] = option
    return None


def _chain(problem: Problem, choice: Ints, counts: Ints, stage: int) -> list[int] | None:
    """Moves after which `stage` has a holder and nothing that had one is bare. Each worker moves once at most."""
    frontier: list[tuple[int, tuple[int, ...]]] = [(stage, ())]
    tried = {stage}
    while frontier:
        following = []
        for target, moves in frontier:
            moving = {int(problem.owner[o]) for o in moves}
            for option in np.flatnonzero((problem.first <= target) & (problem.last >= target)):
                worker = int(problem.owner[option])
                if worker in moving:
                    continue
                left = counts.copy()
                held = choice[worker]
                if held >= 0:
                    left[problem.first[held] : problem.last[held] + 1] -= 1
                left[problem.first[option] : problem.last[option] + 1] += 1
                newly = np.flatnonzero((left == 0) & (counts > 0))
                if not len(newly):
                    return [*moves, int(option)]
                if len(newly) == 1 and int(newly[0]) not in tried:
                    tried.add(int(newly[0]))
                    following.append((int(newly[0]), (*moves, int(option))))
        frontier = following
    return None
