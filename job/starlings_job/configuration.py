"""A Hugging Face configuration from outside, checked and written out. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlings_job.config_checks import SLIDING
from starlings_job.errors import JobFileError
from starlings_job.family import Family

# Keys that say nothing about the computation in training; dropped.
IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "cache_implementation",
        "pretraining_tp",
        "task_specific_params",
        "model_type",
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "classifier_dropout",
        "is_decoder",
        "gradient_checkpointing",
        "output_past",
        "_commit_hash",
        "ignore_keys_at_rope_validation",
    ]
)


def checked_config(
    family: Family, raw: Mapping[str, Any], where: str, *, untie: bool
) -> tuple[dict[str, Any], list[str]]:
    """The normalised configuration and notes about what was changed.

    Raises:
        JobFileError: a key that is not allowed (naming those that are), a bad value, sizes that do not fit.
    """
    config: dict[str, Any] = {**family.defaults, **_allowed(family, raw, where)}
    missing = [key for key in family.required if key not in config]
    if missing:
        raise JobFileError(f"{where}: {', '.join(missing)} missing for a {family.name} model")
    notes = []
    for key in family.dropout_keys:
        if config.get(key, 0.1):
            if config.get(key):
                notes.append(f"{key} is set to 0: replicas of a stage must compute alike")
            config[key] = 0.0
    config.setdefault("attn_implementation", "sdpa")
    for key, assumed in family.assumed_tokens.items():
        if key not in config and assumed >= config["vocab_size"]:
            config[key] = None
    tied = bool(config.get("tie_word_embeddings", family.ties_by_default))
    if tied and untie:
        notes.append(
            "input and output embeddings are untied: each gets weights of its own, and what is exported says "
            "tie_word_embeddings = false"
        )
    config["tie_word_embeddings"] = tied and not untie
    if family.layer_lists is not None:
        for key, derived in family.layer_lists(config).items():
            if key == "no_rope_layers" or config.get(key) is None:
                config[key] = derived
    wrong = _sizes_wrong(family, config) or _layers_wrong(family, config)
    if wrong is None and family.fits is not None:
        wrong = family.fits(config)
    if wrong:
        raise JobFileError(f"{where}: {wrong}")
    return config, notes


def _allowed(family: Family, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys that are kept, by the family's own names, each value checked."""
    config: dict[str, Any] = {}
    for given, value in raw.items():
        key = family.aliases.get(given, given)
        if key == "auto_map":
            raise JobFileError(
                f"{where}: the model needs code of its own (auto_map), which is never run; choose another, or "
                f"delete the key if Hugging Face's own {family.name} code computes the same"
            )
        if key == "_attn_implementation":
            key = "attn_implementation"
        if key in IGNORED_KEYS or (key == "add_cross_attention" and value is False):
            continue
        check = family.keys.get(key)
        if check is None:
            allowed = ", ".join(sorted(family.keys))
            raise JobFileError(f"{where}: key {given!r} is not allowed for {family.name}; allowed: {allowed}")
        if key == "attn_implementation" and value is None:
            continue
        wrong = check(value)
        if wrong:
            raise JobFileError(f"{where}: {given} {wrong}, not {str(value)[:60]!r}")
        config[key] = value
    return config


def _sizes_wrong(family: Family, config: Mapping[str, Any]) -> str | None:
    width, heads = config[family.width_key], config[family.heads_key]
    given = config.get("head_dim")
    if width % heads and (family.heads_divide_width or not given):
        return f"{family.width_key} = {width} is not a multiple of {heads} heads"
    each = given or width // heads
    if family.rotary and each % 2:
        return f"attention heads of {each} values cannot be rotated in pairs: the number must be even"
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        return f"{heads} attention heads cannot share {groups} key/value heads evenly"
    padding = config.get("pad_token_id")
    if padding is not None and padding >= config["vocab_size"]:
        return f"pad_token_id = {padding} is outside the vocabulary of {config['vocab_size']}"
    return None


def _layers_wrong(family: Family, config: Mapping[str, Any]) -> str | None:
    count = config[family.layers_key]
    for key in ("layer_types", "no_rope_layers"):
        if key in family.keys and len(config[key]) != count:
            return f"{key} has {len(config[key])} entries for {family.layers_key} = {count}"
    if SLIDING not in config.get("layer_types", ()):
        return None
    windowed = config.get("use_sliding_window", True) or family.name == "smollm3"
    if config["sliding_window"] is None or not windowed:
        return f"layer_types has {SLIDING}, but there is no sliding_window"
    return None
