"""A standing plan's accounts with a change in them: where moves are tried. Changes itself; one per question."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from starlings_coordinator.planner.linear.improve import LEAST_GAIN, SOFTNESS, soft_least
from starlings_coordinator.planner.linear.migration import Links
from starlings_coordinator.planner.linear.problem import IDLE, Bools, Floats, Ints, Problem
from starlings_coordinator.planner.linear.standing import Standing
from starlings_protos.messages import PlanWorker, Span, WorkerId

# Moves that are looked at closely, of those that help where F is lowest.
LOOKED_AT = 256


@dataclass(frozen=True, slots=True)
class Change:
    """What happened. `measured`: workers that came, or that are as described now; `left`: who is gone."""

    measured: tuple[PlanWorker, ...] = ()
    left: frozenset[WorkerId] = frozenset()


class Board:
    """Options of workers that came or changed stand behind all others; those that they had before are out."""

    def __init__(self, plan: Standing, change: Change) -> None:
        problem = plan.problem
        place = {worker_id: number for number, worker_id in enumerate(problem.worker_ids)}
        self.plan = plan
        self.ids: list[WorkerId] = list(problem.worker_ids)
        self.first, self.last, self.owner = problem.first, problem.last, problem.owner
        self.worth = plan.worth
        self.site, self.links = problem.site, _links(plan)
        # Who holds what after the change and, as moves are made, after them.
        self.now: Ints = plan.choice.copy()
        self.newcomers: list[int] = []
        # What accounts say of the plan as it stood is what the programme said of it.
        self._scale = plan.rate / max(float(self.sums().min()), 1e-300)
        self.now[[place[w] for w in change.left if w in place]] = IDLE
        out = {*change.left, *(worker.worker_id for worker in change.measured)}
        self._out: Bools = np.isin(self.owner, [place[w] for w in out if w in place])
        if change.measured:
            self._add(plan.problem_of(change.measured), place)

    def _add(self, own: Problem, place: Mapping[WorkerId, int]) -> None:
        base, there = len(self.first), len(self.ids)
        self.newcomers = [there + n for n in range(sum(w not in place for w in own.worker_ids))]
        self.ids += [w for w in own.worker_ids if w not in place]
        place = {**place, **{self.ids[n]: n for n in self.newcomers}}
        numbers = np.array([place[w] for w in own.worker_ids])
        self.worth = np.hstack([self.worth, self.plan.worth_in(own)])
        self.first, self.last = np.append(self.first, own.first), np.append(self.last, own.last)
        self.owner = np.append(self.owner, numbers[own.owner])
        self._out = np.append(self._out, np.zeros(len(own.first), bool))
        self.now = np.append(self.now, np.full(len(self.newcomers), IDLE))
        self.site = np.append(self.site, np.full(len(self.newcomers), -1))
        self._add_sites(own, numbers)
        for number, at in enumerate(numbers):
            was = int(self.now[at])
            if was >= 0:
                mine = base + np.flatnonzero(own.owner == number)
                same = (self.first[mine] == self.first[was]) & (self.last[mine] == self.last[was])
                self.now[at] = int(mine[np.flatnonzero(same)[0]])

    def _add_sites(self, own: Problem, numbers: Ints) -> None:
        """A site that nobody was at has a link that carries nothing yet."""
        known = {name: number for number, name in enumerate(self.plan.problem.site_names)}
        new = [g for g, name in enumerate(own.site_names) if name not in known]
        known |= {own.site_names[g]: self.plan.problem.sites + n for n, g in enumerate(new)}
        self.site[numbers] = [known[own.site_names[g]] for g in own.site]
        self.links = self.links.with_more(own.up[new], own.down[new])

    # ------------------------------------------------------------------ what it is worth

    def sums(self, without: Sequence[int] = ()) -> Floats:
        """[k]: what all hold is worth by each account."""
        held = self.now.copy()
        held[list(without)] = IDLE
        return np.asarray(self.worth[:, held[held >= 0]].sum(axis=1))

    def rate(self, without: Sequence[int] = ()) -> float:
        """Microbatches/s as the accounts have it: rather too high."""
        return self._scale * max(0.0, float(self.sums(without).min()))

    def best_move(self, movers: Collection[int] | None = None) -> int | None:
        """The option that lifts the lowest accounts most; None where none does.

        Args:
            movers: only these workers; else whoever is there.
        """
        rate, sums = self.plan.rate, self.sums()
        mine = ~self._out
        if movers is not None:
            mine = mine & np.isin(self.owner, list(movers))
        options = np.flatnonzero(mine)
        held = self.now[self.owner]
        row = int(np.argmin(sums))
        before = np.where(held >= 0, self.worth[row, held], 0.0)
        gain = self.worth[row, options] - before[options]
        near = options[np.argsort(-gain, kind="stable")[:LOOKED_AT]]
        near = near[near != held[near]]
        if not len(near):
            return None
        change = self.worth[:, near] - np.where(held[near] >= 0, self.worth[:, held[near]], 0.0)
        scale = SOFTNESS * max(rate, 1e-300)
        rise = soft_least(sums[:, None] + change, scale) - float(soft_least(sums, scale))
        best = int(np.argmax(rise))
        return int(near[best]) if rise[best] > LEAST_GAIN * rate else None

    # ------------------------------------------------------------------ who holds what

    def span(self, option: int) -> Span | None:
        return Span(int(self.first[option]), int(self.last[option])) if option >= 0 else None

    def holders(self, choice: Ints) -> dict[WorkerId, Span]:
        spans = ((self.ids[n], self.span(int(option))) for n, option in enumerate(choice))
        return {worker_id: span for worker_id, span in spans if span is not None}

    def donors(self, choice: Ints, stages: Collection[int]) -> dict[int, list[int]]:
        """By stage, the sites of its holders, an entry per holder."""
        held = np.flatnonzero(choice >= 0)
        first, last = self.first[choice[held]], self.last[choice[held]]
        return {s: self.site[held[(first <= s) & (s <= last)]].tolist() for s in stages}


def _links(plan: Standing) -> Links:
    problem, flow = plan.problem, plan.flow
    nothing = np.zeros(problem.sites)
    worth = (nothing, nothing) if flow.prices is None else (flow.prices.up, flow.prices.down)
    return Links(
        problem.up, problem.down, flow.up_bytes_per_s(problem), flow.down_bytes_per_s(problem), *worth
    )
