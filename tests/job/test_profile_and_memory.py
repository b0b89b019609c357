"""The profile against independent formulas, and memory by the design's terms."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from starlings_job.description import describe
from starlings_job.exchange_rules import rules_for
from starlings_job.memory import HEADROOM, bytes_per_parameter, slots_that_fit, stage_memory
from starlings_job.model import build_stage, measure_profile
from starlings_job.presets import PRESETS
from starlings_job.profile import Profile, ProfileError
from starlings_job.records import DatasetMeta
from starlings_job.sections import TrainSection
from starlings_job.spec import parse_job


def meta(sequence_length: int = 64) -> DatasetMeta:
    return DatasetMeta(
        kind="tokens",
        population=10,
        held_out=2,
        sequence_length=sequence_length,
        vocabulary_size=256,
        stride_tokens=sequence_length,
        context_tokens=256,
        tokenizer="bytes",
    )


@pytest.fixture(scope="module")
def micro() -> Profile:
    return measure_profile(describe("llama", PRESETS["micro"].config, "preset"), meta())


def test_tiny_has_the_promised_size() -> None:
    profile = measure_profile(describe("llama", PRESETS["tiny"].config, "preset"), meta(128))
    assert profile.parameter_count == 1_234_560


def test_the_profile_agrees_with_formulas(micro: Profile) -> None:
    width, inner, length, vocabulary = 64, 176, 64, 256
    layer = next(b for b in micro.blocks if b.kind == "layer")
    assert layer.parameter_count == 4 * width * width + 3 * width * inner + 2 * width
    linear = 2 * length * (4 * width * width + 3 * width * inner)
    attention = 2 * 2 * length * length * width
    # The counter knows full, not causal, attention.
    assert layer.flops_per_sample == linear + attention
    assert layer.boundary_bytes_per_sample == 4 * length * width
    head = micro.blocks[-1]
    assert head.flops_per_sample == 2 * length * width * vocabulary
    assert head.boundary_bytes_per_sample == 4 * length * vocabulary
    assert micro.blocks[0].parameter_count == vocabulary * width
    assert micro.record_bytes == 65
    assert micro.kinds == {"embed": 0, "layer": 1, "head": 5}


def test_activation_bytes_match_what_autograd_holds(micro: Profile) -> None:
    """A layer keeps its six linear inputs, the attention's parts, and the gate's: a multiple of width x length."""
    layer = next(b for b in micro.blocks if b.kind == "layer")
    least = 4 * 64 * (6 * 64 + 2 * 176)
    assert least < layer.activation_bytes_per_sample < 4 * least


def test_a_tied_parameter_counts_once() -> None:
    config = {**PRESETS["micro"].config, "tie_word_embeddings": True}
    tied = measure_profile(describe("llama", config, "preset"), meta())
    assert tied.tied_count == 256 * 64
    assert tied.parameter_count + tied.tied_count == sum(b.parameter_count for b in tied.blocks)


def test_frozen_parameters_are_counted_apart() -> None:
    described = describe("llama", PRESETS["micro"].config, "preset", trainable=("model.layers.0.*",))
    profile = measure_profile(described, meta())
    assert [b.trainable_count for b in profile.blocks] == [0, profile.blocks[1].parameter_count, 0, 0, 0, 0]


def test_profiles_survive_json(micro: Profile) -> None:
    assert Profile.from_json(micro.to_json()) == micro
    record = json.loads(micro.to_json())
    broken = [
        b"",
        b"[]",
        b"{" * 10**5,
        json.dumps({**record, "format": 2}).encode(),
        json.dumps({**record, "blocks": []}).encode(),
        json.dumps({**record, "sequence_length": -1}).encode(),
        json.dumps({**record, "blocks": [{**record["blocks"][0], "parameter_count": 1e9}]}).encode(),
    ]
    for data in broken:
        with pytest.raises(ProfileError):
            Profile.from_json(data)


def test_bytes_per_parameter_by_the_terms() -> None:
    adamw, sgd = TrainSection(), TrainSection(optimizer="sgd")
    assert bytes_per_parameter(adamw) == 4 + 4 + 8 + 4
    assert bytes_per_parameter(adamw, "int8:128", autocast=True) == 4 + 4 + 8 + 4 + 8 + 2
    # fp16 drops something too, and Zstandard nothing.
    assert bytes_per_parameter(adamw, "fp16") == bytes_per_parameter(adamw, "topk:64/4096|int2") == 28
    assert bytes_per_parameter(adamw, "exact|zstd:3") == 20
    assert bytes_per_parameter(sgd) == 12
    assert bytes_per_parameter(replace_momentum(sgd)) == 16
    assert bytes_per_parameter(adamw, extra_versions=2) == 28
    pairs = rules_for("pairs", momentum_codec="int4:64", fragments=4)
    assert bytes_per_parameter(adamw, pairs.codec, pair_rules=pairs) == 20 + 8 + 16 / 4
    at_home = rules_for("pairs")
    assert bytes_per_parameter(adamw, at_home.codec, pair_rules=at_home) == 20 + 8 + 8


def replace_momentum(train: TrainSection) -> TrainSection:
    return train.model_copy(update={"momentum": 0.9})


def test_stage_memory_by_the_terms(micro: Profile) -> None:
    use = stage_memory(micro, 1, 2, per_parameter=20, microbatch=4, slots=3)
    parameters = sum(b.parameter_count for b in micro.blocks[1:3])
    assert use.weights == 4 * parameters
    assert use.training == 16 * parameters
    boundary = 4 * 64 * 64
    kept = sum(b.activation_bytes_per_sample for b in micro.blocks[1:3])
    assert use.activations == 3 * 4 * (2 * boundary + kept)
    assert use.loss == 0
    assert use.total == int((use.weights + use.training + use.activations) * (1 + HEADROOM))

    again = stage_memory(micro, 1, 2, per_parameter=20, microbatch=4, slots=3, recompute=True)
    assert again.activations == 3 * 4 * 2 * boundary + 4 * kept
    last = stage_memory(micro, 5, 5, per_parameter=20, microbatch=4, slots=1)
    assert last.loss == 3 * 4 * 64 * 256 * 4


def test_frozen_parameters_need_only_weights(micro: Profile) -> None:
    frozen = replace(micro, blocks=tuple(replace(b, trainable_count=0) for b in micro.blocks))
    assert stage_memory(frozen, 0, 5, per_parameter=20, microbatch=1, slots=1).training == 0


def test_slots_that_fit_is_the_largest_number(micro: Profile) -> None:
    def need(slots: int) -> int:
        return stage_memory(micro, 0, 5, per_parameter=20, microbatch=2, slots=slots).total

    def fit(memory: int) -> int:
        return slots_that_fit(
            micro, 0, 5, per_parameter=20, microbatch=2, memory_bytes=memory, slots_wanted=8
        )

    assert fit(need(1) - 1) == 0
    for slots in range(1, 9):
        assert fit(need(slots)) == slots
        assert fit(need(slots) - 1) == slots - 1
    assert fit(need(20)) == 8


def test_limits_hold_what_travels(micro: Profile) -> None:
    assert micro.tensor_limit_bytes(4) >= 4 * sum(b.parameter_count for b in micro.blocks)
    assert micro.tensor_limit_bytes(1000) >= 1000 * 4 * 64 * 256
    assert micro.block_limit_bytes() >= 12 * micro.blocks[1].parameter_count


def test_measured_shapes_are_real_shapes(micro: Profile) -> None:
    described = describe("llama", PRESETS["micro"].config, "preset")
    stage = build_stage(described, 0, 0)
    out = stage(torch.zeros(1, 64, dtype=torch.int64))
    assert out.numel() * 4 == micro.blocks[0].boundary_bytes_per_sample


def test_a_job_whose_weights_are_predicted_keeps_a_copy_more() -> None:
    text = """
    [job]
    name = "ahead"
    tokens = "1M"
    [model]
    preset = "tiny"
    [train]
    schedule = "async"
    batch = 8
    """
    plain, ahead = parse_job(text), parse_job(text + 'correction = "predict"')
    assert ahead.bytes_per_parameter == plain.bytes_per_parameter + 4
