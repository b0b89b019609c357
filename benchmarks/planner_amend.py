"""Amendments of a plan that stands: how long pricing takes, and what linear programmes say of what was priced."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
from planner_fleets import MODELS, swarm
from report import Claim

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.amend import Outlook, confirm, price
from starlings_coordinator.planner.linear.board import Change
from starlings_coordinator.planner.linear.planning import plan_with_links
from starlings_coordinator.planner.linear.standing import Standing, standing
from starlings_protos.messages import PlanWorker

MILLISECONDS_MOST = 50.0
# Times that each is priced; the median counts.
TURNS = 5
# With more workers programmes take tens of seconds.
CONFIRMED_MOST = 256
OUTLOOK = Outlook(48 * 3600.0)
# Weights and AdamW's moments.
COPIED_BYTES_PER_PARAMETER = 12.0
SLOWER = 3.0
SIZES = {64: "6.7B", 256: "6.7B", 1000: "13B"}


def amendment_rows(workers: int, kind: str, codec: str, seed: int = 1) -> list[dict[str, Any]]:
    """A newcomer, the loss of the worker that is worth most, of an eighth of all, and that worker at a third of its
    speed."""
    plan, newcomer = _standing(workers, kind, codec, seed)
    assert plan.flow.prices is not None
    ranked = np.argsort(-plan.flow.prices.compute, kind="stable")
    ids = [plan.problem.worker_ids[n] for n in ranked]
    slow = next(worker for worker in plan.fleet.workers if worker.worker_id == ids[0])
    slow = replace(
        slow,
        forward_seconds={k: SLOWER * s for k, s in slow.forward_seconds.items()},
        backward_seconds={k: SLOWER * s for k, s in slow.backward_seconds.items()},
    )
    changes = {
        "join": Change((newcomer,)),
        "leave": Change(left=frozenset(ids[:1])),
        "an eighth leaves": Change(left=frozenset(ids[: workers // 8])),
        "drift": Change((slow,)),
    }
    rows = []
    for name, change in changes.items():
        took = []
        for _ in range(TURNS):
            started = time.perf_counter()
            answer = price(plan, change, OUTLOOK)
            took.append(time.perf_counter() - started)
        found = answer.amendment
        row: dict[str, Any] = {
            "amendment": name,
            "workers": workers,
            "links": kind,
            "ms": 1e3 * statistics.median(took),
            "moves": len(found.moves),
            "after it": found.rate_now / plan.rate,
            "then": found.rate_then / plan.rate,
            "GB": found.migration_bytes / 1e9,
            "s": found.migration_s,
            "verdict": type(answer.verdict).__name__,
        }
        if workers <= CONFIRMED_MOST:
            solved, _ = confirm(plan, change, answer, OUTLOOK)
            row |= {
                "solved after": solved.amendment.rate_now / plan.rate,
                "solved then": solved.amendment.rate_then / plan.rate,
                "solved verdict": type(solved.verdict).__name__,
            }
        rows.append(row)
    return rows


def _standing(workers: int, kind: str, codec: str, seed: int) -> tuple[Standing, PlanWorker]:
    profile = MODELS[SIZES[workers]]
    request = swarm(workers + 1, kind, profile, seed)
    *there, newcomer = request.workers
    request = replace(request, workers=tuple(there))
    *_, plan = plan_with_links(Fleet(request, profile), codec=codec, seed=seed, programmes=2)
    held = {
        worker_id: plan.problem.span_of(int(option))
        for worker_id, option in zip(plan.problem.worker_ids, plan.found.choice, strict=True)
        if option >= 0
    }
    request = replace(
        request, stages=plan.stages, workers=tuple(replace(w, held=held.get(w.worker_id)) for w in there)
    )
    sizes = [profile.stage_parameters(s.first_block, s.last_block) for s in plan.stages]
    return standing(Fleet(request, profile), codec, COPIED_BYTES_PER_PARAMETER * np.array(sizes)), newcomer


def amendment_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    biggest = max(row["workers"] for row in rows)
    most = max(row["ms"] for row in rows if row["workers"] == biggest)
    claims.append(
        Claim(
            f"most milliseconds for pricing an amendment with {biggest} workers",
            most,
            MILLISECONDS_MOST,
            most <= MILLISECONDS_MOST,
        )
    )
    solved = [row for row in rows if "solved then" in row and row["solved verdict"] == "Worthwhile"]
    if solved:
        least = min(row["solved then"] - row["solved after"] for row in solved)
        claims.append(
            Claim("least gain that programmes confirm of a move that is made", least, 0.0, least > 0.0)
        )
    return claims
