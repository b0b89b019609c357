"""The best choice of spans there is, by a mixed-integer programme: small swarms only, to judge the search by."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from starlings_coordinator.planner.linear.problem import IDLE, Ints, Problem


def best_choice(problem: Problem, gap: float = 1e-6) -> tuple[float, Ints]:
    """Its rate and the choice itself. Written from the definition: pairs of workers, a binary per option.

    Columns: z[o]; x[o, s] within the span of o; y[s, w, v] from w after stage s to v; F.

    Raises:
        ArithmeticError: the solver found nothing.
    """
    options, stages, workers = len(problem.first), problem.stages, problem.workers
    columns = options
    x: dict[tuple[int, int], int] = {}
    for o in range(options):
        for s in range(problem.first[o], problem.last[o] + 1):
            x[o, s] = columns
            columns += 1
    y: dict[tuple[int, int, int], int] = {}
    for s in range(stages - 1):
        for w in range(workers):
            for v in range(workers):
                y[s, w, v] = columns
                columns += 1
    rate = columns
    columns += 1
    unit = 1 / float(np.median(problem.seconds[0]))
    rows: list[tuple[dict[int, float], float, float]] = []
    for w in range(workers):
        own = range(int(problem.starts[w]), int(problem.starts[w + 1]))
        rows.append((dict.fromkeys(own, 1.0), -np.inf, 1.0))
        work: dict[int, float] = {}
        for o in own:
            for s in range(problem.first[o], problem.last[o] + 1):
                seconds = float(problem.seconds[problem.mode[o], w, s]) * unit
                work[x[o, s]] = seconds
                rows.append(({x[o, s]: seconds, o: -1.0}, -np.inf, 0.0))
        rows.append((work, -np.inf, 1.0))
        for s in range(stages):
            here = {x[o, s]: 1.0 for o in own if (o, s) in x}
            if s + 1 < stages:
                rows.append(({**here, **{y[s, w, v]: -1.0 for v in range(workers)}}, 0.0, 0.0))
            if s > 0:
                rows.append(({**here, **{y[s - 1, v, w]: -1.0 for v in range(workers)}}, 0.0, 0.0))
    rows.append(({**{x[o, s]: 1.0 for o, s in x if s == 0}, rate: -1.0}, 0.0, 0.0))
    for g in range(problem.sites):
        for capacity, out, back in (
            (problem.up[g], problem.forward_bytes, problem.backward_bytes),
            (problem.down[g], problem.backward_bytes, problem.forward_bytes),
        ):
            if not np.isfinite(capacity):
                continue
            link: dict[int, float] = {}
            for (s, w, v), column in y.items():
                if problem.site[w] == g and problem.site[v] != g:
                    link[column] = float(out[s]) * unit / capacity
                elif problem.site[v] == g and problem.site[w] != g:
                    link[column] = float(back[s]) * unit / capacity
            rows.append((link, -np.inf, 1.0))
    matrix = lil_matrix((len(rows), columns))
    for number, (entries, _, _) in enumerate(rows):
        for column, amount in entries.items():
            matrix[number, column] = amount
    cost = np.zeros(columns)
    cost[rate] = -1.0
    whole = np.zeros(columns)
    whole[:options] = 1
    highest = np.full(columns, np.inf)
    highest[:options] = 1
    answer = milp(
        cost,
        constraints=LinearConstraint(
            matrix.tocsr(), np.array([r[1] for r in rows]), np.array([r[2] for r in rows])
        ),
        integrality=whole,
        bounds=Bounds(np.zeros(columns), highest),
        options={"mip_rel_gap": gap},
    )
    if answer.x is None:
        raise ArithmeticError(f"the mixed-integer programme has no answer: {answer.message}")
    choice = np.full(workers, IDLE)
    for o in np.flatnonzero(answer.x[:options] > 0.5):
        choice[problem.owner[o]] = o
    return float(-answer.fun * unit), choice
