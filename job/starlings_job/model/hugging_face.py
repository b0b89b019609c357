"""Hugging Face causal language models, cut by block on the meta device."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn

from starlings_job.description import ModelDescription
from starlings_job.errors import JobFileError
from starlings_job.family import OUTPUT

# Family -> the package below transformers.models, and its configuration class.
_PACKAGES = {
    "llama": ("llama", "LlamaConfig"),
    "gpt2": ("gpt2", "GPT2Config"),
    "qwen3": ("qwen3", "Qwen3Config"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig"),
    "mistral": ("mistral", "MistralConfig"),
    "olmo2": ("olmo2", "Olmo2Config"),
    "phi3": ("phi3", "Phi3Config"),
    "gpt_neox": ("gpt_neox", "GPTNeoXConfig"),
    "smollm3": ("smollm3", "SmolLM3Config"),
    "gemma3_text": ("gemma3", "Gemma3TextConfig"),
}


def _module(description: ModelDescription, part: str) -> Any:
    package, _ = _PACKAGES[description.family]
    return importlib.import_module(f"transformers.models.{package}.{part}_{package}")


def make_config(description: ModelDescription) -> Any:
    """The family's configuration object; only allow-listed keys reach it.

    Raises:
        JobFileError: Hugging Face's own checks refuse it.
    """
    made = getattr(_module(description, "configuration"), _PACKAGES[description.family][1])
    # A copy, because Hugging Face fills in what nested tables leave out.
    keys = copy.deepcopy(dict(description.config))
    if description.rules.stacked:
        # One matrix product for all experts, with gradients for those that saw no token; others fetch kernels.
        keys["experts_implementation"] = "grouped_mm"
    try:
        return made(**keys)
    except Exception as error:
        raise _refused(description, error) from error


def make_model(description: ModelDescription) -> Any:
    """The whole model on the current default device, initialised as Hugging Face initialises it.

    Raises:
        JobFileError: the configuration passes every check, and yet no model can be made from it.
    """
    config = make_config(description)
    made = getattr(_module(description, "modeling"), description.rules.architecture)
    try:
        return made(config)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _refused(description, error) from error


def _refused(description: ModelDescription, error: Exception) -> JobFileError:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return JobFileError(f"Hugging Face refuses this {description.family} configuration: {said}")


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
        self._config: Any = base.config
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
        # What Hugging Face's outer model does between its output layer and the loss (gemma).
        limit = getattr(self._config, "final_logit_softcapping", None)
        return logits if limit is None else torch.tanh(logits / limit) * limit

    def locate(self, name: str) -> tuple[str, str]:
        """Block and inner name of one of this module's parameters."""
        rules = self._description.rules
        if name == OUTPUT:
            return "head", name
        rest = name.removeprefix("base.")
        found = rules.locate(f"{rules.base}.{rest}")
        assert found is not None, name
        block, inner = found
        if block.startswith("layers."):
            block = f"layers.{int(block[7:]) + self._first_layer}"
        return block, inner

    def rebuild_buffers(self, device: torch.device | str) -> None:
        """Computes what is neither parameter nor state, and garbage after allocation: constants of positions
        and of the embedding.
        """
        rotary = getattr(self.base, "rotary_emb", None)
        if rotary is not None:
            # On the CPU first, so that every device has equal frequencies. One set for each type of layer that
            # the stage has, where types differ.
            with torch.device("cpu"):
                fresh = type(rotary)(self._config)
            self.base.rotary_emb = fresh.to(device)
        embedding: Any = getattr(self.base, "embed_tokens", None)
        if getattr(embedding, "embed_scale", None) is not None:
            embedding.embed_scale = torch.tensor(self._config.hidden_size**0.5, device=device)
        known = ("base.rotary_emb.", "base.embed_tokens.embed_scale")
        unknown = [name for name, _ in self.named_buffers() if not name.startswith(known)]
        if unknown:
            raise TypeError(f"{self._description.family} has buffers that nobody computes: {unknown}")


def cut(description: ModelDescription, first_block: int, last_block: int) -> CutModel:
    """Blocks first..last on the meta device; the two copies of a tied embedding are separate parameters."""
    rules = description.rules
    with torch.device("meta"):
        model = make_model(description)
        base = getattr(model, rules.base)
        output = model.get_output_embeddings()
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
