"""Islands: workers that are near each other and together hold all stages, so that pipelines need not leave them.

Whoever holds the whole model is an island by itself and meets the others by exchange only. Of the others, those within
NEAR_S are put together, and islands that lack a stage join the nearest until each has all of them (single linkage). A
site's workers are always together. What it costs to keep every microbatch within its island is the difference between
the programme of all and the sum of the islands' own, with the plan's spans and with spans found for each island alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from starlings_coordinator.planner.linear.node_form import solve
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_coordinator.planner.linear.problem import IDLE, Ints, Problem
from starlings_simulator.study.setting import Setting

# There and back between workers that count as near without being asked: a country, or half of a continent.
NEAR_S = 0.03
# Linear programmes for an island's own spans, at most.
ISLAND_BUDGET = 8


def islands(setting: Setting, plan: LinkPlan) -> list[dict[str, Any]]:
    """Largest rate first. `rate`: with the plan's spans; `own_rate`: with spans for the island alone; both in parts of
    the plan's rate.

    `members` has for each worker what it is there, in words.
    """
    problem, choice = plan.problem, plan.found.choice
    workers = {worker.worker_id: worker for worker in setting.workers()}
    rows = []
    for group in _groups(setting, plan):
        inside = np.full(problem.workers, IDLE)
        inside[group] = choice[group]
        rate = solve(problem, inside).rate
        own = rate
        if len(group) > 1:
            alone = setting.fleet([workers[problem.worker_ids[w]] for w in group], plan.stages)
            found = setting.best(alone, min(ISLAND_BUDGET, setting.budget))
            own = max(rate, found.found.rate) if found is not None else rate
        ids = [problem.worker_ids[w] for w in group]
        rtts = [setting.swarm.rtt_s(a, b) for n, a in enumerate(ids) for b in ids[n + 1 :]]
        rows.append(
            {
                "workers": ids,
                "regions": sorted({workers[w].region for w in ids}),
                "widest_rtt_s": max(rtts, default=0.0),
                "rate": rate / plan.found.rate,
                "own_rate": own / plan.found.rate,
                "members": [
                    {"worker": problem.worker_ids[w], "words": member_words(problem, int(w), int(choice[w]))}
                    for w in group
                ],
            }
        )
    return sorted(rows, key=lambda row: (-row["rate"], row["workers"]))


def _groups(setting: Setting, plan: LinkPlan) -> list[Ints]:
    """Workers by island, those that hold nothing left out."""
    problem, choice = plan.problem, plan.found.choice
    whole = (problem.first[choice] == 0) & (problem.last[choice] == problem.stages - 1) & (choice >= 0)
    groups = [np.array([w]) for w in np.flatnonzero(whole)]
    partly = [int(w) for w in np.flatnonzero((choice >= 0) & ~whole)]
    if not partly:
        return groups
    # Sites are the smallest pieces.
    pieces: dict[int, list[int]] = {}
    for worker in partly:
        pieces.setdefault(int(problem.site[worker]), []).append(worker)
    sites = [setting.swarm.sites[problem.site_names[site]] for site in pieces]
    members = list(pieces.values())
    apart = np.array([[setting.swarm.site_rtt_s(a, b) for b in sites] for a in sites])
    apart = np.minimum(apart, apart.T)
    np.fill_diagonal(apart, np.inf)
    while len(members) > 1:
        covers = np.array([_covers(problem, choice, group) for group in members])
        # Who lacks a stage goes to the nearest, however far; all others only to near ones.
        wanted = np.where(covers[:, None] & covers[None, :] & (apart > NEAR_S), np.inf, apart)
        one, other = np.unravel_index(int(np.argmin(wanted)), wanted.shape)
        if not np.isfinite(wanted[one, other]):
            break
        keep, gone = sorted((int(one), int(other)))
        members[keep] = members[keep] + members.pop(gone)
        nearest = np.minimum(apart[keep], apart[gone])
        apart[keep], apart[:, keep] = nearest, nearest
        apart = np.delete(np.delete(apart, gone, axis=0), gone, axis=1)
        apart[keep, keep] = np.inf
    return groups + [np.array(sorted(group)) for group in members]


def _covers(problem: Problem, choice: Ints, group: list[int]) -> bool:
    inside = np.full(problem.workers, IDLE)
    inside[group] = choice[group]
    return bool(problem.covered(inside).all())


def member_words(problem: Problem, worker: int, option: int) -> str:
    """Why that span: what its uplink would carry at an interior stage, beside what its compute does."""
    first, last = int(problem.first[option]), int(problem.last[option])
    stages, site = problem.stages, int(problem.site[worker])
    compute = 1 / float(np.sum(problem.seconds[int(problem.mode[option]), worker, first : last + 1]))
    whole = first == 0 and last == stages - 1
    shared = problem.site_sizes[site] > 1
    if not np.isfinite(problem.up[site]) or stages == 1:
        link = "its link limits nothing"
    else:
        # Interior: activations on and gradients back, each of about the mean boundary.
        each = float(np.mean(problem.forward_bytes) + np.mean(problem.backward_bytes))
        carried = float(problem.up[site]) / each
        link = (
            f"its {'site' if shared else 'uplink'} carries {carried:.3g} microbatches/s at an interior stage and "
            f"{2 * carried:.3g} at an end, its compute does {compute:.3g}"
        )
    if whole:
        return f"holds the whole model and meets the others by exchange only: {link}"
    if first == 0 or last == stages - 1:
        return f"holds the {'first' if first == 0 else 'last'} stages of a pipeline: {link}"
    return f"holds interior stages of a pipeline: {link}"
