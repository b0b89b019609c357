"""What is known of a Hugging Face model type: its keys, and how its parameters fall into blocks. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlings_job.config_checks import SLIDING, Check

OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """One Hugging Face model type."""

    name: str
    architecture: str
    keys: Mapping[str, Check]
    required: tuple[str, ...]
    # Replicas must compute alike and a forward may be run twice, so these are set to 0.
    dropout_keys: tuple[str, ...] = ("attention_dropout",)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ties_by_default: bool = False
    layers_key: str = "num_hidden_layers"
    width_key: str = "hidden_size"
    heads_key: str = "num_attention_heads"
    positions_key: str = "max_position_embeddings"
    # Whether the width must be a multiple of the heads even where `head_dim` is given.
    heads_divide_width: bool = False
    rotary: bool = True
    # Hugging Face prefix of everything but the output layer; published checkpoints of base models lack it.
    base: str = "model"
    layer_list: str = "layers"
    embed_modules: tuple[str, ...] = ("embed_tokens",)
    norm_module: str = "norm"
    # The output layer's name in published checkpoints, where it is not the one of the module.
    published_output: str = OUTPUT
    # Parameters that published checkpoints hold as several tensors per expert: name -> the names of one expert's.
    # The parameter is all of them in order of experts, each expert's rows one after another.
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Ids of special tokens that Hugging Face assumes where the configuration is silent.
    assumed_tokens: Mapping[str, int] = field(default_factory=dict)
    # Values that Hugging Face assumes and that matter here; written out, so that nobody need know them.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Lists by layer that Hugging Face derives where the configuration is silent; None where there are none.
    layer_lists: Callable[[Mapping[str, Any]], Mapping[str, list[Any]]] | None = None
    # What the sizes must be beyond each key's own range: a sentence, or None.
    fits: Callable[[Mapping[str, Any]], str | None] | None = None

    @property
    def token_embedding(self) -> str:
        """The name of the input embedding inside its block."""
        return f"{self.embed_modules[0]}.weight"

    def hugging_face_name(self, block: str, name: str) -> str:
        """The name in the whole model's state dict."""
        if block.startswith("layers."):
            return f"{self.base}.{self.layer_list}.{block[7:]}.{name}"
        return name if name == OUTPUT else f"{self.base}.{name}"

    def published_names(self, config: Mapping[str, Any], block: str, name: str) -> tuple[str, ...]:
        """The tensors of a published checkpoint that are, one after another, this parameter."""
        if name == OUTPUT:
            return (self.published_output,)
        return tuple(self.hugging_face_name(block, piece) for piece in self.pieces(config, name) or (name,))

    def pieces(self, config: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """The names inside the block of the tensors that a stacked parameter consists of; () for others."""
        of_one = self.stacked.get(name, ())
        count = int(config["num_experts"]) if of_one else 0
        return tuple(piece.format(expert) for expert in range(count) for piece in of_one)

    def locate(self, hugging_face_name: str) -> tuple[str, str] | None:
        """The block and the name inside it, or None for what is no parameter of this family."""
        if hugging_face_name in (OUTPUT, self.published_output):
            return "head", OUTPUT
        rest = hugging_face_name.removeprefix(self.base + ".")
        module, _, tail = rest.partition(".")
        if module == self.layer_list:
            number, _, name = tail.partition(".")
            return (f"layers.{int(number)}", name) if number.isdecimal() and name else None
        if module in self.embed_modules:
            return "embed", rest
        return ("head", rest) if module == self.norm_module else None

    def layer_kind(self, config: Mapping[str, Any], layer: int) -> str:
        """Layers of one kind cost alike: the plain ones, and those that the configuration sets apart."""
        types, rotated = config.get("layer_types"), config.get("no_rope_layers")
        marks = {
            "sliding": types is not None and types[layer] == SLIDING,
            "nope": rotated is not None and not rotated[layer],
            "dense": bool(self.stacked) and not has_experts(config, layer),
        }
        return ".".join(["layer", *(mark for mark, true in marks.items() if true)])


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture of experts has experts, or one dense network."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % config["decoder_sparse_step"] == 0
    )
