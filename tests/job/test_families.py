"""Model configurations come from outside: keys are allow-listed, values checked, code never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starlings_job.description import ModelDescription, describe, describe_config_file
from starlings_job.errors import JobFileError

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


def test_missing_keys_and_unknown_families_are_named() -> None:
    with pytest.raises(JobFileError, match="num_hidden_layers missing"):
        describe("llama", {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "config.json")
    with pytest.raises(JobFileError, match=r"'mamba' is not supported; allowed: llama, gpt2$"):
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
    ],
)
def test_names_go_both_ways(family: str, config: dict[str, Any], pairs: dict[tuple[str, str], str]) -> None:
    described = describe(family, config, "x")
    for (block, name), full in pairs.items():
        assert described.hugging_face_name(block, name) == full
        assert described.locate(full) == (block, name)
        # Published checkpoints of base models lack the prefix.
        assert described.locate(full.removeprefix(described.rules.base + ".")) == (block, name)
    assert described.locate("something.else") is None
    assert described.locate(f"{described.rules.base}.{described.rules.layer_list}.x.y") is None


def test_a_tied_output_embedding_is_frozen_with_the_input_embedding() -> None:
    described = describe("gpt2", GPT2, "x", trainable=("*.wte.*",))
    assert described.is_trainable("embed", "wte.weight")
    assert described.is_trainable("head", "lm_head.weight")
