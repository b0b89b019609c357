"""The model families: which configuration keys each may have, and where its blocks and parameters lie.

Configurations come from outside (an owner's file, then a coordinator's message on a volunteer's machine),
and a Hugging Face configuration can name code and native kernels to fetch. So keys are allow-listed and
values are checked. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlings_job.config_checks import (
    FULL,
    LAYERS_LIMIT,
    ROPE_TYPES,
    SLIDING,
    Check,
    flag,
    layer_numbers,
    layer_types,
    one_of,
    only,
    real,
    rope,
    rope_by_layer_type,
    token_id,
    token_ids,
    whole,
    zeros_and_ones,
)
from starlings_job.family import Family

_ACTIVATION = one_of("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = (
    whole(1, 1 << 17),
    whole(1, LAYERS_LIMIT),
    whole(1, 4096),
    whole(2, 1 << 22),
)
_INNER, _POSITIONS = whole(1, 1 << 20), whole(1, 1 << 24)
_WINDOW = whole(1, 1 << 24, optional=True)
_SHARED: dict[str, Check] = {
    "vocab_size": _VOCABULARY,
    "initializer_range": real(0, 1),
    "tie_word_embeddings": flag,
    "bos_token_id": token_ids,
    "eos_token_id": token_ids,
    "pad_token_id": token_id,
    "attn_implementation": one_of("sdpa", "eager"),
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# What the descendants of Llama have in common.
_DECODER: dict[str, Check] = {
    **_SHARED,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": whole(1, 4096, optional=True),
    "hidden_act": _ACTIVATION,
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": real(0, 1),
    "rope_theta": real(1, 1e12),
    "rope_scaling": rope(*ROPE_TYPES),
    "rope_parameters": rope(*ROPE_TYPES),
    "attention_bias": flag,
    "attention_dropout": real(0, 1),
}

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys={**_DECODER, "head_dim": whole(1, 4096, optional=True), "mlp_bias": flag},
    required=_SIZES,
    heads_divide_width=True,
    assumed_tokens={"bos_token_id": 1, "eos_token_id": 2},
    defaults={"max_position_embeddings": 2048},
)

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        **_SHARED,
        "n_positions": _POSITIONS,
        "n_embd": _WIDTH,
        "n_layer": _LAYERS,
        "n_head": _HEADS,
        "n_inner": whole(1, 1 << 20, optional=True),
        "activation_function": _ACTIVATION,
        "resid_pdrop": real(0, 1),
        "embd_pdrop": real(0, 1),
        "attn_pdrop": real(0, 1),
        "layer_norm_epsilon": real(0, 1),
        "scale_attn_weights": flag,
        "scale_attn_by_inverse_layer_idx": flag,
        "reorder_and_upcast_attn": flag,
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    required=("vocab_size", "n_embd", "n_layer", "n_head"),
    dropout_keys=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ties_by_default=True,
    layers_key="n_layer",
    width_key="n_embd",
    heads_key="n_head",
    positions_key="n_positions",
    heads_divide_width=True,
    rotary=False,
    base="transformer",
    layer_list="h",
    embed_modules=("wte", "wpe"),
    norm_module="ln_f",
    assumed_tokens={"bos_token_id": 50256, "eos_token_id": 50256},
    defaults={"n_positions": 1024},
)


def _qwen3_layers(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    window = config["use_sliding_window"] and config["sliding_window"] is not None
    numbers = range(config["num_hidden_layers"])
    return {
        "layer_types": [SLIDING if window and i >= config["max_window_layers"] else FULL for i in numbers]
    }


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={
        **_DECODER,
        "head_dim": _HEADS,
        "use_sliding_window": flag,
        "sliding_window": _WINDOW,
        "max_window_layers": whole(0, LAYERS_LIMIT),
        "layer_types": layer_types,
    },
    required=(*_SIZES, "num_key_value_heads", "head_dim"),
    defaults={
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    layer_lists=_qwen3_layers,
)


def _experts_fit(config: Mapping[str, Any]) -> str | None:
    active, experts = config["num_experts_per_tok"], config["num_experts"]
    if active > experts:
        return f"num_experts_per_tok = {active} is more than num_experts = {experts}"
    for key in ("hidden_size", "moe_intermediate_size", "head_dim"):
        # Kernels that multiply many experts at once want rows that begin at 16 bytes, in half precision too.
        if config[key] % 8:
            return f"{key} = {config[key]} must be a multiple of 8"
    outside = [i for i in config["mlp_only_layers"] if i >= config["num_hidden_layers"]]
    return f"mlp_only_layers names layer {outside[0]}, which there is not" if outside else None


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={
        **_DECODER,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEADS,
        "use_sliding_window": flag,
        "sliding_window": _WINDOW,
        "max_window_layers": whole(0, LAYERS_LIMIT),
        "moe_intermediate_size": _INNER,
        "num_experts": whole(1, 4096),
        "num_experts_per_tok": whole(1, 4096),
        "norm_topk_prob": flag,
        "decoder_sparse_step": whole(1, LAYERS_LIMIT),
        "mlp_only_layers": layer_numbers,
        "router_aux_loss_coef": real(0, 1e3),
        # The balancing loss of a layer is no sum over samples, so microbatches would not add up to the step.
        "output_router_logits": only(False, because="the auxiliary loss is not trained"),
    },
    aliases={"num_local_experts": "num_experts"},
    required=(
        *_SIZES,
        "num_key_value_heads",
        "head_dim",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
    ),
    stacked={
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
    },
    defaults={"max_position_embeddings": 32768, "decoder_sparse_step": 1},
    layer_lists=lambda config: {"mlp_only_layers": []},
    fits=_experts_fit,
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    keys={
        **{key: check for key, check in _DECODER.items() if key != "attention_bias"},
        "num_key_value_heads": _HEADS,
        "head_dim": whole(1, 4096, optional=True),
        "sliding_window": _WINDOW,
    },
    required=(*_SIZES, "num_key_value_heads"),
    assumed_tokens={"bos_token_id": 1, "eos_token_id": 2},
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
)

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=_DECODER,
    required=_SIZES,
    assumed_tokens={"pad_token_id": 1, "eos_token_id": 50279},
    defaults={"max_position_embeddings": 2048},
)

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    keys={
        **_DECODER,
        "rope_scaling": rope("default"),
        "rope_parameters": rope("default"),
        "partial_rotary_factor": real(0.01, 1),
        "original_max_position_embeddings": _POSITIONS,
        "sliding_window": _WINDOW,
        "resid_pdrop": real(0, 1),
        "embd_pdrop": real(0, 1),
        "attention_bias": only(False, because="the family's layers have none"),
    },
    required=_SIZES,
    dropout_keys=("resid_pdrop", "embd_pdrop", "attention_dropout"),
    assumed_tokens={"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
    defaults={"max_position_embeddings": 4096},
)

GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys={
        **_SHARED,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "hidden_act": _ACTIVATION,
        "max_position_embeddings": _POSITIONS,
        "layer_norm_eps": real(0, 1),
        "rotary_pct": real(0.01, 1),
        "rotary_emb_base": real(1, 1e12),
        "rope_scaling": rope(*ROPE_TYPES),
        "rope_parameters": rope(*ROPE_TYPES),
        "use_parallel_residual": flag,
        "attention_bias": flag,
        "attention_dropout": real(0, 1),
        "hidden_dropout": real(0, 1),
    },
    required=_SIZES,
    dropout_keys=("attention_dropout", "hidden_dropout"),
    heads_divide_width=True,
    base="gpt_neox",
    embed_modules=("embed_in",),
    norm_module="final_layer_norm",
    published_output="embed_out.weight",
    assumed_tokens={"bos_token_id": 0, "eos_token_id": 2},
    defaults={"max_position_embeddings": 2048},
)


def _smollm3_layers(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    count, interval = config["num_hidden_layers"], config["no_rope_layer_interval"]
    rotated = config.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(count)]
    window = config["use_sliding_window"] and config["sliding_window"] is not None
    return {
        # Published configurations may list more layers than there are.
        "no_rope_layers": rotated[:count],
        "layer_types": [SLIDING if window and not turned else FULL for turned in rotated[:count]],
    }


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys={
        **_DECODER,
        "use_sliding_window": flag,
        "sliding_window": _WINDOW,
        "max_window_layers": whole(0, LAYERS_LIMIT),
        "no_rope_layers": zeros_and_ones,
        "no_rope_layer_interval": whole(1, LAYERS_LIMIT),
        "layer_types": layer_types,
        "mlp_bias": flag,
    },
    required=(*_SIZES, "num_key_value_heads"),
    ties_by_default=True,
    assumed_tokens={"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
    defaults={
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    layer_lists=_smollm3_layers,
)


def _gemma3_layers(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    pattern, numbers = config["sliding_window_pattern"], range(config["num_hidden_layers"])
    return {"layer_types": [SLIDING if (i + 1) % pattern else FULL for i in numbers]}


GEMMA3_TEXT = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys={
        **{key: check for key, check in _DECODER.items() if key != "hidden_act"},
        "num_key_value_heads": _HEADS,
        "head_dim": _HEADS,
        "hidden_activation": _ACTIVATION,
        "rope_local_base_freq": real(1, 1e12),
        "rope_parameters": rope_by_layer_type,
        "query_pre_attn_scalar": whole(1, 1 << 20),
        "sliding_window": _WINDOW,
        "sliding_window_pattern": whole(1, LAYERS_LIMIT),
        "layer_types": layer_types,
        "final_logit_softcapping": real(1e-6, 1e6, optional=True),
        "attn_logit_softcapping": only(None, because="Hugging Face does not apply it either"),
        "use_bidirectional_attention": only(False, None, because="a language model looks back only"),
    },
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    required=(*_SIZES, "num_key_value_heads", "head_dim"),
    ties_by_default=True,
    heads_divide_width=True,
    assumed_tokens={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6},
    layer_lists=_gemma3_layers,
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        GPT2,
        QWEN3,
        QWEN3_MOE,
        MISTRAL,
        OLMO2,
        PHI3,
        GPT_NEOX,
        SMOLLM3,
        GEMMA3_TEXT,
    )
}
