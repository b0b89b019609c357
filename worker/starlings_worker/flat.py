"""A group's parameters as one flat vector: the unit of exchange, of clipping and of the optimizer.

Parameters of a group lie one after another in (block order, name) order, in float32, without gaps. The
modules' parameters and their `.grad` are views, so that autograd accumulates straight into the vector that is
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter that belongs into a vector: its block, its name there, its shape."""

    block: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an entry lies in its vector: elements [start, stop)."""

    block: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices only; biases and norms are left alone."""
        return len(self.shape) >= 2


class FlatVector:
    """Weights, gradient accumulator and optimizer state of one group, each a flat float32 vector of
    `size`.
    """

    def __init__(
        self, group: str, entries: Sequence[Entry], state_names: Iterable[str], device: torch.device
    ) -> None:
        """All vectors are zero at first. `entries` are already in the group's order.

        `state_names`: what the optimizer keeps per parameter, such as "exp_avg".
        """
        self.group = group
        slots, position = [], 0
        for entry in entries:
            size = prod(entry.shape)
            slots.append(Slot(entry.block, entry.name, entry.shape, position, position + size))
            position += size
        self.slots = tuple(slots)
        self.size = position
        self.parameters = torch.zeros(position, dtype=torch.float32, device=device)
        self.gradient = torch.zeros_like(self.parameters)
        self.state = {name: torch.zeros_like(self.parameters) for name in state_names}
        self.decaying = _decaying_ranges(self.slots)

    def parameter_view(self, slot: Slot) -> Tensor:
        return self.parameters[slot.start : slot.stop].view(slot.shape)

    def gradient_view(self, slot: Slot) -> Tensor:
        return self.gradient[slot.start : slot.stop].view(slot.shape)

    def state_view(self, state_name: str, slot: Slot) -> Tensor:
        return self.state[state_name][slot.start : slot.stop].view(slot.shape)

    def whole_state(self) -> Tensor:
        """A copy of parameters and optimizer state, end to end: what a STATE exchange averages."""
        return torch.cat([self.parameters, *self.state.values()])

    def adopt(self, whole: Tensor) -> None:
        """The inverse of `whole_state`."""
        for number, target in enumerate((self.parameters, *self.state.values())):
            target.copy_(whole[number * self.size : (number + 1) * self.size])


def _decaying_ranges(slots: Sequence[Slot]) -> tuple[tuple[int, int], ...]:
    """The ranges that decay, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if not slot.decays or slot.start == slot.stop:
            continue
        if ranges and ranges[-1][1] == slot.start:
            ranges[-1] = (ranges[-1][0], slot.stop)
        else:
            ranges.append((slot.start, slot.stop))
    return tuple(ranges)
