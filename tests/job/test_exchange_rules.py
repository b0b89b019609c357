"""Numbers of the presets: defaults, phases, and what is refused with which advice."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from starlings_job.exchange_rules import (
    PRESETS,
    ExchangeRules,
    Phase,
    Preset,
    RuleError,
    check,
    check_schedule,
    rules_for,
)
from starlings_job.noloco_stability import noloco_growth


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_defaults_that_pass(preset: Preset) -> None:
    assert rules_for(preset).preset == preset


def test_pairs_begin_with_frequent_plain_averaging_for_a_fifth_of_the_tokens() -> None:
    rules = rules_for("pairs")
    assert rules.phase_at(0, 1000) == Phase(12, 1.0, 0.0)
    assert rules.phase_at(199, 1000) == Phase(12, 1.0, 0.0)
    assert rules.phase_at(200, 1000) == Phase(50, 0.7, 0.9)
    assert rules.swaps == 2
    assert rules_for("diloco").phase_at(0, 1000) == Phase(50, 0.7, 0.9)


MAIN = Phase(50, 0.7, 0.9)


@pytest.mark.parametrize(
    ("preset", "changes", "advice"),
    [
        ("pairs", {"main": replace(MAIN, outer_momentum=1.0)}, "less than 1"),
        ("pairs", {"main": replace(MAIN, outer_momentum=-0.1)}, "0 or more"),
        ("pairs", {"main": replace(MAIN, outer_rate=0.0)}, "more than 0"),
        ("pairs", {"main": replace(MAIN, outer_rate=math.nan)}, "more than 0"),
        ("pairs", {"main": replace(MAIN, inner_steps=0)}, "1 or more"),
        ("pairs", {"swaps": 0}, "1 or more"),
        ("diloco", {"swaps": 2}, "takes 1"),
        ("pairs", {"fragments": 0}, "1 or more"),
        ("pairs", {"correction": "nadam"}, "reset_first_moment = true"),
        ("pairs", {"correction": "nadam", "main": replace(MAIN, inner_steps=65)}, "every = 66"),
        ("pairs", {"robust": "trimmed"}, "diloco"),
        ("noloco", {"main": replace(MAIN, outer_momentum=0.8)}, "less than 0.8"),
        ("noloco", {"gamma": 0.4}, "between 0.5 and 2.5"),
        ("noloco", {"gamma": 2.5}, "between 0.5 and 2.5"),
        ("noloco", {"gamma": 1.4}, "gamma = 0.7"),
        ("noloco", {"main": replace(MAIN, outer_momentum=0.7), "gamma": 1.0}, "when swaps fail"),
        ("gossip", {"main": replace(MAIN, inner_steps=5)}, "every = 1"),
        ("allreduce", {"main": replace(MAIN, inner_steps=5)}, "another preset"),
        ("sparseloco", {"feedback_decay": 1.5}, "0 to 1"),
        ("pairs", {"warmup_fraction": 1.0}, "less than 1"),
        ("pairs", {"max_staleness": -1}, "0 or more"),
        ("pairs", {"comeback_factor": math.nan}, "more than 1"),
    ],
)
def test_what_diverges_or_makes_no_sense_is_refused_with_the_fix(
    preset: Preset, changes: dict[str, object], advice: str
) -> None:
    with pytest.raises(RuleError, match=advice.replace("(", r"\(")) as caught:
        rules_for(preset, **changes)
    assert "\n" not in str(caught.value)


def test_nadam_is_allowed_where_it_is_stable() -> None:
    rules_for("pairs", correction="nadam", reset_first_moment=True)
    rules_for("pairs", correction="nadam", main=replace(MAIN, inner_steps=66))
    rules_for("pairs", correction="nadam", main=Phase(50, 1.0, 0.0))


def test_force_takes_what_diverges_but_not_what_makes_no_sense() -> None:
    check(replace(rules_for("pairs"), correction="nadam"), force=True)
    with pytest.raises(RuleError):
        check(replace(rules_for("pairs"), swaps=0), force=True)


@pytest.mark.parametrize(
    ("schedule", "fitting"),
    [
        ("sync", {"allreduce"}),
        ("async", {"pairs", "noloco", "palsgd", "gossip", "diloco", "sparseloco"}),
    ],
)
def test_schedules_take_their_presets_only(schedule: str, fitting: set[str]) -> None:
    for preset in PRESETS:
        if preset in fitting:
            check_schedule(preset, schedule)
        else:
            with pytest.raises(RuleError, match="one of"):
                check_schedule(preset, schedule)
    with pytest.raises(RuleError, match="does not exist"):
        check_schedule("pairs", "sometimes")


# ---------------------------------------------------------------------- NoLoCo's region


def simulated_growth(
    alpha: float, gamma: float, drop_rate: float, replicas: int = 4000, rounds: int = 60
) -> float:
    """The recursion itself, over many scalar replicas with random partners."""
    rng = np.random.default_rng(5)
    x, d, sizes = rng.standard_normal(replicas), np.zeros(replicas), []
    for _ in range(rounds):
        order = rng.permutation(replicas)
        partner = np.empty(replicas, dtype=int)
        partner[order[::2]], partner[order[1::2]] = order[1::2], order[::2]
        kept = np.empty(replicas)
        kept[order[::2]] = kept[order[1::2]] = rng.random(replicas // 2) >= drop_rate
        d = alpha * d - gamma * kept * (x - x[partner]) / 2
        x = x + d
        sizes.append(float(np.mean((x - x.mean()) ** 2)))
    return float((sizes[-1] / sizes[19]) ** (1 / (rounds - 20)))


@pytest.mark.parametrize(
    ("alpha", "gamma", "drop_rate"),
    [(0.5, 0.7, 0.0), (0.5, 0.7, 0.5), (0.5, 1.8, 0.0), (0.8, 1.0, 0.5), (0.0, 1.0, 0.3)],
)
def test_the_growth_of_distances_is_that_of_the_recursion(
    alpha: float, gamma: float, drop_rate: float
) -> None:
    assert noloco_growth(alpha, gamma, drop_rate) == pytest.approx(
        simulated_growth(alpha, gamma, drop_rate), rel=0.04
    )


def test_the_growth_without_momentum_is_known_in_closed_form() -> None:
    """E x^2 is multiplied by 1 - gamma + gamma^2 / 2."""
    for gamma in (0.1, 0.7, 1.0, 1.9, 2.0, 2.5):
        assert noloco_growth(0.0, gamma) == pytest.approx(1 - gamma + gamma**2 / 2)


def test_at_a_momentum_of_eight_tenths_a_usual_gamma_diverges_once_swaps_fail() -> None:
    assert noloco_growth(0.8, 0.9, 0.5) > 1
    assert isinstance(rules_for("noloco"), ExchangeRules)
    assert noloco_growth(0.5, 0.7, 0.5) < 0.9
