"""A run of blocks as one module.

A Hugging Face model is built whole on the meta device and cut: the base model keeps its own `layers` list
with only the stage's layers (the configuration's layer count and layer types are cut alike), its final norm
becomes the identity except in the last stage, and later stages are called with `inputs_embeds`. Layers keep
their numbers, which GPT-2's attention may scale by. The composition of all stages equals the whole model
bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from starlings_job.description import ModelDescription
from starlings_job.model import hugging_face
from starlings_job.model.sequential import FACTORIES

# A description, its record, or its JSON.
Model = ModelDescription | Mapping[str, Any] | str | bytes


def described(model: Model) -> ModelDescription:
    """Any of the forms as a checked description."""
    if isinstance(model, ModelDescription):
        return model
    if isinstance(model, str | bytes):
        return ModelDescription.from_json(model)
    return ModelDescription.from_record(model)


class StageModule(nn.Module):
    """Blocks `first_block`..`last_block` of a model, float32.

    `forward` takes int64 tokens (n, t) or images in the first stage and hidden states (n, t, width) in
    later ones; it returns hidden states, or logits in the last stage. Parameters may be re-pointed
    (`parameter.data = view`). Frozen parameters have `requires_grad=False`.
    """

    def __init__(self, description: ModelDescription, first_block: int, last_block: int) -> None:
        super().__init__()
        count = len(description.blocks)
        if not 0 <= first_block <= last_block < count:
            raise ValueError(f"blocks {first_block}-{last_block} of a model with {count} blocks")
        self.description = description
        self.first_block = first_block
        self.last_block = last_block
        if description.is_language_model:
            self.body: nn.Module = hugging_face.cut(description, first_block, last_block)
        else:
            with torch.device("meta"):
                whole = FACTORIES[str(description.config["factory"])](description.config)
            self.body = whole[first_block : last_block + 1]
        self.trainable_names: frozenset[tuple[str, str]] = frozenset(
            (block, name)
            for block, tensors in self.block_tensors().items()
            for name in tensors
            if description.is_trainable(block, name)
        )

    @property
    def is_first(self) -> bool:
        return self.first_block == 0

    @property
    def is_last(self) -> bool:
        return self.last_block + 1 == len(self.description.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        assert isinstance(out, torch.Tensor)
        return out

    def block_tensors(self) -> dict[str, dict[str, nn.Parameter]]:
        """Every parameter by block (in order of computation) and by name inside it (in module order)."""
        blocks = self.description.blocks[self.first_block : self.last_block + 1]
        tensors: dict[str, dict[str, nn.Parameter]] = {block: {} for block in blocks}
        for name, parameter in self.body.named_parameters():
            if isinstance(self.body, hugging_face.CutModel):
                block, inner = self.body.locate(name)
            else:
                number, _, inner = name.partition(".")
                block = f"layers.{int(number)}"
            tensors[block][inner] = parameter
        return tensors

    def materialise(self, device: torch.device | str) -> StageModule:
        """Allocates the parameters (uninitialised) and computes the constant buffers on `device`."""
        self.body.to_empty(device=device)
        if isinstance(self.body, hugging_face.CutModel):
            self.body.rebuild_buffers(device)
        elif any(True for _ in self.body.buffers()):
            raise TypeError(
                "a Sequential factory must not have buffers: they would be neither trained nor exchanged"
            )
        for block, tensors in self.block_tensors().items():
            for name, parameter in tensors.items():
                parameter.requires_grad_((block, name) in self.trainable_names)
        return self


def build_stage(
    model: Model, first_block: int, last_block: int, device: torch.device | str = "cpu"
) -> StageModule:
    """A stage with uninitialised float32 parameters on `device`.

    Raises:
        ValueError: no such blocks.
        JobFileError: the model is not allowed.
    """
    return StageModule(described(model), first_block, last_block).materialise(device)


def tied_parameters(model: Model) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """((first block, name), (last block, name)) of a parameter that both ends share, or None."""
    return described(model).tied_parameters()


def meta_tensors(model: Model) -> dict[str, dict[str, nn.Parameter]]:
    """Every parameter of the whole model on the meta device: names and shapes without memory."""
    description = described(model)
    return StageModule(description, 0, len(description.blocks) - 1).block_tensors()
