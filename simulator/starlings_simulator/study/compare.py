"""What other ways to place the same workers would reach, each with the best routing for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlings_coordinator.planner.linear.layouts import (
    Spans,
    by_memory,
    by_speed,
    equal_stages,
    flow_of,
    whole_models,
)
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_coordinator.planner.linear.problem import Problem
from starlings_simulator.study.setting import Setting

LAYOUTS: dict[str, tuple[str, Callable[[Problem, int], Spans]]] = {
    "equal": ("pipelines of equal stages, workers dealt round", equal_stages),
    "speed": ("pipelines with stages in proportion to speed", by_speed),
    "memory": ("pipelines with stages in proportion to memory", by_memory),
    "whole": ("whole models only: plain data parallelism", whole_models),
}


def compare(setting: Setting, plan: LinkPlan) -> list[dict[str, Any]]:
    """One row per layout, ours first; `of_ours` is its part of our rate."""
    rows = [
        {
            "layout": "ours",
            "about": "this plan",
            "tokens_per_s": plan.found.rate * setting.tokens_per_microbatch,
            "holders": int((plan.found.choice >= 0).sum()),
            "of_ours": 1.0,
        }
    ]
    for name, (about, place) in LAYOUTS.items():
        spans = place(plan.problem, setting.seed)
        rate = flow_of(plan.problem, spans).rate
        rows.append(
            {
                "layout": name,
                "about": about if rate > 0 else f"{about}; leaves a stage without a holder",
                "tokens_per_s": rate * setting.tokens_per_microbatch,
                "holders": len(spans),
                "of_ours": rate / plan.found.rate,
            }
        )
    return rows
