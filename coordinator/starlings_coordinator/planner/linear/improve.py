"""Local search over spans on an incremental surrogate; the linear programme judges, and its prices teach the surrogate.

Prices from anywhere bound what a choice reaches: F <= sum over workers of what their spans are worth at those prices
(weak duality). Several of them at once, softly, are the surrogate: a table of worths per cut and option, so that the
effect of a move is one addition, and no plateau anywhere. The best choice by the surrogate goes to the programme; its
prices become a further cut, which corrects the surrogate where it was too hopeful (Benders' decomposition, with local
search in place of the master programme).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from starlings_coordinator.planner.linear.node_form import Flow, Prices, solve
from starlings_coordinator.planner.linear.problem import Floats, Ints, Problem
from starlings_coordinator.planner.linear.seeds import lay_from, repaired
from starlings_coordinator.planner.linear.values import option_values, stage_values

# How far above the lowest cut another one still counts, in parts of F.
SOFTNESS = 0.01
CUTS_MOST = 60
# Moves of two workers at once are tried where there are so few options.
PAIRS_OPTIONS_MOST = 160
# A gain below this part of F is none.
LEAST_GAIN = 1e-6


@dataclass(frozen=True, eq=False)
class Found:
    choice: Ints
    flow: Flow

    @property
    def rate(self) -> float:
        return self.flow.rate


class Cuts:
    """[k, o]: what option o is worth in F at the prices of cut k; never too low where `sure`."""

    def __init__(self, problem: Problem, *, sure: bool = False) -> None:
        self.problem = problem
        self.sure = sure
        self.worth: Floats = np.zeros((0, len(problem.first)))
        # What shared links are worth beside the workers.
        self.links: Floats = np.zeros(0)
        # The first cuts keep every stage covered: each says what all who hold a stage can do there at most.
        self.kept = problem.stages
        self._site_moves: list[Ints] | None = None
        if sure:
            for stage in range(problem.stages):
                self.add(_flat(problem, (np.arange(problem.stages + 1) > stage).astype(float)))
        else:
            self.worth, self.links = stage_values(problem), np.zeros(problem.stages)

    def add(self, prices: Prices) -> None:
        shared = self.problem.site_sizes > 1
        links = float(np.sum((prices.up + prices.down)[shared]))
        self.worth = np.vstack([self.worth, option_values(self.problem, prices, sure=self.sure)])
        self.links = np.append(self.links, links)

    def site_moves(self) -> list[Ints]:
        """For each site of several workers and each stage, an option for each of them: consecutive from there on."""
        if self._site_moves is None:
            self._site_moves = []
            for site in np.flatnonzero(self.problem.site_sizes > 1):
                workers = [int(w) for w in np.flatnonzero(self.problem.site == site)]
                for stage in range(self.problem.stages):
                    moves: dict[int, int] = {}
                    end = self.problem.stages
                    while laid := lay_from(self.problem, [w for w in workers if w not in moves], stage, end)[
                        0
                    ]:
                        moves |= laid
                    if moves:
                        self._site_moves.append(np.array(sorted(moves.values())))
        return self._site_moves

    def sums(self, choice: Ints) -> Floats:
        return np.asarray(self.worth[:, choice[choice >= 0]].sum(axis=1) + self.links)

    def prune(self, choice: Ints) -> None:
        """Forget the cuts that are furthest from binding."""
        if len(self.worth) > CUTS_MOST:
            order = np.argsort(self.sums(choice)[self.kept :], kind="stable")
            keep = np.sort(order[: (CUTS_MOST - self.kept) * 3 // 4]) + self.kept
            keep = np.concatenate([np.arange(self.kept), keep])
            self.worth, self.links = self.worth[keep], self.links[keep]


def _flat(problem: Problem, value: Floats) -> Prices:
    zeros = np.zeros(problem.sites)
    nothing = np.full((problem.sites, problem.stages + 1), np.nan)
    return Prices(value, nothing, np.zeros(problem.workers), zeros, zeros)


def soft_least(sums: Floats, scale: float) -> Floats:
    """Near the least along axis 0, and higher the fewer sums are near it."""
    least = sums.min(axis=0)
    return np.asarray(least - scale * np.log(np.exp(-(sums - least) / scale).sum(axis=0)))


def improve(
    problem: Problem, found: Found, cuts: Cuts, rng: random.Random, programmes: int
) -> Iterator[Found]:
    """Better and better choices, until `programmes` linear programmes are asked or nothing is left to try."""
    best = current = found
    seen = {found.choice.tobytes()}
    radius = max(2, problem.workers // 6)
    quiet = 0
    while programmes > 0:
        proposal = _climb(problem, current.choice, cuts, max(current.rate, 1e-300), radius, seen)
        if proposal is None:
            if radius > 1:
                radius = 1 if radius < 4 else radius // 4
                continue
            quiet += 1
            if quiet > 12:
                return
            proposal = _kick(problem, best.choice, cuts, rng)
            if proposal is None or proposal.tobytes() in seen:
                continue
            current = best
        seen.add(proposal.tobytes())
        flow = solve(problem, proposal)
        programmes -= 1
        if flow.prices is not None:
            cuts.add(flow.prices)
            cuts.prune(current.choice)
        tried = Found(proposal, flow)
        if tried.rate > current.rate * (1 + LEAST_GAIN):
            current = tried
            radius = min(problem.workers, radius + radius // 2 + 1)
        else:
            radius = max(1, radius // 2)
        if tried.rate > best.rate * (1 + LEAST_GAIN):
            best, quiet = tried, 0
            yield best


def _climb(
    problem: Problem, choice: Ints, cuts: Cuts, rate: float, radius: int, seen: set[bytes]
) -> Ints | None:
    """Up to `radius` workers moved, each move the best by the surrogate; None when no move is better or new."""
    scale = SOFTNESS * rate
    choice = choice.copy()
    sums = cuts.sums(choice)
    start = float(soft_least(sums, scale))
    score, moved = start, 0
    together = max(1, radius // 8)
    now = choice[problem.owner]
    # Whoever moved does not move again, so that this stays right for all that may still move.
    change = cuts.worth - np.where(now >= 0, cuts.worth[:, now], 0.0)
    movable = now != np.arange(len(now))
    while moved < radius:
        floor = score + LEAST_GAIN * rate
        # The soft least is never above the least, which is found faster and rules nearly all out.
        tried = np.flatnonzero(movable & ((sums[:, None] + change).min(axis=0) > floor))
        if not len(tried):
            break
        scores = np.full(len(now), -np.inf)
        scores[tried] = soft_least(sums[:, None] + change[:, tried], scale)
        taken = _first_of_each(problem, scores, floor, min(together, radius - moved))
        while len(taken):
            total = sums + change[:, taken].sum(axis=1)
            after = float(soft_least(total, scale))
            if after > score + LEAST_GAIN * rate:
                break
            taken = taken[: len(taken) // 2]
        if not len(taken):
            break
        choice[problem.owner[taken]] = taken
        movable &= ~np.isin(problem.owner, problem.owner[taken])
        sums, score, moved = total, after, moved + len(taken)
    if moved and choice.tobytes() not in seen:
        return choice
    laid = _lay_site(problem, choice, cuts, scale, seen)
    if laid is not None:
        return laid
    if len(problem.first) <= PAIRS_OPTIONS_MOST:
        return _best_pair(problem, choice, cuts, scale, seen)
    return None


def _first_of_each(problem: Problem, scores: Floats, floor: float, most: int) -> Ints:
    """The best option of each of the `most` workers that gain most."""
    good = np.flatnonzero(scores > floor)
    if not len(good):
        return good
    if most == 1:
        return good[[int(np.argmax(scores[good]))]]
    ranked = good[np.argsort(-scores[good], kind="stable")]
    _, position = np.unique(problem.owner[ranked], return_index=True)
    return np.asarray(ranked[np.sort(position)[:most]])


def _lay_site(problem: Problem, choice: Ints, cuts: Cuts, scale: float, seen: set[bytes]) -> Ints | None:
    """All workers of a site at once, in consecutive spans from some stage on: what no single move leads to.

    Whoever is left begins at that stage again, as the next pipeline beside the first.
    """
    sums = cuts.sums(choice)
    best, best_score = None, float(soft_least(sums, scale)) + LEAST_GAIN * scale
    for moves in cuts.site_moves():
        owners = problem.owner[moves]
        now = choice[owners]
        change = cuts.worth[:, moves].sum(axis=1) - cuts.worth[:, now[now >= 0]].sum(axis=1)
        score = float(soft_least(sums + change, scale))
        if score > best_score:
            moved = choice.copy()
            moved[owners] = moves
            if moved.tobytes() not in seen:
                best, best_score = moved, score
    return best


def _best_pair(problem: Problem, choice: Ints, cuts: Cuts, scale: float, seen: set[bytes]) -> Ints | None:
    """Two workers moved at once; the best by the surrogate that was not asked about yet, if it is better at all."""
    now = choice[problem.owner]
    change = cuts.worth - np.where(now >= 0, cuts.worth[:, now], 0.0)
    sums = cuts.sums(choice)
    floor = float(soft_least(sums, scale)) + LEAST_GAIN * scale
    scores = soft_least(sums[:, None, None] + change[:, :, None] + change[:, None, :], scale)
    scores[problem.owner[:, None] >= problem.owner[None, :]] = -np.inf
    for flat in np.argsort(-scores, axis=None, kind="stable")[:32]:
        one, two = np.unravel_index(flat, scores.shape)
        if scores[one, two] <= floor:
            return None
        moved = choice.copy()
        moved[problem.owner[one]], moved[problem.owner[two]] = one, two
        if moved.tobytes() not in seen:
            return moved
    return None


def _kick(problem: Problem, choice: Ints, cuts: Cuts, rng: random.Random) -> Ints | None:
    """A few workers moved at random, to get out of a local best."""
    moved = choice.copy()
    able = np.flatnonzero(np.diff(problem.starts) > 1)
    if not len(able):
        return None
    for worker in rng.sample([int(w) for w in able], min(len(able), 2 + problem.workers // 50)):
        moved[worker] = rng.randrange(int(problem.starts[worker]), int(problem.starts[worker + 1]))
    return repaired(problem, moved)
