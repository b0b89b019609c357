"""Plans for fleets that need not exist: figures that follow from each other, and the reasons beside them."""

from __future__ import annotations

import json

import pytest

from starlings_job.memory import stage_memory
from starlings_simulator.study.compare import compare
from starlings_simulator.study.placement import FIRST, IDLE, LAST, WHOLE, role_of
from starlings_simulator.study.planned import describe, find_plan
from starlings_simulator.study.setting import CannotPlan, Setting
from support.fleets import setting

# Eight layers need some 4 GB to train: nobody but the two in the lab's site can hold them alone.
MIXED = """
[fleet]
price_per_kwh = 0.5
[sites.lab]
region = "eu-west-1"
uplink_mbit_per_s = 1000
downlink_mbit_per_s = 1000
[[workers]]
name = "lab"
count = 2
site = "lab"
memory = "6GB"
tflops = 20
watts = 300
[[workers]]
name = "home"
count = 4
memory = "1.3GB"
tflops = 5
uplink_mbit_per_s = 20
downlink_mbit_per_s = 100
price_per_hour = 0.1
[[workers]]
name = "small"
memory = "10MB"
tflops = 5
"""


def answered(chosen: Setting) -> dict[str, object]:
    fleet, plan = find_plan(chosen)
    answer = describe(chosen, fleet, plan)
    # What machines get must be JSON.
    assert json.loads(json.dumps(answer)) == answer
    return answer


def test_a_plan_says_who_holds_what_and_the_figures_follow_from_each_other() -> None:
    chosen = setting(MIXED)
    fleet, plan = find_plan(chosen)
    answer = describe(chosen, fleet, plan)
    json.dumps(answer)
    rows = {row["worker"]: row for row in answer["placement"]}
    assert list(rows) == ["lab-1", "lab-2", "home-1", "home-2", "home-3", "home-4", "small"]
    assert rows["small"]["role"] == IDLE
    assert "more memory" in rows["small"]["reason"]
    assert answer["workers"] == 7
    assert answer["holders"] == 6
    # Every stage is held, and each holder's memory is that of the common account and fits.
    covered = {
        s
        for row in rows.values()
        if "first_stage" in row
        for s in range(row["first_stage"], row["last_stage"] + 1)
    }
    assert covered == set(range(len(answer["stages"])))
    for row in rows.values():
        if "memory" not in row:
            continue
        need = stage_memory(
            chosen.profile,
            row["first_block"],
            row["last_block"],
            per_parameter=fleet.request.bytes_per_parameter,
            microbatch=1,
            slots=row["slots"],
            recompute=row["recompute"],
        )
        assert row["memory"]["total"] == need.total <= row["memory"]["offered"]
        parts = sum(
            row["memory"][part] for part in ("weights", "training", "activations", "loss", "headroom")
        )
        assert parts == pytest.approx(need.total, abs=2)
        assert 0 <= row["load"] <= 1.0001
    # Tokens are those of microbatches; time, cost and energy follow.
    assert answer["tokens_per_s"] == pytest.approx(128 * answer["microbatches_per_s"])
    assert answer["seconds"] == pytest.approx(1e9 / answer["tokens_per_s"])
    assert answer["tokens_per_s"] <= answer["bounds"]["all"] * 1.0001 <= answer["bounds"]["compute"] * 1.001
    assert answer["cost"]["per_hour"] == pytest.approx(2 * 0.15 + 4 * 0.1)
    assert answer["cost"]["total"] == pytest.approx(answer["cost"]["per_hour"] * answer["seconds"] / 3600)
    watts = 300 * (rows["lab-1"]["load"] + rows["lab-2"]["load"])
    assert answer["energy"]["watts"] == pytest.approx(watts, rel=1e-3)
    assert answer["energy"]["workers_without_watts"] == 4
    assert sum(row["holders"] for row in answer["stages"]) == sum(
        row["last_stage"] - row["first_stage"] + 1 for row in rows.values() if "first_stage" in row
    )


def test_links_that_are_full_are_named() -> None:
    chosen = setting(MIXED.replace("tflops = 20", "tflops = 1"))
    answer = answered(chosen)
    homes = [site for site in answer["sites"] if str(site["site"]).startswith("home")]  # type: ignore[attr-defined]
    for site in homes:
        assert site["up_bytes_per_s"] <= site["up_limit_bytes_per_s"] * 1.0001
    assert any(site["fullest"] > 0.99 for site in homes)


def test_equal_arguments_give_equal_plans() -> None:
    assert answered(setting(MIXED, seed=3)) == answered(setting(MIXED, seed=3))


def test_the_jobs_own_cut_stays() -> None:
    assert len(answered(setting(MIXED, job_more="[pipeline]\nstages = 5\n"))["stages"]) == 5  # type: ignore[arg-type]
    answer = answered(setting(MIXED, job_more="[pipeline]\nstages = [4, 4, 2]\n"))
    ends = [(s["first_block"], s["last_block"]) for s in answer["stages"]]  # type: ignore[attr-defined]
    assert ends == [("embed", "layers.2"), ("layers.3", "layers.6"), ("layers.7", "head")]


def test_a_fleet_that_cannot_hold_the_model_says_how_much_is_missing() -> None:
    with pytest.raises(CannotPlan, match=r"cannot hold the model: needs .* more") as failed:
        find_plan(setting('[[workers]]\nmemory = "20MB"\ntflops = 1\ncount = 3\n'))
    assert failed.value.exit_code == 13


def test_other_layouts_reach_no_more_and_say_what_they_are() -> None:
    chosen = setting(MIXED)
    _, plan = find_plan(chosen)
    rows = {row["layout"]: row for row in compare(chosen, plan)}
    assert set(rows) == {"ours", "equal", "speed", "memory", "whole"}
    assert all(row["of_ours"] <= 1 + 1e-6 for row in rows.values())
    # The lab's two hold everything, and nobody else can.
    assert rows["whole"]["holders"] == 2
    assert rows["whole"]["tokens_per_s"] > 0


def test_roles_are_named_by_where_a_span_lies() -> None:
    assert [role_of(0, 3, 4), role_of(0, 1, 4), role_of(2, 3, 4), role_of(1, 2, 4)] == [
        WHOLE,
        FIRST,
        LAST,
        "inner stages",
    ]
