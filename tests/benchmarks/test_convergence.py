"""What the convergence benchmark trains, and how it looks for the best rates."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from convergence import beside_best, rates_given
from convergence_rows import RATES, all_rows


def test_rates_are_tried_towards_the_better_side_until_that_is_worse() -> None:
    bowl = {1e-3: 3.0, 2e-3: 2.0, 4e-3: 1.0, 8e-3: 2.0}
    tried = {rate: bowl[rate] for rate in RATES[1:3]}
    steps = []
    while wanted := beside_best(tried, RATES):
        steps += wanted
        tried |= {rate: bowl[rate] for rate in wanted}
    assert steps == [8e-3]
    assert beside_best({2e-3: 1.0, 4e-3: 2.0}, RATES) == [1e-3]
    assert beside_best({1e-3: 1.0, 2e-3: 2.0}, RATES) == []


def test_known_rates_name_their_presets() -> None:
    assert rates_given("pairs=0.002,allreduce=4e-3") == {"pairs": 0.002, "allreduce": 0.004}
    with pytest.raises(argparse.ArgumentTypeError, match="is no preset"):
        rates_given("sync=1")


def test_a_quick_row_has_a_round_in_it() -> None:
    for one in all_rows():
        quick = one.quick
        assert quick.rules.phase_at(0, quick.steps).inner_steps < quick.steps, one.key


def test_the_all_to_all_row_exchanges_as_often_as_pairs_do() -> None:
    pairs, diloco = (next(r for r in all_rows() if r.key == key) for key in ("long pairs", "long diloco"))
    for step in range(pairs.steps):
        assert diloco.rules.phase_at(step, diloco.steps) == pairs.rules.phase_at(step, pairs.steps)
