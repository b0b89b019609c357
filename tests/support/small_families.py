"""Small configurations of every Hugging Face family beside llama and gpt2, each with what sets the family apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY, WIDTH = 97, 32
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
SMALL: Mapping[str, Mapping[str, Any]] = {
    # The window is shorter than the sequences of the tests, and begins in the middle of the model.
    "qwen3": {
        **_SIZES,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
        "rope_theta": 1e6,
    },
    # More experts than tokens can reach, and one layer without.
    "qwen3_moe": {
        **_SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 24,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mistral": {**_SIZES, "sliding_window": 6, "rope_theta": 1e4},
    "olmo2": {**_SIZES, "num_key_value_heads": 4, "rope_theta": 5e5, "pad_token_id": 96},
    "phi3": {**_SIZES, "resid_pdrop": 0.1, "partial_rotary_factor": 0.5, "sliding_window": 6},
    "gpt_neox": {
        **{key: value for key, value in _SIZES.items() if key != "num_key_value_heads"},
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "hidden_dropout": 0.1,
    },
    # Every second layer without rotation, and with a window.
    "smollm3": {**_SIZES, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6},
    "gemma3_text": {
        **_SIZES,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 30.0,
        "pad_token_id": 0,
    },
}
