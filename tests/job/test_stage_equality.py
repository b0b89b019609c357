"""Stages composed equal the whole Hugging Face model bit for bit: outputs and gradients, every cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from starlings_job.description import ModelDescription, describe
from starlings_job.model import build_stage, initial_state, torch_tensor
from starlings_job.model.hugging_face import make_model
from starlings_job.model.initial import split, whole_model
from starlings_job.model.tensors import raw_tensor

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    # Depends on a layer's number in the whole model, so cutting must not renumber.
    "scale_attn_by_inverse_layer_idx": True,
}


def description(family: str, tied: bool, **extra: object) -> ModelDescription:
    config = {**(LLAMA if family == "llama" else GPT2), "tie_word_embeddings": tied, **extra}
    return describe(family, config, "test")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_cut(count: int) -> Iterator[list[tuple[int, int]]]:
    for size in range(count):
        for cuts in itertools.combinations(range(1, count), size):
            edges = [0, *cuts, count]
            yield [(a, b - 1) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_cut_equals_the_whole_model(family: str, tied: bool, attention: str) -> None:
    described = description(family, tied, attn_implementation=attention)
    whole = whole_model(described, seed=5)
    state = dict(initial_state(described, seed=5))
    tokens = torch.randint(0, 97, (3, 17), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(3, 17, 97, generator=torch.Generator().manual_seed(2))
    # A cache would make contiguous copies of keys and values, for which other kernels run.
    logits = whole(tokens, use_cache=False).logits
    (logits * weights).sum().backward()
    gradients = dict(split(described, {n: p.grad for n, p in whole.named_parameters()}))

    for spans in every_cut(len(described.blocks)):
        stages = [build_stage(described, *span) for span in spans]
        found: dict[tuple[str, str], torch.Tensor] = {}
        with torch.no_grad():
            for stage in stages:
                for block, tensors in stage.block_tensors().items():
                    assert set(tensors) == set(state[block])
                    for name, parameter in tensors.items():
                        parameter.copy_(state[block][name])
        x, boundaries = tokens, []
        for stage in stages:
            # A boundary is a leaf: what crosses the wire has no graph.
            entry = x.detach().requires_grad_(x.is_floating_point())
            x = stage(entry)
            boundaries.append((entry, x))
        assert torch.equal(x, logits)
        (x * weights).sum().backward()
        for (entry, _), (_, out) in zip(reversed(boundaries[1:]), reversed(boundaries[:-1]), strict=True):
            out.backward(entry.grad)
        for stage in stages:
            for block, tensors in stage.block_tensors().items():
                for name, parameter in tensors.items():
                    assert parameter.grad is not None
                    found[block, name] = parameter.grad
        tied_pair = described.tied_parameters()
        for block, tensors in gradients.items():
            for name, expected in tensors.items():
                if tied_pair is None or (block, name) not in tied_pair:
                    assert torch.equal(found[block, name], expected), (spans, block, name)
        if tied_pair is not None:
            # The two uses' gradients are summed in either order: equal, as the sum of two floats commutes.
            assert torch.equal(found[tied_pair[0]] + found[tied_pair[1]], gradients["embed"][tied_pair[0][1]])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parameters_may_be_views_of_a_flat_buffer(family: str) -> None:
    described = description(family, False)
    stage = build_stage(described, 1, 3)
    parameters = [p for tensors in stage.block_tensors().values() for p in tensors.values()]
    flat = torch.randn(sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(0)) * 0.1
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
    before = stage(x)
    flat.mul_(0.5)
    assert not torch.equal(stage(x), before)


def test_the_initial_state_is_what_hugging_face_would_draw() -> None:
    from transformers import AutoModelForCausalLM

    from starlings_job.model.hugging_face import make_config

    described = description("llama", True)
    torch.manual_seed(11)
    expected = AutoModelForCausalLM.from_config(make_config(described)).state_dict()
    torch.manual_seed(1234)
    marker = torch.get_rng_state()
    state = dict(initial_state(described, seed=11))
    assert torch.equal(torch.get_rng_state(), marker)
    for block, tensors in state.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[described.hugging_face_name(block, name)])
    assert torch.equal(state["head"]["lm_head.weight"], state["embed"]["embed_tokens.weight"])
    other = dict(initial_state(described, seed=12))
    assert not torch.equal(other["embed"]["embed_tokens.weight"], state["embed"]["embed_tokens.weight"])


def test_rope_scaling_survives_the_cut() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    described = description("llama", False, rope_parameters=scaling)
    whole = make_model(described)
    stage = build_stage(described, 1, 2)
    assert torch.equal(stage.body.base.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert described == description("llama", False, rope_parameters=scaling)


def test_frozen_parameters_have_no_gradient() -> None:
    described = describe("llama", LLAMA, "test", trainable=("model.layers.1.*", "lm_head.weight"))
    stage = build_stage(described, 0, len(described.blocks) - 1)
    assert ("layers.1", "mlp.up_proj.weight") in stage.trainable_names
    assert ("layers.0", "mlp.up_proj.weight") not in stage.trainable_names
    for block, tensors in stage.block_tensors().items():
        for name, parameter in tensors.items():
            assert parameter.requires_grad == ((block, name) in stage.trainable_names)
    assert ("head", "lm_head.weight") in stage.trainable_names
    assert ("head", "norm.weight") not in stage.trainable_names


def test_a_classifier_is_cut_like_a_language_model() -> None:
    described = describe("sequential", {"factory": "shapes_classifier", "width": 8, "layers": 2}, "test")
    whole = whole_model(described, seed=0)
    state = dict(initial_state(described, seed=0))
    images = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = whole(images)
    for spans in every_cut(len(described.blocks)):
        x = images
        for span in spans:
            stage = build_stage(described, *span)
            with torch.no_grad():
                for block, tensors in stage.block_tensors().items():
                    for name, parameter in tensors.items():
                        parameter.copy_(state[block][name])
            x = stage(x)
        assert torch.equal(x, expected)


def test_raw_tensors_keep_type_shape_and_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8):
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        again = torch_tensor(raw_tensor(tensor.t()))
        assert again.dtype == dtype
        assert torch.equal(again, tensor.t())
    assert torch_tensor(raw_tensor(torch.zeros(0, 4))).shape == (0, 4)
    assert torch_tensor(raw_tensor(torch.tensor(3.5))).item() == 3.5
