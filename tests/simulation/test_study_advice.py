"""Advice on exchanges: shares of time that follow from bytes, rates and steps, and the preset that fits."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from starlings.views.plan import render_advice
from starlings_job.exchange_rules import PRESETS, rules_for
from starlings_job.exchange_traffic import round_bytes
from starlings_simulator.study.advice import BARRIER_FINE, LINK_FINE, TRIPS, advise, replicas, step_s
from starlings_simulator.study.planned import find_plan
from support.fleets import setting

# Two whole models far from each other.
FLEET = """
[[workers]]
name = "one"
count = 2
memory = "8GB"
tflops = 4
uplink_mbit_per_s = {rate}
downlink_mbit_per_s = {rate}
region = "eu-west-1"
"""


def advised(rate: float, fleet: str = FLEET):  # type: ignore[no-untyped-def]
    chosen = setting(fleet.format(rate=rate))
    fleet_found, plan = find_plan(chosen)
    answer = advise(chosen, fleet_found, plan)
    json.dumps(answer)
    return chosen, plan, answer, {row["preset"]: row for row in answer["presets"]}


def test_shares_follow_from_bytes_rates_and_steps() -> None:
    chosen, plan, _, rows = advised(100)
    there = replicas(chosen, plan)
    assert {replica.members for replica in there} == {2}
    # In `async` each steps after its own eight microbatches, at half of the swarm's rate.
    own_s = 8 / (plan.found.rate / 2)
    assert all(step_s(chosen, plan, r, "async") == pytest.approx(own_s, rel=1e-3) for r in there)
    for preset in ("noloco", "pairs"):
        rules = rules_for(preset)
        size = sum(
            round_bytes(rules, rules.main, replica.elements, 2) for replica in there if replica.worker == 0
        )
        expected = size / 12.5e6 / (rules.main.inner_steps * own_s)
        assert rows[preset]["bytes"] == size
        assert rows[preset]["share"] == pytest.approx(expected, rel=1e-3)
    exact = rules_for("allreduce")
    size = sum(round_bytes(exact, exact.main, r.elements, 2) for r in there if r.worker == 0)
    takes_s = size / 12.5e6 + TRIPS * chosen.swarm.rtt_s(*plan.problem.worker_ids)
    assert rows["allreduce"]["seconds"] == pytest.approx(takes_s, rel=1e-6)
    assert rows["allreduce"]["share"] == pytest.approx(takes_s / (takes_s + 8 / plan.found.rate), rel=1e-3)


def test_fast_links_get_the_barrier_and_slow_ones_pairs() -> None:
    _, _, fast, rows = advised(1e7, FLEET.replace("tflops = 4", "tflops = 1"))
    assert fast["recommended"] == "allreduce"
    assert rows["allreduce"]["share"] <= BARRIER_FINE
    _, _, slow, rows = advised(100)
    assert slow["recommended"] == "pairs"
    assert "allreduce would lose" in slow["reason"]
    _, _, _, slowest = advised(1)
    row = slowest["pairs"]
    assert not row["fits"]
    # With that many steps between exchanges it fits, and not with a tenth fewer.
    assert row["share"] * row["every"] / row["every_that_fits"] <= LINK_FINE * 1.001
    assert row["share"] * row["every"] / (0.9 * row["every_that_fits"]) > LINK_FINE


def test_who_has_nobody_to_exchange_with_sends_nothing() -> None:
    _, _, answer, rows = advised(10, FLEET.replace("count = 2", "count = 1"))
    assert answer["replicas"] == 0
    assert set(rows) == set(PRESETS)
    assert all(row["share"] == 0 and row["bytes"] == 0 for row in rows.values())
    assert "nothing is exchanged" in answer["reason"]


def test_advice_is_readable() -> None:
    _, _, answer, _ = advised(5)
    said = Console(width=150, file=io.StringIO())
    said.print(render_advice(answer))
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert "Advice: pairs" in text
    assert "> pairs" in text
