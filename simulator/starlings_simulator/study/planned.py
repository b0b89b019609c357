"""`starlings plan`: a plan with all that can be said of it beforehand, as a JSON-ready record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_coordinator.planner.words import shortage_words
from starlings_protos.messages import Stage
from starlings_simulator.study.placement import IDLE, placements, sites
from starlings_simulator.study.setting import CannotPlan, Setting

JOULES_PER_KWH = 3.6e6
# Told of each better plan: microbatches/s and which part of the bound.
Better = Callable[[LinkPlan], None]


def find_plan(setting: Setting, better: Better | None = None) -> tuple[Fleet, LinkPlan]:
    """The best plan within the budget.

    Raises:
        CannotPlan: the model does not fit on the fleet.
    """
    fleet = setting.fleet(setting.workers())
    if fleet.unmeasured:
        raise CannotPlan("; ".join(f"{w}: {flaw}" for w, flaw in sorted(fleet.unmeasured.items())))
    found = None
    for plan in setting.plans(fleet):
        found = plan
        if better is not None:
            better(plan)
    if found is None:
        raise CannotPlan(f"This fleet cannot hold the model: {_shortage(fleet)}")
    return fleet, found


def _shortage(fleet: Fleet) -> str:
    """In the finest cut, where least is missing."""
    stages = fleet.request.stages or tuple(Stage(b, b) for b in range(len(fleet.profile.blocks)))
    return shortage_words(fleet, [(stages, {})])


def describe(setting: Setting, fleet: Fleet, plan: LinkPlan) -> dict[str, Any]:
    """Rates in tokens/s; times in seconds; None for what the fleet file does not tell."""
    per_microbatch = setting.tokens_per_microbatch
    tokens_per_s = plan.found.rate * per_microbatch
    rows = placements(setting, fleet, plan)
    bounds = plan.bounds
    seconds = setting.job.job.tokens / tokens_per_s
    return {
        "job": setting.job.job.name,
        "fleet": setting.swarm.spec.fleet.name,
        "seed": setting.seed,
        "workers": len(rows),
        "holders": sum(row["role"] != IDLE for row in rows),
        "parameters": setting.profile.parameter_count,
        "tokens_per_s": tokens_per_s,
        "microbatches_per_s": plan.found.rate,
        "tokens": setting.job.job.tokens,
        "seconds": seconds,
        "bounds": {
            "compute": bounds.compute * per_microbatch,
            "memory": bounds.memory * per_microbatch,
            "uplink": bounds.uplink * per_microbatch if math.isfinite(bounds.uplink) else None,
            "all": bounds.all * per_microbatch,
        },
        "of_bound": plan.part_of_bound,
        "binding": plan.binding,
        "cost": _cost(setting, rows, tokens_per_s),
        "energy": _energy(setting, rows, tokens_per_s),
        "stages": _stages(setting, plan),
        "placement": rows,
        "sites": sites(setting, plan),
    }


def _stages(setting: Setting, plan: LinkPlan) -> list[dict[str, Any]]:
    names = setting.profile.block_names
    return [
        {
            "stage": number,
            "first_block": names[stage.first_block],
            "last_block": names[stage.last_block],
            "parameters": setting.profile.stage_parameters(stage.first_block, stage.last_block),
            "holders": int(plan.problem.covered(plan.found.choice)[number]),
        }
        for number, stage in enumerate(plan.stages)
    ]


def _cost(setting: Setting, rows: list[dict[str, Any]], tokens_per_s: float) -> dict[str, Any]:
    """Of the workers that hold something, whether they are busy or not: whoever is there is paid."""
    holders = {row["worker"] for row in rows if row["role"] != IDLE}
    prices = [w.price_per_hour for w in setting.swarm.workers if w.worker_id in holders]
    known = [price for price in prices if price is not None]
    per_hour = sum(known)
    return {
        "currency": setting.swarm.spec.fleet.currency,
        "per_hour": per_hour if known else None,
        "per_million_tokens": per_hour / 3600 / tokens_per_s * 1e6 if known else None,
        "total": per_hour / 3600 * setting.job.job.tokens / tokens_per_s if known else None,
        "workers_without_price": len(prices) - len(known),
    }


def _energy(setting: Setting, rows: list[dict[str, Any]], tokens_per_s: float) -> dict[str, Any]:
    """Of devices while they compute; hosts, idling and cooling come on top."""
    load = {row["worker"]: row["load"] for row in rows if row["role"] != IDLE}
    holders = [w for w in setting.swarm.workers if w.worker_id in load]
    watts = sum((w.watts or 0.0) * load[w.worker_id] for w in holders)
    known = any(w.watts is not None for w in holders)
    return {
        "watts": watts if known else None,
        "tokens_per_joule": tokens_per_s / watts if known and watts > 0 else None,
        "total_kwh": watts * setting.job.job.tokens / tokens_per_s / JOULES_PER_KWH if known else None,
        "workers_without_watts": sum(w.watts is None for w in holders),
    }
