"""Named models: what `[model] preset` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A model configuration with the sequence length that suits it."""

    family: str
    config: Mapping[str, Any]
    sequence_length: int
    about: str


def _llama(width: int, layers: int, heads: int, inner: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


# The source of images that belongs to the preset of the same name.
SHAPES = "shapes"

# Positions leave room for a generated continuation behind a prompt.
PRESETS: dict[str, Preset] = {
    "micro": Preset("llama", _llama(64, 4, 2, 176, 256), 64, "llama, 64 wide, 4 layers, for tests"),
    "tiny": Preset("llama", _llama(128, 6, 4, 336, 512), 128, "llama, 128 wide, 6 layers, 1.2 M parameters"),
    "small": Preset(
        "llama", _llama(512, 8, 8, 1376, 1024), 256, "llama, 512 wide, 8 layers, 25 M parameters"
    ),
    SHAPES: Preset(
        "sequential",
        {"factory": "shapes_classifier", "width": 16, "layers": 3},
        1,
        "convolutional image classifier on drawn shapes (16 x 16 pixels, 8 classes)",
    ),
}
