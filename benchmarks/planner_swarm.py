"""How good plans with links are: how near the bound, how fast found, and beside how others place workers.

For random swarms of each size and kind (`lab`: links hardly bind; `homes`: everybody behind an access line of their
own; `mixed`: both) the answer, its bound (the linear programme's relaxation, with memory), what binds, and the
time from request to answer; then what the placements of others reach on the same swarm and cut with the best routing
for each, in parts of ours. Small swarms also beside the best choice there is, by a mixed-integer programme. And
amendments of such plans: milliseconds to price one, and what linear programmes say of it afterwards.

    python benchmarks/planner_swarm.py [--quick] [--json FILE] [--svg FILE] [--seeds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from planner_amend import SIZES as AMENDED
from planner_amend import amendment_claims, amendment_rows
from planner_exact import best_choice
from planner_fleets import MODELS, SHARED, swarm
from plot import write_panels
from report import Claim, environment, show, write_json

from starlings_coordinator.planner.cuts import balanced_cut
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.layouts import RIVALS, rate_of
from starlings_coordinator.planner.linear.planning import LinkPlan, plan_with_links
from starlings_coordinator.planner.linear.problem import build_problem
from starlings_coordinator.planner.linear.search import search

CODEC = "int8:128"
# Workers, models that suit so many, linear programmes that are allowed.
SIZES = {
    8: (("1.1B",), 40),
    16: (("1.1B", "3.4B"), 40),
    64: (("3.4B", "6.7B"), 12),
    256: (("6.7B", "13B"), 10),
    1000: (("13B",), 4),
}
KINDS = ("lab", "homes", "mixed")
SECONDS_MOST = {64: 0.5, 256: 2.0, 1000: 10.0}
PART_OF_BOUND = 0.97
PART_OF_BEST = 0.99


def measure(workers: int, model: str, kind: str, seed: int) -> dict[str, Any]:
    """One row: the plan, and the others in parts of it."""
    profile = MODELS[model]
    request = swarm(workers, kind, profile, seed)
    started = time.perf_counter()
    plan: LinkPlan | None = None
    first_s = 0.0
    plans = plan_with_links(Fleet(request, profile), codec=CODEC, seed=seed, programmes=SIZES[workers][1])
    for better in plans:
        plan = better
        first_s = first_s or time.perf_counter() - started
    took_s = time.perf_counter() - started
    row: dict[str, Any] = {"workers": workers, "model": model, "links": kind, "seed": seed}
    if plan is None:
        return {**row, "stages": 0, "binds": "memory does not suffice"}
    rate = plan.found.rate
    row |= {
        "stages": len(plan.stages),
        "microbatches/s": rate,
        "of bound": rate / plan.bounds.all,
        "of compute": rate / plan.bounds.compute,
        "of memory": rate / plan.bounds.memory,
        "seconds": took_s,
        "first s": first_s,
    }
    for name, place in RIVALS.items():
        row[name] = rate_of(plan.problem, place(plan.problem, seed)) / rate
    return {**row, "binds": plan.binding}


def exact_row(seed: int) -> dict[str, Any] | None:
    """A small swarm and what the mixed-integer programme finds; None where memory does not suffice."""
    workers, stages = 3 + seed % 4, 2 + seed % 3
    kind = KINDS[seed % 3]
    profile = MODELS["1.1B"]
    fleet = Fleet(swarm(workers, kind, profile, 1000 + seed), profile)
    problem = build_problem(fleet, balanced_cut(fleet.block_bytes(), stages), CODEC)
    best, _ = best_choice(problem)
    if best <= 0:
        return None
    started = time.perf_counter()
    found = list(search(problem, seed=seed, programmes=80))
    took_s = time.perf_counter() - started
    reached = found[-1].rate if found else 0.0
    return {
        "small swarm": f"{workers} workers, {stages} stages",
        "kind": kind,
        "of best": reached / best,
        "took s": took_s,
    }


def claims_of(rows: list[dict[str, Any]], exact: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    planned = [row for row in rows if row["stages"]]
    free = [r["of memory"] for r in planned if r["links"] == "lab" and r["workers"] >= 16]
    if free:
        claims.append(
            Claim(
                "least part of the bound from 16 workers on, where links do not bind",
                min(free),
                PART_OF_BOUND,
                min(free) >= PART_OF_BOUND,
            )
        )
    for workers, most_s in SECONDS_MOST.items():
        took = [row["seconds"] for row in planned if row["workers"] == workers]
        if took:
            claims.append(
                Claim(f"most seconds for a plan of {workers} workers", max(took), most_s, max(took) <= most_s)
            )
    for name in RIVALS:
        parts = [row[name] for row in planned]
        claims.append(Claim(f"most that `{name}` reaches of ours", max(parts), 1.0, max(parts) <= 1.0 + 1e-6))
    if exact:
        least = min(row["of best"] for row in exact)
        claims.append(
            Claim(
                "least part of the best choice there is, small swarms",
                least,
                PART_OF_BEST,
                least >= PART_OF_BEST,
            )
        )
    return claims


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Medians of what each way to place workers reaches of the bound, by size, a panel per kind of links."""
    panels: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in KINDS:
        points = {}
        for workers in SIZES:
            own = [r for r in rows if r["links"] == kind and r["workers"] == workers and r["stages"]]
            if own:
                points[f"ours, {workers}"] = (float(workers), statistics.median(r["of bound"] for r in own))
                for name in RIVALS:
                    reached = statistics.median(r[name] * r["of bound"] for r in own)
                    points[f"{name}, {workers}"] = (float(workers), reached)
        panels[kind] = points
    write_panels(file, "Microbatches/s in parts of the bound", panels, "workers", "part of the bound")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8, 16 and 64 workers, one seed")
    parser.add_argument("--json", type=Path, help="write rows and claims to this file")
    parser.add_argument("--svg", type=Path, help="draw what each reaches to this file")
    parser.add_argument("--seeds", type=int, default=3, help="swarms per size, model and kind of links")
    chosen = parser.parse_args()
    environ = environment()
    print(f"tables: {'../shared/data' if (SHARED / 'gpu_classes.csv').exists() else 'our own'}; seeds from 1")
    # The first programme pays for loading the solver.
    measure(8, "1.1B", "lab", 0)
    rows = [
        measure(workers, model, kind, seed)
        for workers, (models, _) in SIZES.items()
        if not chosen.quick or workers <= 64
        for model in models
        for kind in KINDS
        for seed in range(1, (1 if chosen.quick else chosen.seeds) + 1)
    ]
    exact = [row for seed in range(8 if chosen.quick else 36) if (row := exact_row(seed)) is not None]
    amendments = [
        row
        for workers in AMENDED
        if not chosen.quick or workers <= 64
        for kind in KINDS[:2]
        for row in amendment_rows(workers, kind, CODEC)
    ]
    claims = [*claims_of(rows, exact), *amendment_claims(amendments)]
    show(
        "plans with links; other placements in parts of ours",
        [*rows, *exact, *amendments],
        claims,
        {"of memory", "first s", "binds"},
    )
    write_json(chosen.json, "planner_swarm", environ, [*rows, *exact, *amendments], claims)
    if chosen.svg is not None:
        draw(chosen.svg, rows)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
