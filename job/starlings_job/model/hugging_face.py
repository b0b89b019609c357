"""Hugging Face causal language models, cut by block on the meta device."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn

from starlings_job.description import ModelDescription

_MODULES = {
    "llama": ("transformers.models.llama", "LlamaConfig", "LlamaForCausalLM"),
    "gpt2": ("transformers.models.gpt2", "GPT2Config", "GPT2LMHeadModel"),
}


def make_config(description: ModelDescription) -> Any:
    """The family's configuration object; only allow-listed keys reach it."""
    package, config_class, _ = _MODULES[description.family]
    module = importlib.import_module(f"{package}.configuration_{description.family}")
    # A copy, because Hugging Face fills in what nested tables leave out.
    return getattr(module, config_class)(**copy.deepcopy(dict(description.config)))


def make_model(description: ModelDescription) -> Any:
    """The whole model on the current default device, initialised as Hugging Face initialises it."""
    package, _, model_class = _MODULES[description.family]
    module = importlib.import_module(f"{package}.modeling_{description.family}")
    return getattr(module, model_class)(make_config(description))


class _NoPositions(nn.Module):
    """In place of GPT-2's position embeddings after stage 0, where they have been added already."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)


class CutModel(nn.Module):
    """The base model with some of its layers and, in the last stage, the output layer."""

    def __init__(
        self, base: nn.Module, output: nn.Module | None, description: ModelDescription, first_layer: int
    ) -> None:
        super().__init__()
        self.base = base
        self.lm_head = output
        self._description = description
        self._first_layer = first_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Tokens come as integers, hidden states as floats.
        inputs = {"inputs_embeds": x} if x.is_floating_point() else {"input_ids": x}
        hidden: torch.Tensor = self.base(**inputs, use_cache=False).last_hidden_state
        if self.lm_head is None:
            return hidden
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def locate(self, name: str) -> tuple[str, str]:
        """Block and inner name of one of this module's parameters."""
        rules = self._description.rules
        if name.startswith("lm_head."):
            return "head", name
        rest = name.removeprefix("base.")
        found = rules.locate(f"{rules.base}.{rest}")
        assert found is not None, name
        block, inner = found
        if block.startswith("layers."):
            block = f"layers.{int(block[7:]) + self._first_layer}"
        return block, inner

    def rebuild_buffers(self, device: torch.device | str) -> None:
        """Computes what is neither parameter nor state: rotary frequencies, garbage after allocation."""
        rotary = getattr(self.base, "rotary_emb", None)
        if rotary is not None:
            # On the CPU first, so that every device has equal frequencies.
            with torch.device("cpu"):
                fresh = type(rotary)(self.base.config)
            self.base.rotary_emb = fresh.to(device)
        unknown = [name for name, _ in self.named_buffers() if not name.startswith("base.rotary_emb.")]
        if unknown:
            raise TypeError(f"{self._description.family} has buffers that nobody computes: {unknown}")


def cut(description: ModelDescription, first_block: int, last_block: int) -> CutModel:
    """Blocks first..last on the meta device; the two copies of a tied embedding are separate parameters."""
    rules = description.rules
    with torch.device("meta"):
        model = make_model(description)
        base = getattr(model, rules.base)
        output = model.lm_head
        if description.tied:
            output.weight = nn.Parameter(torch.empty_like(output.weight))
    config = base.config
    last_index = len(description.blocks) - 1
    # Block 0 is the embedding and the last block the head, so layer i is block i + 1.
    first_layer = max(0, first_block - 1)
    end_layer = min(description.layer_count, last_block)
    layers = getattr(base, rules.layer_list)
    setattr(base, rules.layer_list, nn.ModuleList(list(layers)[first_layer:end_layer]))
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[first_layer:end_layer]
    config.num_hidden_layers = end_layer - first_layer
    if first_block > 0:
        for name in rules.embed_modules:
            setattr(base, name, _NoPositions() if name == "wpe" else None)
    if last_block < last_index:
        setattr(base, rules.norm_module, nn.Identity())
        output = None
    return CutModel(base, output, description, first_layer)
