"""Model configurations come from outside: keys are allow-listed, values checked, code never run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from starlings_job.description import ModelDescription, describe, describe_config_file
from starlings_job.errors import JobFileError
from support.small_families import SMALL

LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2: dict[str, Any] = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "code of its own"),
        ({"attn_implementation": "kernels-community/flash-attn"}, "must be one of sdpa, eager"),
        ({"_attn_implementation": "flash_attention_2"}, "must be one of sdpa, eager"),
        ({"quantization_config": {}}, "key 'quantization_config' is not allowed for llama; allowed: "),
        ({"hidden_act": "os.system"}, "must be one of silu"),
        ({"hidden_size": 10**9}, "whole number from 1 to"),
        ({"hidden_size": "32"}, "whole number from 1 to"),
        ({"num_hidden_layers": True}, "whole number"),
        ({"hidden_size": 30}, "not a multiple of 4 heads"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type must be one of"),
        ({"rope_parameters": {"path": "/etc"}}, "has no key 'path'"),
        ({"eos_token_id": "2"}, "token id"),
    ],
)
def test_what_a_configuration_must_not_say(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        describe("llama", {**LLAMA, **extra}, "config.json")
    assert said in str(caught.value)
    record = {"format": 1, "family": "llama", "config": {**LLAMA, **extra}, "trainable": ["*"]}
    with pytest.raises(JobFileError):
        ModelDescription.from_record(record)


@pytest.mark.parametrize(
    ("family", "extra", "said"),
    [
        ("qwen3", {"auto_map": {"AutoModel": "x.Y"}}, "delete the key if Hugging Face's own qwen3 code"),
        ("qwen3", {"attn_implementation": "kernels-community/paged"}, "must be one of sdpa, eager"),
        (
            "qwen3",
            {"experts_implementation": "deepgemm"},
            "'experts_implementation' is not allowed for qwen3",
        ),
        ("qwen3", {"head_dim": None}, "whole number"),
        ("qwen3", {"head_dim": 15}, "the number must be even"),
        ("qwen3", {"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers = 4"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "list of full_attention and sliding_attention"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False},
            "but there is no sliding_window",
        ),
        ("qwen3_moe", {"experts_implementation": "sonicmoe"}, "is not allowed for qwen3_moe"),
        ("qwen3_moe", {"output_router_logits": True}, "must be false (the auxiliary loss is not trained)"),
        ("qwen3_moe", {"num_experts_per_tok": 25}, "is more than num_experts = 24"),
        ("qwen3_moe", {"num_experts": 10**6}, "whole number from 1 to 4096"),
        ("qwen3_moe", {"moe_intermediate_size": 20}, "must be a multiple of 8"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "names layer 4, which there is not"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "list of layer numbers"),
        ("mistral", {"sliding_window": 0}, "whole number from 1"),
        ("mistral", {"num_key_value_heads": None}, "whole number"),
        ("olmo2", {"pad_token_id": 97}, "pad_token_id = 97 is outside the vocabulary of 97"),
        ("olmo2", {"clip_qkv": 8}, "key 'clip_qkv' is not allowed for olmo2"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1]}}, "type must be one of default"),
        ("phi3", {"attention_bias": True}, "must be false"),
        ("gpt_neox", {"rotary_pct": 2}, "must be a number from 0.01 to 1"),
        ("gpt_neox", {"hidden_size": 30}, "not a multiple of 4 heads"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "2 entries for num_hidden_layers = 4"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "list of zeros and ones"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "must be null"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "must be false"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "table of the tables full_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            "sliding_attention rope_type must be one of",
        ),
        ("gemma3_text", {"sliding_window": None}, "but there is no sliding_window"),
        ("gemma3_text", {"vision_config": {}}, "key 'vision_config' is not allowed"),
    ],
)
def test_what_the_other_families_must_not_say(family: str, extra: dict[str, Any], said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        describe(family, {**SMALL[family], **extra}, "config.json")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# What else published configurations say: taken, or dropped where it has no meaning here.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3": {
        "max_window_layers": 28,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1000000.0,
    },
    "mistral": {"rope_theta": 10000.0, "sliding_window": 4096},
    "olmo2": {"attention_bias": False, "rope_scaling": None, "rope_theta": 500000},
    "phi3": {
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "sliding_window": 2047,
    },
    "gpt_neox": {"classifier_dropout": 0.1, "rope_scaling": None, "use_parallel_residual": True},
    "smollm3": {
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pretraining_tp": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "gemma3_text": {
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "eos_token_id": [1, 106],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_scaling": None,
        "sliding_window_pattern": 6,
    },
}


@pytest.mark.parametrize("family", SMALL)
def test_what_published_configurations_of_the_other_families_say(family: str) -> None:
    common = {
        "architectures": ["X"],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
    }
    described = describe(family, {**SMALL[family], **common, **PUBLISHED[family]}, "config.json")
    assert described.layer_count == 4
    assert described.tied == (family in ("smollm3", "gemma3_text"))
    assert len(described.config.get("no_rope_layers", [0] * 4)) == 4
    assert described.context_tokens == 64
    assert describe(family, described.config, "again") == replace(described, notes=())


def test_missing_keys_and_unknown_families_are_named() -> None:
    with pytest.raises(JobFileError, match="num_hidden_layers missing"):
        describe("llama", {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "config.json")
    with pytest.raises(JobFileError, match=r"'mamba' is not supported; allowed: llama, gpt2, qwen3, "):
        describe("mamba", {}, "config.json")
    with pytest.raises(JobFileError, match=r"no factory 'os\.system'"):
        describe("sequential", {"factory": "os.system"}, "config.json")
    with pytest.raises(JobFileError, match="width"):
        describe("sequential", {"factory": "shapes_classifier", "width": 10**9, "layers": 1}, "config.json")


def test_a_published_configuration_is_taken(tmp_path: Path) -> None:
    published = {
        **GPT2,
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "model_type": "gpt2",
        "n_ctx": 64,
        "n_positions": 64,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True}},
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    described = describe_config_file(tmp_path, untie=False, trainable=("*",))
    assert described.tied
    assert described.config["attn_pdrop"] == 0.0
    assert len(described.notes) == 3
    assert described.blocks == ("embed", "layers.0", "layers.1", "head")
    assert described.context_tokens == 64
    untied = describe_config_file(tmp_path / "config.json", untie=True, trainable=("*",))
    assert not untied.tied
    assert untied.tied_parameters() is None


def test_descriptions_survive_json() -> None:
    described = describe("gpt2", {**GPT2, "attn_pdrop": 0.5}, "x", trainable=("transformer.h.1.*",))
    again = ModelDescription.from_json(described.to_json())
    assert again == described
    assert again.is_trainable("layers.1", "attn.c_attn.weight")
    assert not again.is_trainable("embed", "wte.weight")
    for bad in ("", "[]", "{}", '{"format": 1}', "{" * 10**5, '{"format":1,"family":"llama","config":{}}'):
        with pytest.raises(JobFileError):
            ModelDescription.from_json(bad)


@pytest.mark.parametrize(
    ("family", "config", "pairs"),
    [
        (
            "llama",
            LLAMA,
            {
                ("embed", "embed_tokens.weight"): "model.embed_tokens.weight",
                ("layers.1", "mlp.up_proj.weight"): "model.layers.1.mlp.up_proj.weight",
                ("head", "norm.weight"): "model.norm.weight",
                ("head", "lm_head.weight"): "lm_head.weight",
            },
        ),
        (
            "gpt2",
            GPT2,
            {
                ("embed", "wpe.weight"): "transformer.wpe.weight",
                ("layers.0", "ln_1.bias"): "transformer.h.0.ln_1.bias",
                ("head", "ln_f.weight"): "transformer.ln_f.weight",
            },
        ),
        (
            "gpt_neox",
            SMALL["gpt_neox"],
            {
                ("embed", "embed_in.weight"): "gpt_neox.embed_in.weight",
                ("layers.3", "attention.dense.bias"): "gpt_neox.layers.3.attention.dense.bias",
                ("head", "final_layer_norm.bias"): "gpt_neox.final_layer_norm.bias",
                ("head", "lm_head.weight"): "lm_head.weight",
            },
        ),
    ],
)
def test_names_go_both_ways(family: str, config: dict[str, Any], pairs: dict[tuple[str, str], str]) -> None:
    described = describe(family, config, "x")
    for (block, name), full in pairs.items():
        assert described.hugging_face_name(block, name) == full
        assert described.locate(full) == (block, name)
        # Published checkpoints of base models lack the prefix.
        assert described.locate(full.removeprefix(described.rules.base + ".")) == (block, name)
    assert described.locate(described.rules.published_output) == ("head", "lm_head.weight")
    assert described.locate("something.else") is None
    assert described.locate(f"{described.rules.base}.{described.rules.layer_list}.x.y") is None


def test_a_tied_output_embedding_is_frozen_with_the_input_embedding() -> None:
    described = describe("gpt2", GPT2, "x", trainable=("*.wte.*",))
    assert described.is_trainable("embed", "wte.weight")
    assert described.is_trainable("head", "lm_head.weight")
