"""What one more and one less would do: the programme's own answer, and never better than a whole new plan."""

from __future__ import annotations

import json

import pytest

from starlings.views.plan import marginal_lines
from starlings_simulator.study.marginal import marginal
from starlings_simulator.study.planned import find_plan
from support.fleets import setting

# A pipeline of two, whose first half is the bottleneck only because of memory; `far` has next to no link.
FLEET = """
[[workers]]
name = "big"
memory = "6GB"
tflops = {tflops}
count = {count}
[[workers]]
name = "far"
memory = "0.9GB"
tflops = 4
uplink_mbit_per_s = 0.01
downlink_mbit_per_s = 100
"""


def test_one_more_adds_what_a_plan_with_it_reaches_and_who_adds_nothing_is_parked() -> None:
    chosen = setting(FLEET.format(count=2, tflops=4))
    _, plan = find_plan(chosen)
    answer = marginal(chosen, plan)
    json.dumps(answer)
    gains = {row["like"]: row["gain"] for row in answer["add"]}
    # Three whole models in place of two.
    _, more = find_plan(setting(FLEET.format(count=3, tflops=4)))
    assert gains["big-1"] == pytest.approx(more.found.rate / plan.found.rate - 1, rel=0.02)
    assert gains["big-1"] == pytest.approx(0.5, rel=0.02)
    assert gains["far"] < 1e-3
    assert answer["add"][0]["like"] == "big-1"
    assert answer["park"] == {"workers": ["far"], "loss": pytest.approx(0.0, abs=1e-3)}
    losses = {row["worker"]: row["loss"] for row in answer["workers"]}
    assert losses["big-1"] == pytest.approx(0.5, rel=0.02)
    said = "\n".join(marginal_lines(answer))
    assert "adds 50.0%" in said or "adds 49." in said
    assert "far adds nothing: park it" in said


def test_the_only_holder_is_worth_everything() -> None:
    chosen = setting(FLEET.format(count=1, tflops=4))
    _, plan = find_plan(chosen)
    losses = {row["worker"]: row["loss"] for row in marginal(chosen, plan)["workers"]}
    assert losses["big"] == 1.0


def test_two_of_whom_one_is_needed_are_not_both_parked() -> None:
    """Each alone adds nothing, because the other is there; together they hold what nobody else does."""
    text = """
[[workers]]
name = "slow"
memory = "2.6GB"
tflops = 0.5
[[workers]]
name = "end"
count = 2
memory = "2.6GB"
tflops = 50
"""
    chosen = setting(text)
    _, plan = find_plan(chosen)
    answer = marginal(chosen, plan)
    assert len([w for w in answer["park"]["workers"] if w.startswith("end")]) < 2
    assert answer["park"]["loss"] <= 5e-3
