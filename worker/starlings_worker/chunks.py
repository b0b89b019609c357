"""How much of a flat vector is worked on at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Temporaries stay this small: within a core's cache on a CPU, few launches on a GPU.
CPU_ELEMENTS = 1 << 16
ACCELERATOR_ELEMENTS = 1 << 24


def elements_at_once(device: torch.device) -> int:
    """A multiple of every block length of ours."""
    return CPU_ELEMENTS if device.type == "cpu" else ACCELERATOR_ELEMENTS


def chunks(vector: Tensor, vectors: int = 1) -> Iterator[slice]:
    """All elements of a flat vector, in order. `vectors`: how many of its kind are copied at a time."""
    size = max(1, elements_at_once(vector.device) // vectors)
    for begin in range(0, vector.numel(), size):
        yield slice(begin, min(begin + size, vector.numel()))
