"""Islands: neighbours form pipelines, whole models stand alone, and whoever lacks a stage goes to the nearest."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from starlings.views.plan import island_lines
from starlings_coordinator.planner.linear.improve import Found
from starlings_coordinator.planner.linear.node_form import solve
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_coordinator.planner.linear.problem import IDLE
from starlings_protos.messages import WorkerId
from starlings_simulator.study.islands import NEAR_S, islands
from starlings_simulator.study.planned import find_plan
from support.fleets import setting

# Two workers hold the model together; four of them, two on each side of the ocean.
PAIRS = """
[[workers]]
name = "eu"
count = 2
memory = "2.6GB"
tflops = 4
region = "eu-west-1"
uplink_mbit_per_s = 1000
downlink_mbit_per_s = 1000
[[workers]]
name = "us"
count = 2
memory = "2.6GB"
tflops = 4
region = "us-west-2"
uplink_mbit_per_s = 1000
downlink_mbit_per_s = 1000
"""
WHOLE = """
[[workers]]
name = "big"
memory = "8GB"
tflops = 4
region = "sa-east-1"
uplink_mbit_per_s = 1
downlink_mbit_per_s = 10
"""


def found(text: str):  # type: ignore[no-untyped-def]
    chosen = setting(text)
    _, plan = find_plan(chosen)
    rows = islands(chosen, plan)
    json.dumps(rows)
    return plan, rows


def laid(plan: LinkPlan, *spans: tuple[str, bool]) -> LinkPlan:
    """The plan with these spans instead: each worker's from the first stage on (True) or up to the last (False)."""
    problem = plan.problem
    choice = np.full(problem.workers, IDLE)
    for name, from_first in spans:
        worker = problem.worker_ids.index(WorkerId(name))
        options = range(int(problem.starts[worker]), int(problem.starts[worker + 1]))
        choice[worker] = options[0] if from_first else options[-1]
    return replace(plan, found=Found(choice, solve(problem, choice)))


def test_neighbours_are_islands_and_whole_models_stand_alone() -> None:
    chosen = setting(PAIRS + WHOLE)
    _, plan = find_plan(chosen)
    plan = laid(plan, ("eu-1", True), ("eu-2", False), ("us-1", True), ("us-2", False), ("big", True))
    rows = islands(chosen, plan)
    assert {frozenset(row["workers"]) for row in rows} == {
        frozenset({"eu-1", "eu-2"}),
        frozenset({"us-1", "us-2"}),
        frozenset({"big"}),
    }
    assert all(row["widest_rtt_s"] <= NEAR_S and row["rate"] > 0 for row in rows)
    alone = next(row for row in rows if row["workers"] == ["big"])
    assert "meets the others by exchange only" in alone["members"][0]["words"]
    assert "microbatches/s at an interior stage" in alone["members"][0]["words"]
    # Together they are no faster than the plan with the plan's spans.
    assert sum(row["rate"] for row in rows) <= 1 + 1e-6
    assert all(row["own_rate"] >= row["rate"] for row in rows)
    # With both first halves on one side of the ocean, no side is an island.
    crossed = laid(plan, ("eu-1", True), ("eu-2", True), ("us-1", False), ("us-2", False))
    assert [len(row["workers"]) for row in islands(chosen, crossed)] == [4]


def test_who_lacks_a_stage_goes_to_the_nearest_however_far() -> None:
    # One on each side: neither holds the model alone.
    _, rows = found(PAIRS.replace("count = 2", "count = 1"))
    assert [sorted(row["workers"]) for row in rows] == [["eu", "us"]]
    assert rows[0]["widest_rtt_s"] > NEAR_S
    assert rows[0]["rate"] == pytest.approx(1.0, rel=1e-3)


def test_islands_are_said_in_words() -> None:
    _, rows = found(PAIRS + WHOLE)
    text = "\n".join(island_lines(rows))
    assert f"{len(rows)} islands that hold all stages" in text
    assert "Island 1:" in text
    assert "holds the first stages of a pipeline" in text
