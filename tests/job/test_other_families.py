"""Every other Hugging Face family: stages composed equal the whole model bit for bit, the profile is the module's,
and weights go in from a published directory and out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from starlings_job.checkpoint import read_block
from starlings_job.description import ModelDescription, describe
from starlings_job.errors import JobFileError
from starlings_job.export import export_checkpoint
from starlings_job.importing import hugging_face_state
from starlings_job.model import build_stage, initial_state, measure_profile, raw_tensor
from starlings_job.model.hugging_face import make_config
from starlings_job.model.initial import split, whole_model
from starlings_job.model.stage import StageModule
from starlings_job.prepare import prepare
from starlings_job.prepared import load_prepared, load_profile
from starlings_job.records import DatasetMeta
from starlings_job.safetensors_io import write_file
from starlings_job.state import RawTensor
from support.small_families import SMALL, VOCABULARY, WIDTH

TOKENS = torch.randint(1, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(3, 17, VOCABULARY, generator=torch.Generator().manual_seed(2))
META = DatasetMeta(
    kind="tokens",
    population=10,
    held_out=2,
    sequence_length=17,
    vocabulary_size=VOCABULARY,
    stride_tokens=17,
    context_tokens=64,
    tokenizer="bytes",
)
# The blocks are the embedding, four layers and the head. Where each stage begins, and the end.
CUTS = {False: ((0, 1, 2, 3, 4, 5, 6), (0, 3, 6)), True: ((0, 2, 5, 6), (0, 1, 5, 6), (0, 6))}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(family: str, **extra: Any) -> ModelDescription:
    return describe(family, {**SMALL[family], **extra}, "test")


def filled(stage: StageModule, state: dict[str, dict[str, torch.Tensor]]) -> StageModule:
    with torch.no_grad():
        for block, tensors in stage.block_tensors().items():
            assert set(tensors) == set(state[block])
            for name, parameter in tensors.items():
                parameter.copy_(state[block][name])
    return stage


def awake(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Larger weights than at the beginning, so that attention, routing and soft limits tell inputs apart."""
    generator = torch.Generator().manual_seed(3)
    return {
        block: {n: t + 0.2 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        for block, tensors in state.items()
    }


def whole_with(described: ModelDescription, state: dict[str, dict[str, torch.Tensor]]) -> Any:
    whole = whole_model(described, seed=5)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            found = described.locate(name)
            assert found is not None
            parameter.copy_(state[found[0]][found[1]])
    return whole


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", SMALL)
def test_stages_composed_equal_the_whole_model(family: str, tied: bool) -> None:
    described = small(family, tie_word_embeddings=tied, attn_implementation="eager" if tied else "sdpa")
    state = awake(dict(initial_state(described, seed=5)))
    pair = described.tied_parameters()
    if pair is not None:
        state[pair[1][0]][pair[1][1]] = state[pair[0][0]][pair[0][1]]
    whole = whole_with(described, state)
    logits = whole(TOKENS, use_cache=False).logits
    (logits * WEIGHTS).sum().backward()
    gradients = dict(split(described, {n: p.grad for n, p in whole.named_parameters()}))
    for cut in CUTS[tied]:
        stages = [filled(build_stage(described, a, b - 1), state) for a, b in pairwise(cut)]
        x, boundaries = TOKENS, []
        for stage in stages:
            entry = x.detach().requires_grad_(x.is_floating_point())
            x = stage(entry)
            boundaries.append((entry, x))
        assert torch.equal(x, logits), cut
        (x * WEIGHTS).sum().backward()
        for (entry, _), (_, out) in zip(reversed(boundaries[1:]), reversed(boundaries[:-1]), strict=True):
            out.backward(entry.grad)
        found = {
            (block, name): parameter.grad
            for stage in stages
            for block, tensors in stage.block_tensors().items()
            for name, parameter in tensors.items()
        }
        if pair is not None:
            # The sum of two floats commutes, so the two uses' gradients may be added in either order.
            embedding = found.pop(pair[0])
            assert embedding is not None
            assert torch.equal(embedding + found.pop(pair[1]), gradients["embed"][pair[0][1]])
        for (block, name), gradient in found.items():
            assert gradient is not None, (cut, block, name)
            assert torch.equal(gradient, gradients[block][name]), (cut, block, name)


@pytest.mark.parametrize("family", SMALL)
def test_every_stage_has_the_constants_of_the_whole_model(family: str) -> None:
    """Rotary frequencies, by type of layer where types differ, and the embedding's scale."""
    described = small(family)
    whole = whole_model(described, seed=0)
    expected = {f"base.{name}": buffer for name, buffer in whole.base_model.named_buffers()}
    assert expected
    seen = set()
    for block in range(len(described.blocks)):
        for name, buffer in build_stage(described, block, block).body.named_buffers():
            assert torch.equal(buffer, expected[name]), (block, name)
            seen.add(name)
    assert seen == set(expected)
    if family == "gemma3_text":
        sliding = build_stage(described, 1, 1).body.base.rotary_emb
        both = build_stage(described, 1, 2).body.base.rotary_emb
        assert [name for name, _ in sliding.named_buffers() if "full" in name] == []
        assert not torch.equal(both.full_attention_inv_freq, both.sliding_attention_inv_freq)


@pytest.mark.parametrize("family", SMALL)
def test_the_profile_counts_what_the_module_has(family: str) -> None:
    described = small(family)
    profile = measure_profile(described, META)
    whole = whole_model(described, seed=0)
    assert profile.parameter_count == sum(p.numel() for p in whole.parameters())
    for block, tensors in initial_state(described, seed=0):
        counted = next(b for b in profile.blocks if b.name == block)
        assert counted.parameter_count == counted.trainable_count == sum(t.numel() for t in tensors.values())
        if block.startswith("layers."):
            # A layer keeps at least the inputs of attention and network.
            assert counted.activation_bytes_per_sample > 2 * 4 * 17 * WIDTH
            assert counted.flops_per_sample > 2 * 17 * 4 * WIDTH * WIDTH
            assert counted.boundary_bytes_per_sample == 4 * 17 * WIDTH
    assert {block.kind for block in profile.blocks} == KINDS[family]


KINDS = {
    "qwen3": {"embed", "layer", "layer.sliding", "head"},
    "qwen3_moe": {"embed", "layer", "layer.dense", "head"},
    "mistral": {"embed", "layer", "head"},
    "olmo2": {"embed", "layer", "head"},
    "phi3": {"embed", "layer", "head"},
    "gpt_neox": {"embed", "layer", "head"},
    "smollm3": {"embed", "layer", "layer.sliding.nope", "head"},
    "gemma3_text": {"embed", "layer", "layer.sliding", "head"},
}


def test_only_active_experts_are_arithmetic() -> None:
    profile = measure_profile(small("qwen3_moe"), META)
    sparse, dense = profile.blocks[1], profile.blocks[2]
    tokens, experts, active, inner = 17, 24, 2, 16
    router = 2 * tokens * WIDTH * experts
    # Attention is the same in both: projections and scores.
    attention = dense.flops_per_sample - 2 * tokens * 3 * WIDTH * 48
    assert sparse.flops_per_sample == attention + router + active * 2 * tokens * 3 * WIDTH * inner
    scores = 2 * 2 * tokens * tokens * 32
    assert attention == pytest.approx(2 * tokens * (2 * WIDTH * 32 + 2 * WIDTH * 16) + scores, rel=1e-2)
    # Memory is for all of them.
    assert sparse.parameter_count - dense.parameter_count == WIDTH * (experts * (1 + 3 * inner) - 3 * 48)


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    described = small("qwen3_moe")
    stage = filled(build_stage(described, 0, 5), awake(dict(initial_state(described, seed=5))))
    # What the allocator gives next is no zero.
    shape = stage.block_tensors()["layers.0"]["mlp.experts.gate_up_proj"].shape
    for spoilt in [torch.full(shape, torch.nan) for _ in range(8)]:
        del spoilt
    stage(TOKENS[:1, :5]).sum().backward()
    for name in described.rules.stacked:
        gradient = stage.block_tensors()["layers.0"][name].grad
        assert gradient is not None
        idle = gradient.abs().amax(dim=(1, 2)) == 0
        # Five tokens reach at most ten of the experts.
        assert 14 <= int(idle.sum()) < 24
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("family", SMALL)
def test_lists_by_layer_are_those_that_hugging_face_derives(family: str) -> None:
    written = make_config(small(family))
    raw = {key: value for key, value in SMALL[family].items() if key not in ("layer_types", "no_rope_layers")}
    silent = type(written)(**raw)
    for key in ("layer_types", "no_rope_layers", "mlp_only_layers"):
        assert getattr(written, key, None) == getattr(silent, key, None)
    # A description that is described again is the same: workers do so with what they are sent.
    assert ModelDescription.from_json(small(family).to_json()) == small(family)


@pytest.mark.parametrize("family", SMALL)
def test_weights_come_from_a_published_directory_and_go_back(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    described = small(family, vocab_size=256)
    state = awake(dict(initial_state(described, seed=7)))
    if described.tied:
        state["head"]["lm_head.weight"] = state["embed"][described.rules.token_embedding]
    whole = whole_with(described, state)
    whole.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "f"\ntokens = 512\n[model]\nfrom = "hf"\n'
        '[data]\nsource = "text.txt"\nsequence_length = 16\nheld_out = 4\n'
    )
    prepare(tmp_path / "job.toml", tmp_path / "job")
    assert load_prepared(tmp_path / "job").description.tied == described.tied
    for block, tensors in state.items():
        stored = read_block(tmp_path / "job" / "weights", 0, block)
        assert {name.removeprefix("param:") for name in stored} == set(tensors)
        for name, tensor in tensors.items():
            assert stored[f"param:{name}"].data == raw_tensor(tensor).data, (block, name)

    facts = export_checkpoint(tmp_path / "job", tmp_path / "model", version=0)
    assert facts["parameters"] == load_profile(tmp_path / "job").parameter_count
    published = {name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == published
    loaded, seen = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not seen["missing_keys"]
    assert not seen["unexpected_keys"]
    assert torch.equal(loaded(TOKENS, use_cache=False).logits, whole(TOKENS, use_cache=False).logits)


def test_stacked_experts_are_taken_too_and_missing_ones_named(tmp_path: Path) -> None:
    described = small("qwen3_moe")
    state = dict(initial_state(described, seed=7))
    full = {
        described.hugging_face_name(block, name): raw_tensor(tensor)
        for block, tensors in state.items()
        for name, tensor in tensors.items()
    }
    write(tmp_path, full)
    for block, tensors in hugging_face_state(tmp_path, described):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state[block][name])
    fused = full.pop("model.layers.2.mlp.experts.down_proj")
    write(tmp_path, {**full, "model.layers.2.mlp.experts.0.down_proj.weight": fused})
    with pytest.raises(JobFileError, match=r"lacks model\.layers\.2\.mlp\.experts\.1\.down_proj\.weight"):
        list(hugging_face_state(tmp_path, described))
    pieces = {f"model.layers.2.mlp.experts.{i}.down_proj.weight": fused for i in range(24)}
    write(tmp_path, {**full, **pieces})
    with pytest.raises(JobFileError, match=r"has shape \[24, 32, 16\], config\.json means \[32, 16\]"):
        list(hugging_face_state(tmp_path, described))


def write(folder: Path, tensors: dict[str, RawTensor]) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        write_file(file, tensors, {"format": "pt"})


def test_what_hugging_face_refuses_is_a_sentence() -> None:
    """Its own checks go further than ours; a traceback would be no help."""
    for extra, said in (
        ({"rms_norm_eps": 1}, "'rms_norm_eps' expected float"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": None}},
            "NoneType",
        ),
    ):
        with pytest.raises(JobFileError, match=f"Hugging Face refuses this qwen3 configuration: .*{said}"):
            build_stage(small("qwen3", **extra), 1, 1)
