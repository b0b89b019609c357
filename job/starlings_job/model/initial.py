"""Version 0 of the weights, by seed: exactly what the whole model's own initialisation gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from starlings_job.model import hugging_face
from starlings_job.model.sequential import FACTORIES
from starlings_job.model.stage import Model, described


def whole_model(model: Model, seed: int) -> nn.Module:
    """The whole model on the CPU in float32, initialised by `seed`; global random state is left alone."""
    description = described(model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if description.is_language_model:
            built = hugging_face.make_model(description)
        else:
            built = FACTORIES[str(description.config["factory"])](description.config)
    assert isinstance(built, nn.Module)
    return built


def initial_state(model: Model, seed: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(block, {name: float32 tensor}) for every block in order. A tied embedding comes twice, equal."""
    description = described(model)
    yield from split(description, dict(whole_model(description, seed).state_dict()))


def split(model: Model, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """A whole model's state dict by block.

    Raises:
        KeyError: a parameter belongs to no block.
    """
    description = described(model)
    blocks: dict[str, dict[str, torch.Tensor]] = {block: {} for block in description.blocks}
    for name, tensor in state.items():
        found = description.locate(name)
        if found is None or found[0] not in blocks:
            raise KeyError(name)
        blocks[found[0]][found[1]] = tensor
    tied = description.tied_parameters()
    if tied is not None:
        (first, first_name), (last, last_name) = tied
        blocks[last].setdefault(last_name, blocks[first][first_name])
    yield from blocks.items()
