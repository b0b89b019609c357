"""A group's parameters as one flat vector: the unit of exchange, of clipping and of the optimizer.

Parameters of a group lie one after another in (block order, name) order, in float32, without gaps. The
modules' parameters and their `.grad` are views, so that autograd accumulates straight into the vector that is
exchanged. What an optimizer keeps lies likewise, one tensor for each kind of state over the parameters that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from starlings_job.model.tensors import TYPES
from starlings_job.optimizers import CODES, SCALES, Kept, kept_tensor
from starlings_worker.blockwise import decode, encode


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter that belongs into a vector: its block, its name there, its shape.

    hidden: it is neither in the model's first block nor in its last one.
    """

    block: str
    name: str
    shape: tuple[int, ...]
    hidden: bool = False


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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring parameters, elements [start, stop) of a vector, whose state of some kind begins at `state_start`
    of that kind's tensor and lies there element for element.
    """

    start: int
    stop: int
    state_start: int

    def pieces(self, most: int) -> Iterator[Stretch]:
        """The same in pieces of at most `most` elements."""
        for start in range(self.start, self.stop, most):
            yield Stretch(start, min(start + most, self.stop), self.state_start + start - self.start)

    @property
    def here(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def state(self) -> slice:
        return slice(self.state_start, self.state_start + self.stop - self.start)


# What an optimizer keeps of a parameter, in the order in which it travels.
Keeps = Callable[[Entry], Sequence[Kept]]


def keeps(*kinds: str) -> Keeps:
    """Of every parameter the same kinds of state."""

    def of(entry: Entry) -> list[Kept]:
        return [kept for kind in kinds if (kept := kept_tensor(kind, entry.shape)) is not None]

    return of


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a slot's state of one kind lies in that kind's tensor."""

    start: int
    stop: int
    shape: tuple[int, ...]


class FlatVector:
    """Weights, gradient accumulator (each flat, float32, of `size` elements) and optimizer state of one group."""

    def __init__(self, group: str, entries: Sequence[Entry], keeps_of: Keeps, device: torch.device) -> None:
        """Everything is zero at first. `entries` are already in the group's order."""
        self.group = group
        slots, position = [], 0
        self._places: dict[tuple[str, int], _Place] = {}
        sizes: dict[str, int] = {}
        types: dict[str, torch.dtype] = {}
        for number, entry in enumerate(entries):
            size = prod(entry.shape)
            slots.append(Slot(entry.block, entry.name, entry.shape, position, position + size))
            position += size
            for kept in keeps_of(entry):
                start = sizes.get(kept.kind, 0)
                sizes[kept.kind] = start + prod(kept.shape)
                types[kept.kind] = TYPES[kept.data_type]
                self._places[kept.kind, number] = _Place(start, sizes[kept.kind], kept.shape)
        self.slots = tuple(slots)
        self.size = position
        self.parameters = torch.zeros(position, dtype=torch.float32, device=device)
        self.gradient = torch.zeros_like(self.parameters)
        self.state = {kind: torch.zeros(sizes[kind], dtype=types[kind], device=device) for kind in sizes}
        self._numbers = {slot: number for number, slot in enumerate(self.slots)}

    # ---------------------------------------------------------------- views

    def parameter_view(self, slot: Slot) -> Tensor:
        return self.parameters[slot.start : slot.stop].view(slot.shape)

    def gradient_view(self, slot: Slot) -> Tensor:
        return self.gradient[slot.start : slot.stop].view(slot.shape)

    def kinds(self, slot: Slot) -> tuple[str, ...]:
        """The kinds of state that are kept of a parameter."""
        return tuple(kind for kind in self.state if (kind, self._numbers[slot]) in self._places)

    def state_view(self, kind: str, slot: Slot) -> Tensor:
        place = self._places[kind, self._numbers[slot]]
        return self.state[kind][place.start : place.stop].view(place.shape)

    def slots_with(self, kind: str) -> tuple[Slot, ...]:
        return tuple(slot for number, slot in enumerate(self.slots) if (kind, number) in self._places)

    # ---------------------------------------------------------------- for optimizers

    def stretches(self, kind: str) -> list[Stretch]:
        """Where a kind of state that is shaped like its parameters is kept, neighbours joined."""
        found: list[Stretch] = []
        for slot in self.slots_with(kind):
            place = self._places[kind, self._numbers[slot]]
            if found and found[-1].stop == slot.start:
                found[-1] = Stretch(found[-1].start, slot.stop, found[-1].state_start)
            else:
                found.append(Stretch(slot.start, slot.stop, place.start))
        return found

    def decaying(self, kind: str | None = None) -> list[slice]:
        """The elements that decay, of the parameters with that kind of state or of all; neighbours joined."""
        slots = self.slots if kind is None else self.slots_with(kind)
        return _joined(slot for slot in slots if slot.decays and slot.start < slot.stop)

    # ---------------------------------------------------------------- as a whole

    @property
    def byte_count(self) -> int:
        """Of parameters and optimizer state."""
        return self.parameters.nbytes + sum(tensor.nbytes for tensor in self.state.values())

    @property
    def whole_size(self) -> int:
        """Elements of `whole_state`."""
        return self.size + sum(t.numel() for kind, t in self.state.items() if not kind.endswith(SCALES))

    def whole_state(self) -> Tensor:
        """A copy of parameters and optimizer state, float32, end to end: what a STATE exchange averages. Of quantised
        moments their values.
        """
        parts = [self.parameters]
        for kind, tensor in self.state.items():
            if kind.endswith(CODES):
                parts += [decode(kind, *self._quantised(kind, slot)) for slot in self.slots_with(kind)]
            elif not kind.endswith(SCALES):
                parts.append(tensor)
        return torch.cat(parts)

    def adopt(self, whole: Tensor) -> None:
        """The inverse of `whole_state`: equal vectors give equal bits, quantised again where that is how they are kept.
        Quantising what was decoded gives the same codes and scales again.
        """
        self.parameters.copy_(whole[: self.size])
        position = self.size
        for kind, tensor in self.state.items():
            if kind.endswith(SCALES):
                continue
            if kind.endswith(CODES):
                for slot in self.slots_with(kind):
                    values = whole[position : position + slot.stop - slot.start]
                    encode(kind, values, *self._quantised(kind, slot))
                    position += slot.stop - slot.start
            else:
                tensor.copy_(whole[position : position + tensor.numel()])
                position += tensor.numel()

    def _quantised(self, kind: str, slot: Slot) -> tuple[Tensor, Tensor]:
        """A slot's codes, flat, and their scales."""
        scales = kind.removesuffix(CODES) + SCALES
        return self.state_view(kind, slot).view(-1), self.state_view(scales, slot)


def _joined(slots: Iterable[Slot]) -> list[slice]:
    ranges: list[slice] = []
    for slot in slots:
        if ranges and ranges[-1].stop == slot.start:
            ranges[-1] = slice(ranges[-1].start, slot.stop)
        else:
            ranges.append(slice(slot.start, slot.stop))
    return ranges
