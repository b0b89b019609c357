"""The model families: which configuration keys each may have, and where its blocks and parameters lie.

Configurations come from outside (an owner's file, then a coordinator's message on a volunteer's machine),
and a Hugging Face configuration can name code and native kernels to fetch. So keys are allow-listed and
values are checked. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlings_job.errors import JobFileError

Check = Callable[[object], str | None]


def whole(low: int, high: int, *, optional: bool = False) -> Check:
    def check(value: object) -> str | None:
        if optional and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            return f"must be a whole number from {low} to {high}"
        return None

    return check


def real(low: float, high: float) -> Check:
    def check(value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            return f"must be a number from {low} to {high}"
        return None

    return check


def flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def one_of(*allowed: str) -> Check:
    def check(value: object) -> str | None:
        return None if value in allowed else f"must be one of {', '.join(allowed)}"

    return check


def token_ids(value: object) -> str | None:
    items = value if isinstance(value, list) else [value]
    fine = all(
        i is None or (isinstance(i, int) and not isinstance(i, bool) and -1 <= i < 2**31) for i in items
    )
    return None if fine else "must be a token id, a list of them, or null"


_ROPE_NUMBERS = [
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
]
# Types whose frequencies change with the length of the input would make stages disagree.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        return "must be a table or null"
    for key, item in value.items():
        if key in ("rope_type", "type"):
            if item not in _ROPE_TYPES:
                return f"{key} must be one of {', '.join(_ROPE_TYPES)}"
        elif key not in _ROPE_NUMBERS:
            return f"has no key {key!r}; allowed: rope_type, {', '.join(_ROPE_NUMBERS)}"
        elif item is not None and real(0, 1e12)(item):
            return f"{key} {real(0, 1e12)(item)}"
    return None


_ACTIVATION = one_of("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = whole(1, 1 << 17), whole(1, 4096), whole(1, 4096), whole(2, 1 << 22)
_POSITIONS = whole(1, 1 << 24)
_COMMON: dict[str, Check] = {
    "vocab_size": _VOCABULARY,
    "initializer_range": real(0, 1),
    "tie_word_embeddings": flag,
    "bos_token_id": token_ids,
    "eos_token_id": token_ids,
    "pad_token_id": token_ids,
    "attn_implementation": one_of("sdpa", "eager"),
}
# Keys that say nothing about the computation in training; dropped.
IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "pretraining_tp",
        "task_specific_params",
        "model_type",
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "gradient_checkpointing",
        "output_past",
        "_commit_hash",
    ]
)


@dataclass(frozen=True, slots=True)
class Family:
    """One Hugging Face model type: its keys, and how its parameter names fall into blocks."""

    name: str
    architecture: str
    keys: Mapping[str, Check]
    aliases: Mapping[str, str]
    required: tuple[str, ...]
    # Replicas must compute alike and a forward may be run twice, so these are set to 0.
    dropout_keys: tuple[str, ...]
    ties_by_default: bool
    layers_key: str
    width_key: str
    positions_key: str
    # Hugging Face prefix of everything but the output layer; published checkpoints of base models lack it.
    base: str
    layer_list: str
    embed_modules: tuple[str, ...]
    token_embedding: str
    norm_module: str
    # Ids of special tokens that Hugging Face assumes where the configuration is silent.
    assumed_tokens: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def hugging_face_name(self, block: str, name: str) -> str:
        if block.startswith("layers."):
            return f"{self.base}.{self.layer_list}.{block[7:]}.{name}"
        return name if name.startswith("lm_head.") else f"{self.base}.{name}"

    def locate(self, hugging_face_name: str) -> tuple[str, str] | None:
        """The block and the name inside it, or None for what is no parameter of this family."""
        if hugging_face_name.startswith("lm_head."):
            return "head", hugging_face_name
        rest = hugging_face_name.removeprefix(self.base + ".")
        module, _, tail = rest.partition(".")
        if module == self.layer_list:
            number, _, name = tail.partition(".")
            return (f"layers.{int(number)}", name) if number.isdecimal() and name else None
        if module in self.embed_modules:
            return "embed", rest
        return ("head", rest) if module == self.norm_module else None


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys={
        **_COMMON,
        "hidden_size": _WIDTH,
        "intermediate_size": whole(1, 1 << 20),
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": whole(1, 4096, optional=True),
        "head_dim": whole(1, 4096, optional=True),
        "hidden_act": _ACTIVATION,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": real(0, 1),
        "rope_theta": real(1, 1e12),
        "rope_scaling": rope,
        "rope_parameters": rope,
        "attention_bias": flag,
        "attention_dropout": real(0, 1),
        "mlp_bias": flag,
    },
    aliases={},
    required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    dropout_keys=("attention_dropout",),
    ties_by_default=False,
    layers_key="num_hidden_layers",
    width_key="hidden_size",
    positions_key="max_position_embeddings",
    base="model",
    layer_list="layers",
    embed_modules=("embed_tokens",),
    token_embedding="embed_tokens.weight",
    norm_module="norm",
    assumed_tokens={"bos_token_id": 1, "eos_token_id": 2},
    defaults={"max_position_embeddings": 2048},
)

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        **_COMMON,
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
    positions_key="n_positions",
    base="transformer",
    layer_list="h",
    embed_modules=("wte", "wpe"),
    token_embedding="wte.weight",
    norm_module="ln_f",
    assumed_tokens={"bos_token_id": 50256, "eos_token_id": 50256},
    defaults={"n_positions": 1024},
)

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, GPT2)}

# Sequential factories that ship with the package: name -> (arguments and their checks, number of children).
FACTORY_ARGUMENTS: dict[str, Mapping[str, Check]] = {
    "shapes_classifier": {"width": whole(4, 1024), "layers": whole(1, 64)},
}


def factory_block_count(factory: str, arguments: Mapping[str, Any]) -> int:
    """Children of the Sequential that a factory makes: a stem, the residual layers, a classifying head."""
    if factory == "shapes_classifier":
        return int(arguments["layers"]) + 2
    raise JobFileError(f"no factory {factory!r}; allowed: {', '.join(FACTORY_ARGUMENTS)}")


def checked_config(
    family: Family, raw: Mapping[str, Any], where: str, *, untie: bool
) -> tuple[dict[str, Any], list[str]]:
    """The normalised configuration and notes about what was changed.

    Raises:
        JobFileError: a key that is not allowed (naming those that are), a bad value, sizes that do not fit.
    """
    config: dict[str, Any] = dict(family.defaults)
    for given, value in raw.items():
        key = family.aliases.get(given, given)
        if key == "auto_map":
            raise JobFileError(
                f"{where}: the model needs code of its own (auto_map), which is never run; choose another"
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
        notes.append("input and output embeddings are untied")
    config["tie_word_embeddings"] = tied and not untie
    heads = config["num_attention_heads" if family is LLAMA else "n_head"]
    if config[family.width_key] % heads:
        raise JobFileError(
            f"{where}: {family.width_key} = {config[family.width_key]} is not a multiple of {heads} heads"
        )
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise JobFileError(f"{where}: {heads} attention heads cannot share {groups} key/value heads evenly")
    return config, notes
