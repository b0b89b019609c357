"""The linear programme of a choice of spans, without pairs of workers as variables (design, section 5).

Only sites have rates, so who sends to whom does not matter: it is enough to know what leaves and enters each site at
each boundary. `edge_form` has the pairs; both have the same optimum.

    maximise F = sum_w x[w, 0]
    x[g, s] + in[g, s] = x[g, s+1] + out[g, s]         for each site g and boundary s, x[g, s] summed over its workers
    sum_g out[g, s] = sum_g in[g, s]                   for each boundary
    sum_s seconds[w, s] x[w, s] <= 1                   for each worker
    sum_s forward[s] out[g, s] + backward[s] in[g, s] <= up[g]      for each site; down[g] with out and in exchanged
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from starlings_coordinator.planner.linear.problem import Bools, Floats, Ints, Problem


@dataclass(frozen=True, eq=False)
class Entries:
    """All pairs of a worker and a stage of its chosen span."""

    worker: Ints
    stage: Ints
    seconds: Floats

    @classmethod
    def of(cls, problem: Problem, choice: Ints) -> Entries:
        workers = np.flatnonzero(choice >= 0)
        options = choice[workers]
        lengths = problem.last[options] - problem.first[options] + 1
        worker = np.repeat(workers, lengths)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        stage = np.repeat(problem.first[options], lengths) + within
        return cls(worker, stage, problem.seconds[np.repeat(problem.mode[options], lengths), worker, stage])


@dataclass(frozen=True, eq=False)
class Prices:
    """What the programme would pay. All in parts of F: together the resources are worth F (strong duality).

    `value[s]`: of a microbatch that has passed stages 0..s-1, between 0 (nothing done) and 1 (all done). At the sites
    whose links are limited it may differ, `site_value[g, s]`; NaN where nobody of g holds stages at that boundary.
    """

    value: Floats
    site_value: Floats
    # Gain in F per further whole worker (one more of its seconds each second), up rate, down rate.
    compute: Floats
    up: Floats
    down: Floats


@dataclass(frozen=True, eq=False)
class Flow:
    """F in microbatches/s, and how it comes about. `leaving[g, s]`, `entering[g, s]`: across boundary s, per second."""

    rate: float
    entries: Entries
    # Microbatches/s per entry.
    share: Floats
    leaving: Floats
    entering: Floats
    prices: Prices | None

    def load(self, problem: Problem) -> Floats:
        """[w]: seconds of work per second."""
        work = self.share * self.entries.seconds
        return np.asarray(np.bincount(self.entries.worker, work, minlength=problem.workers), dtype=np.float64)

    def up_bytes_per_s(self, problem: Problem) -> Floats:
        return np.asarray(self.leaving @ problem.forward_bytes + self.entering @ problem.backward_bytes)

    def down_bytes_per_s(self, problem: Problem) -> Floats:
        return np.asarray(self.entering @ problem.forward_bytes + self.leaving @ problem.backward_bytes)


def no_flow(problem: Problem, entries: Entries) -> Flow:
    nothing = np.zeros((problem.sites, max(0, problem.stages - 1)))
    return Flow(0.0, entries, np.zeros(len(entries.worker)), nothing, nothing, None)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Where each site and boundary has its balance: a row of its own, or the common one of the boundary."""

    holds: Bools
    own: Ints
    count: int

    @classmethod
    def of(cls, problem: Problem, entries: Entries) -> _Rows:
        holds = np.zeros((problem.sites, problem.stages), bool)
        holds[problem.site[entries.worker], entries.stage] = True
        # Row 0 is that of F, then one per boundary.
        common = np.arange(1, problem.stages)
        own = np.broadcast_to(common, (problem.sites, problem.stages - 1)).copy()
        there = (holds[:, :-1] | holds[:, 1:]) & problem.limited[:, None]
        own[there] = problem.stages + np.arange(there.sum())
        return cls(holds, own, problem.stages + int(there.sum()))


def solve(problem: Problem, choice: Ints) -> Flow:
    """The most that flows through `choice`; a rate of 0 and no prices when a stage has no holder.

    Raises:
        ArithmeticError: the solver gave up.
    """
    entries = Entries.of(problem, choice)
    if not problem.covered(choice).all():
        return no_flow(problem, entries)
    rows = _Rows.of(problem, entries)
    count, boundaries = len(entries.worker), problem.stages - 1
    site = problem.site[entries.worker]
    unit = 1 / float(np.median(entries.seconds))

    # Columns: the entries, then what leaves and enters limited sites, then F.
    own = rows.own >= problem.stages
    leave_site, leave_at = np.nonzero(own & rows.holds[:, :-1])
    enter_site, enter_at = np.nonzero(own & rows.holds[:, 1:])
    leave = count + np.arange(len(leave_site))
    enter = count + len(leave) + np.arange(len(enter_site))
    total = count + len(leave) + len(enter)
    done, begun = entries.stage < boundaries, entries.stage > 0
    starts = entries.stage == 0
    column = np.arange(count)
    balance = csr_matrix(
        (
            np.concatenate(
                [
                    np.ones(starts.sum()),
                    [-1.0],
                    np.ones(done.sum()),
                    -np.ones(begun.sum()),
                    -np.ones(len(leave)),
                    np.ones(len(leave)),
                    np.ones(len(enter)),
                    -np.ones(len(enter)),
                ]
            ),
            (
                np.concatenate(
                    [
                        np.zeros(starts.sum() + 1, np.int64),
                        rows.own[site[done], entries.stage[done]],
                        rows.own[site[begun], entries.stage[begun] - 1],
                        rows.own[leave_site, leave_at],
                        1 + leave_at,
                        rows.own[enter_site, enter_at],
                        1 + enter_at,
                    ]
                ),
                np.concatenate(
                    [column[starts], [total], column[done], column[begun], leave, leave, enter, enter]
                ),
            ),
        ),
        shape=(rows.count, total + 1),
    )
    # Resources, each as a part of what there is: workers, then up and down of limited sites.
    active, worker_row = np.unique(entries.worker, return_inverse=True)
    up_row, up_sites = _rate_rows(problem, problem.up, len(active))
    down_row, down_sites = _rate_rows(problem, problem.down, len(active) + len(up_sites))
    pieces = [
        (worker_row, column, entries.seconds * unit),
        *_link_pieces(up_row, leave_site, leave, problem.forward_bytes[leave_at], problem.up, unit),
        *_link_pieces(up_row, enter_site, enter, problem.backward_bytes[enter_at], problem.up, unit),
        *_link_pieces(down_row, enter_site, enter, problem.forward_bytes[enter_at], problem.down, unit),
        *_link_pieces(down_row, leave_site, leave, problem.backward_bytes[leave_at], problem.down, unit),
    ]
    resources = len(active) + len(up_sites) + len(down_sites)
    use = csr_matrix(
        (
            np.concatenate([p[2] for p in pieces]),
            (np.concatenate([p[0] for p in pieces]), np.concatenate([p[1] for p in pieces])),
        ),
        shape=(resources, total + 1),
    )
    cost = np.zeros(total + 1)
    cost[-1] = -1.0
    answer = linprog(
        cost, A_ub=use, b_ub=np.ones(resources), A_eq=balance, b_eq=np.zeros(rows.count), method="highs"
    )
    if not answer.success:
        raise ArithmeticError(f"the linear programme has no answer: {answer.message}")

    amounts = np.asarray(answer.x) * unit
    leaving, entering = np.zeros((2, problem.sites, boundaries))
    leaving[leave_site, leave_at] = amounts[leave]
    entering[enter_site, enter_at] = amounts[enter]
    value = np.asarray(answer.eqlin.marginals) + 1.0
    site_value = np.full((problem.sites, problem.stages + 1), np.nan)
    site_value[:, 1:-1] = np.where(own, value[rows.own], np.nan)
    worth = -np.asarray(answer.ineqlin.marginals) * unit
    compute, up, down = np.zeros(problem.workers), np.zeros(problem.sites), np.zeros(problem.sites)
    compute[active] = worth[: len(active)]
    up[up_sites] = worth[len(active) : len(active) + len(up_sites)]
    down[down_sites] = worth[len(active) + len(up_sites) :]
    prices = Prices(np.concatenate([[0.0], value[1 : problem.stages], [1.0]]), site_value, compute, up, down)
    return Flow(float(-answer.fun * unit), entries, amounts[:count], leaving, entering, prices)


def _rate_rows(problem: Problem, rate: Floats, start: int) -> tuple[Ints, Ints]:
    """The row of each site's rate (-1: no limit), and the sites in the order of their rows."""
    sites = np.flatnonzero(problem.limited & np.isfinite(rate))
    row = np.full(problem.sites, -1)
    row[sites] = start + np.arange(len(sites))
    return row, sites


def _link_pieces(
    row: Ints, site: Ints, column: Ints, size: Floats, rate: Floats, unit: float
) -> list[tuple[Ints, Ints, Floats]]:
    there = row[site] >= 0
    return [(row[site[there]], column[there], size[there] * unit / rate[site[there]])]
