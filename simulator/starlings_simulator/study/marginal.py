"""What one more worker would add, and what each one that is there adds: prices first, then the programme itself.

By duality the plan's prices say to first order what a span would be worth to a newcomer, and what a worker is worth
where it is. Where prices promise most (or least), the linear programme is solved again with the newcomer at its best
spans (or without the worker), all others staying where they are. So gains are what is had without moving anybody, and
losses what is lost before anybody moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from starlings_coordinator.planner.linear.node_form import Prices, solve
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_coordinator.planner.linear.problem import IDLE, Ints, Problem, build_problem
from starlings_coordinator.planner.linear.values import carried_over, option_values
from starlings_protos.messages import PlanWorker, WorkerId
from starlings_simulator.study.setting import Setting

# Kinds of newcomer, and spans of each, that the programme is asked about.
KINDS_ASKED = 6
SPANS_ASKED = 3
# Workers whose loss the programme is asked about, cheapest first.
WORKERS_ASKED = 24
# Below this part of the rate a worker adds nothing.
NOTHING = 1e-3
# What all parked workers together may cost.
PARKED_COST = 5e-3


def marginal(setting: Setting, plan: LinkPlan) -> dict[str, Any]:
    """`add`: kinds of newcomer, most useful first; `workers`: who adds least; `park`: who could leave together."""
    prices = plan.found.flow.prices
    assert prices is not None
    losses = _losses(plan, prices)
    return {"add": _additions(setting, plan, prices), "workers": losses, "park": _parked(plan, losses)}


# ---------------------------------------------------------------------- one more


def _kinds(setting: Setting) -> list[tuple[str, PlanWorker]]:
    """One more of each group of the fleet file, in words."""
    there = {worker.worker_id: worker for worker in setting.workers()}
    found: dict[tuple[object, ...], tuple[str, PlanWorker]] = {}
    for worker in setting.swarm.workers:
        like = there[worker.worker_id]
        own_line = worker.site == worker.worker_id
        where = worker.region if own_line else worker.site
        name = WorkerId(f"{worker.worker_id}+")
        key = (
            worker.device,
            where,
            like.memory_bytes,
            tuple(like.forward_seconds.items()),
            like.uplink_bytes_per_s,
        )
        what = worker.device or f"worker like {worker.worker_id}"
        one_more = replace(like, worker_id=name, site=name if own_line else like.site)
        found.setdefault(key, (f"one more {what} in {where}", one_more))
    return list(found.values())


def _additions(setting: Setting, plan: LinkPlan, prices: Prices) -> list[dict[str, Any]]:
    kinds = _kinds(setting)
    promised = []
    for words, newcomer in kinds:
        problem = _with(setting, plan, newcomer)
        number = problem.worker_ids.index(newcomer.worker_id)
        own = slice(int(problem.starts[number]), int(problem.starts[number + 1]))
        worth = option_values(problem, carried_over(plan.problem, problem, prices))[own]
        order = own.start + np.argsort(-worth, kind="stable")
        promised.append((float(worth.max(initial=0.0)), words, newcomer, problem, number, order))
    promised.sort(key=lambda item: (-item[0], item[1]))
    rows = []
    for position, (promise, words, newcomer, problem, number, order) in enumerate(promised):
        row: dict[str, Any] = {
            "kind": words,
            "like": newcomer.worker_id.removesuffix("+"),
            "promised": promise / plan.found.rate,
            "gain": None,
        }
        if position < KINDS_ASKED and len(order):
            choice = _same(plan, problem)
            best, span = plan.found.rate, None
            for option in order[:SPANS_ASKED]:
                choice[number] = option
                rate = solve(problem, choice).rate
                if rate > best:
                    best, span = rate, int(option)
            row["gain"] = best / plan.found.rate - 1
            if span is not None:
                row |= {"first_stage": int(problem.first[span]), "last_stage": int(problem.last[span])}
        elif not len(order):
            row["gain"] = 0.0
        rows.append(row)
    return sorted(rows, key=lambda row: (row["gain"] is None, -(row["gain"] or 0.0), row["kind"]))


def _with(setting: Setting, plan: LinkPlan, newcomer: PlanWorker) -> Problem:
    fleet = setting.fleet((*setting.workers(), newcomer), plan.stages)
    return build_problem(fleet, plan.stages, setting.job.pipeline.codec)


def _same(plan: LinkPlan, problem: Problem) -> Ints:
    """The plan's spans in a problem with the same cut and more workers."""
    choice = np.full(problem.workers, IDLE)
    place = {worker_id: number for number, worker_id in enumerate(problem.worker_ids)}
    for number, worker_id in enumerate(plan.problem.worker_ids):
        option = int(plan.found.choice[number])
        if option >= 0:
            there = place[worker_id]
            # Each worker's options depend on nobody else, and stay in their order.
            choice[there] = problem.starts[there] + option - plan.problem.starts[number]
    return choice


# ---------------------------------------------------------------------- one less


def _losses(plan: LinkPlan, prices: Prices) -> list[dict[str, Any]]:
    """Of the workers whose prices are lowest: what the plan loses without each, as a part of its rate."""
    problem, rate = plan.problem, plan.found.rate
    alone = problem.site_sizes[problem.site] == 1
    price = prices.compute + np.where(alone, (prices.up + prices.down)[problem.site], 0.0)
    rows = []
    holders = np.flatnonzero(plan.found.choice >= 0)
    for number in holders[np.argsort(price[holders], kind="stable")][:WORKERS_ASKED]:
        choice = plan.found.choice.copy()
        choice[number] = IDLE
        without = solve(problem, choice).rate
        rows.append(
            {
                "worker": problem.worker_ids[number],
                "price": float(price[number]) / rate,
                # Solvers differ in the last digits.
                "loss": max(0.0, 1 - without / rate),
            }
        )
    return sorted(rows, key=lambda row: (row["loss"], row["worker"]))


def _parked(plan: LinkPlan, losses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As many of those who add nothing as may leave together: what two do for each other is seen only then."""
    place = {worker_id: number for number, worker_id in enumerate(plan.problem.worker_ids)}
    parked: list[str] = [
        worker_id for number, worker_id in enumerate(plan.problem.worker_ids) if plan.found.choice[number] < 0
    ]
    choice, together = plan.found.choice.copy(), 0.0
    for row in losses:
        if row["loss"] > NOTHING:
            break
        tried = choice.copy()
        tried[place[row["worker"]]] = IDLE
        loss = max(0.0, 1 - solve(plan.problem, tried).rate / plan.found.rate)
        if loss <= PARKED_COST:
            choice, together = tried, loss
            parked.append(row["worker"])
    return {"workers": parked, "loss": together}
