"""What no plan exceeds, and why a plan is not faster, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.node_form import Flow
from starlings_coordinator.planner.linear.problem import Floats, Problem
from starlings_coordinator.planner.linear.relaxed import Relaxed, bound_at, players_of, without_compute
from starlings_coordinator.planner.words import NEAR_THE_BOUND, stage_words

# Names in a sentence; the rest is counted.
NAMES_MOST = 3


@dataclass(frozen=True, slots=True)
class Bounds:
    """Microbatches/s. `compute`: if all held everything and links were free. `memory`: as `compute`, but everybody
    works only on blocks that fit there. Both hold for every cut. `uplink`: if computing took no time; infinite where
    links need not carry anything. `all`: compute, memory and links together; these two hold for the plan's cut.
    """

    compute: float
    memory: float
    uplink: float
    all: float


def bounds_of(problem: Problem, relaxed: Relaxed, compute: float, memory: float) -> Bounds:
    uplink = bound_at(problem, without_compute(players_of(problem)), relaxed.prices.value)
    return Bounds(
        compute, memory, uplink if uplink < 1e3 * compute else float("inf"), min(relaxed.rate, memory)
    )


def compute_bound(fleet: Fleet) -> float:
    """Each kind of block where it is done best: never below the sum of what all would do alone."""
    kinds = fleet.profile.kinds
    seconds = np.array(
        [[_block_seconds(fleet, n, block) for block in kinds.values()] for n in range(len(fleet.workers))]
    )
    return _by_kinds(fleet, seconds)


def memory_bound(fleet: Fleet) -> float:
    """As `compute_bound`, but a worker does only what blocks it could hold, as fast as it could with a block alone."""
    blocks = fleet.profile.blocks
    # Blocks of a kind need the same, but for what comes in and goes out: the ends may be cheaper.
    some = {
        kind: {
            (own := [b for b, block in enumerate(blocks) if block.kind == kind])[0],
            own[len(own) // 2],
            own[-1],
        }
        for kind in fleet.profile.kinds
    }
    seconds = np.full((len(fleet.workers), len(some)), np.inf)
    for n, worker in enumerate(fleet.workers):
        for k, candidates in enumerate(some.values()):
            for block in candidates:
                holding = fleet.holding(worker.memory_bytes, block, block, 1)
                if holding is not None:
                    took = _block_seconds(fleet, n, block, holding.recompute, holding.slots == 1)
                    seconds[n, k] = min(seconds[n, k], took)
    return _by_kinds(fleet, seconds)


def _block_seconds(
    fleet: Fleet, number: int, block: int, recompute: bool = False, one_slot: bool = False
) -> float:
    return fleet.run_seconds(fleet.workers[number].worker_id, block, block, recompute, one_slot)


def _by_kinds(fleet: Fleet, seconds: Floats) -> float:
    """Maximise F with sum_w x[w, k] = blocks of kind k * F and sum_k seconds[w, k] x[w, k] <= 1."""
    numbers = list(fleet.profile.kinds)
    counts = [sum(block.kind == kind for block in fleet.profile.blocks) for kind in numbers]
    worker, kind = np.nonzero(np.isfinite(seconds))
    if len(np.unique(kind)) < len(counts):
        return 0.0
    columns = np.arange(len(worker))
    unit = 1 / float(np.median(seconds[worker, kind]))
    use = csr_matrix(
        (seconds[worker, kind] * unit, (worker, columns)), shape=(len(seconds), len(columns) + 1)
    )
    balance = csr_matrix(
        (
            np.concatenate([np.ones(len(columns)), -np.array(counts, dtype=float)]),
            (
                np.concatenate([kind, np.arange(len(counts))]),
                np.concatenate([columns, np.full(len(counts), len(columns))]),
            ),
        ),
        shape=(len(counts), len(columns) + 1),
    )
    cost = np.zeros(len(columns) + 1)
    cost[-1] = -1.0
    answer = linprog(
        cost, A_ub=use, b_ub=np.ones(len(seconds)), A_eq=balance, b_eq=np.zeros(len(counts)), method="highs"
    )
    if not answer.success:
        raise ArithmeticError(f"the linear programme has no answer: {answer.message}")
    return float(-answer.fun * unit)


# ---------------------------------------------------------------------- words


def binding_words(problem: Problem, flow: Flow, bounds: Bounds) -> str:
    """What to add to make the plan faster. The prices of all resources add up to F, so each has its part in it."""
    if flow.rate >= NEAR_THE_BOUND * bounds.compute:
        return "compute of all workers"
    prices = flow.prices
    if prices is None:
        return "stages without a holder"
    parts = {
        "compute": float(prices.compute.sum()),
        "uplink": float(prices.up.sum()),
        "downlink": float(prices.down.sum()),
    }
    whole = max(sum(parts.values()), 1e-300)
    said: list[str] = []
    for resource, part in sorted(parts.items(), key=lambda item: (-item[1], item[0])):
        if part < 0.2 * whole and said:
            continue
        percent = f"{100 * part / whole:.0f} %"
        if resource == "compute":
            said.append(f"compute of {_workers_words(problem, flow)} ({percent})")
        else:
            worth = prices.up if resource == "uplink" else prices.down
            said.append(f"{_sites_words(problem, resource, worth)} ({percent})")
    return "; ".join(said)


def _workers_words(problem: Problem, flow: Flow) -> str:
    assert flow.prices is not None
    held = flow.entries
    typical = np.bincount(held.stage, held.seconds, minlength=problem.stages) / np.maximum(
        np.bincount(held.stage, minlength=problem.stages), 1
    )
    # What a second is worth at each stage: where little compute is, most.
    worth = np.diff(flow.prices.value) / typical
    tight = np.flatnonzero(worth >= 0.5 * worth.max())
    if len(tight) == problem.stages:
        return "all workers"
    last = 0
    while last + 1 < len(tight) and tight[last + 1] == tight[last] + 1:
        last += 1
    return f"the workers that hold {stage_words([int(s) for s in tight[: last + 1]])}"


def _sites_words(problem: Problem, resource: str, worth: Floats) -> str:
    sites = [int(g) for g in np.argsort(-worth, kind="stable") if worth[g] > 1e-9 * worth.max()]
    return f"{resource}{'s' * (len(sites) > 1)} of {names_words([problem.site_names[g] for g in sites])}"


def names_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MOST} more" if len(names) > NAMES_MOST else ""
    return ", ".join(names[:NAMES_MOST]) + more


def reason_words(problem: Problem, worker: int, option: int, flow: Flow) -> str:
    """Why this worker holds what it holds, as far as links explain it."""
    if option < 0:
        return "no stage fits in its memory"
    load = float(flow.load(problem)[worker])
    site = int(problem.site[worker])
    first, last = int(problem.first[option]), int(problem.last[option])
    if first == 0 and last == problem.stages - 1:
        if problem.limited[site]:
            return "holds the whole model, so that its link carries exchanges only"
        return "holds the whole model"
    if load < 1e-6:
        return "adds nothing at present: others have less room for what they do than it has links"
    capacity = float(problem.up[site])
    used = float(flow.up_bytes_per_s(problem)[site]) / capacity if np.isfinite(capacity) else 0.0
    if problem.limited[site] and used > 0.9:
        end = first == 0 or last == problem.stages - 1
        how = "an end of the model, which sends half of what an interior stage sends; " if end else ""
        return (
            f"{how}its uplink of {capacity * 8 / 1e6:.1f} Mbit/s is full, its compute {100 * load:.0f} % busy"
        )
    return f"its compute is {100 * load:.0f} % busy"
