"""Bytes per worker, as formulas of section sizes; and that they are what codecs really make."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from starlings_compression.codec import make_codec
from starlings_job.exchange_rules import PRESETS, Preset, rules_for
from starlings_job.exchange_traffic import job_bytes, round_bytes, vector_bytes

ELEMENTS = 1 << 16


def encoded(codec: str, elements: int) -> int:
    return len(make_codec(codec).encode(torch.randn(elements, generator=torch.Generator().manual_seed(1))))


def test_a_round_of_pairs_sends_weights_twice_and_momentum_where_it_travels() -> None:
    at_home = rules_for("pairs")
    assert at_home.momentum_codec is None
    assert round_bytes(at_home, at_home.main, ELEMENTS, 4) == pytest.approx(
        2 * encoded(at_home.codec, ELEMENTS), rel=0.01
    )
    rules = rules_for("pairs", momentum_codec="int4:64")
    assert rules.warmup is not None
    assert rules.momentum_codec is not None
    weights, momentum = encoded(rules.codec, ELEMENTS), encoded(rules.momentum_codec, ELEMENTS)
    assert round_bytes(rules, rules.main, ELEMENTS, 4) == pytest.approx(2 * (weights + momentum), rel=0.01)
    assert round_bytes(rules, rules.warmup, ELEMENTS, 4) == pytest.approx(2 * weights, rel=0.01)
    once = replace(rules, warmup_swaps=1)
    assert once.warmup is not None
    assert round_bytes(once, once.warmup, ELEMENTS, 4) == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_nobody_sends_anything_alone(preset: Preset) -> None:
    rules = rules_for(preset)
    assert job_bytes(rules, ELEMENTS, 1, 1000) == 0
    assert job_bytes(rules, ELEMENTS, 2, 1000) > 0


def test_fragments_divide_what_a_slot_sends() -> None:
    rules = rules_for("pairs", fragments=4)
    assert round_bytes(rules, rules.main, ELEMENTS, 4) == round_bytes(
        rules_for("pairs"), rules.main, ELEMENTS // 4, 4
    )


def test_a_job_is_its_warmup_its_rounds_and_the_exact_average_at_the_end() -> None:
    rules = rules_for("pairs")
    assert rules.warmup is not None
    warmup, main = (round_bytes(rules, phase, ELEMENTS, 4) for phase in (rules.warmup, rules.main))
    end = 2 * 3 * ELEMENTS // 4 * 4
    assert job_bytes(rules, ELEMENTS, 4, 1000) == 16 * warmup + 16 * main + end
    every_step = job_bytes(rules_for("allreduce"), ELEMENTS, 4, 1000)
    assert every_step == 1000 * 2 * 3 * ELEMENTS // 4 * 4
    assert every_step * 3 > 80 * job_bytes(rules, ELEMENTS, 4, 3000), (
        "less than 80 times fewer bytes than fp32 sync"
    )


def test_plain_vectors_take_four_bytes_an_element() -> None:
    assert vector_bytes("exact", 1000) == 4000
