"""Who holds what in a plan, what that takes of each worker, and why: one record per worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.bounds import reason_words
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_coordinator.planner.words import idle_words
from starlings_job.memory import HEADROOM, stage_memory
from starlings_protos.messages import PlanWorker
from starlings_simulator.study.setting import Setting

# What a worker is to the others.
WHOLE, FIRST, INNER, LAST, IDLE = "whole model", "first stages", "inner stages", "last stages", "idle"


def role_of(first: int, last: int, stages: int) -> str:
    if first == 0:
        return WHOLE if last == stages - 1 else FIRST
    return LAST if last == stages - 1 else INNER


def placements(setting: Setting, fleet: Fleet, plan: LinkPlan) -> list[dict[str, Any]]:
    """JSON-ready, in the order of the fleet file. Memory in bytes, `load` in seconds of work per second."""
    known = {worker.worker_id: worker for worker in setting.swarm.workers}
    index = {worker_id: number for number, worker_id in enumerate(plan.problem.worker_ids)}
    flow = plan.found.flow
    loads = flow.load(plan.problem)
    rates: dict[int, list[float]] = {}
    for worker, rate in zip(flow.entries.worker, flow.share, strict=True):
        rates.setdefault(int(worker), []).append(float(rate))
    rows = []
    by_id = {worker.worker_id: worker for worker in fleet.workers}
    for worker_id in known:
        number = index[worker_id]
        option = int(plan.found.choice[number])
        row: dict[str, Any] = {
            "worker": worker_id,
            "class": known[worker_id].device,
            "site": known[worker_id].site,
            "region": known[worker_id].region,
        }
        if option < 0:
            row |= {"role": IDLE, "reason": _idle(fleet, plan, by_id[worker_id]), "load": 0.0}
        else:
            first, last = int(plan.problem.first[option]), int(plan.problem.last[option])
            row |= {
                "role": role_of(first, last, plan.problem.stages),
                "first_stage": first,
                "last_stage": last,
                "first_block": plan.stages[first].first_block,
                "last_block": plan.stages[last].last_block,
                "load": round(float(loads[number]), 4),
                "microbatches_per_s": [float(f"{rate:.6g}") for rate in rates.get(number, [])],
                "reason": reason_words(plan.problem, number, option, flow),
            }
            row |= _memory(fleet, plan, by_id[worker_id], first, last)
        rows.append(row)
    return rows


def _idle(fleet: Fleet, plan: LinkPlan, worker: PlanWorker) -> str:
    able = np.diff(plan.problem.starts)[plan.problem.worker_ids.index(worker.worker_id)]
    return (
        "is not needed: whatever it could hold adds nothing"
        if able
        else idle_words(fleet, worker, plan.stages)
    )


def _memory(fleet: Fleet, plan: LinkPlan, worker: PlanWorker, first: int, last: int) -> dict[str, Any]:
    first_block, last_block = plan.stages[first].first_block, plan.stages[last].last_block
    holding = fleet.holding(worker.memory_bytes, first_block, last_block, last - first + 1)
    slots, recompute = (holding.slots, holding.recompute) if holding is not None else (1, True)
    use = stage_memory(
        fleet.profile,
        first_block,
        last_block,
        per_parameter=fleet.request.bytes_per_parameter,
        microbatch=fleet.request.microbatch,
        slots=slots,
        recompute=recompute,
    )
    return {
        "slots": slots,
        "recompute": recompute,
        "memory": {
            "offered": worker.memory_bytes,
            "total": use.total,
            "weights": use.weights,
            "training": use.training,
            "activations": use.activations,
            "loss": use.loss,
            "headroom": use.total - int(use.total / (1 + HEADROOM)),
        },
    }


def sites(setting: Setting, plan: LinkPlan) -> list[dict[str, Any]]:
    """What each site's link carries, most used first; bytes/s, limits None where there are none."""
    flow, problem = plan.found.flow, plan.problem
    up, down = flow.up_bytes_per_s(problem), flow.down_bytes_per_s(problem)
    rows = []
    for number, name in enumerate(problem.site_names):
        limits = [
            float(side[number]) if np.isfinite(side[number]) else None for side in (problem.up, problem.down)
        ]
        used = [float(f"{side[number]:.6g}") for side in (up, down)]
        parts = [u / limit for u, limit in zip(used, limits, strict=True) if limit]
        rows.append(
            {
                "site": name,
                "region": setting.swarm.sites[name].region,
                "workers": int(problem.site_sizes[number]),
                "up_bytes_per_s": used[0],
                "up_limit_bytes_per_s": limits[0],
                "down_bytes_per_s": used[1],
                "down_limit_bytes_per_s": limits[1],
                "fullest": round(max(parts, default=0.0), 4),
            }
        )
    return sorted(rows, key=lambda row: (-row["fullest"], row["site"]))
