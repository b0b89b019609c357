"""What all optimizers here are made of: separately rounded elementwise operations on flat vectors.

Replicas must stay bit-identical although their processors differ. Stock optimizers fuse multiply and add
where the processor can, and so give other last bits on AVX2 than on AVX-512 (measured). Here every operation
is one IEEE multiplication, addition, division or square root whose result is rounded to float32, and every
scalar is rounded to float32 by torch in the same way everywhere. Divisions by a scalar are written as
multiplications with its reciprocal, because torch's CUDA kernels do that anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from starlings_job.optimizers import Kept
from starlings_worker.chunks import elements_at_once
from starlings_worker.flat import Entry, FlatVector, Stretch


class Optimizer(Protocol):
    def keeps(self, entry: Entry) -> Sequence[Kept]:
        """What is kept of a parameter beside its value, in the order in which it travels."""
        ...

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        """Applies `vector.gradient * clip_factor`. `number` counts from 1: the version after the step.

        Leaves the gradient undefined.
        """
        ...


def root(value: Tensor, out: Tensor) -> Tensor:
    """The correctly rounded square root, into `out`.

    On CPUs torch's own float32 root comes from a vendor library whose last bit varies with the processor
    (measured: 1 of 30,000 is not the nearest float32). The root of a float32 lies at least 2^-50 away from
    every midpoint of two float32, so that a float64 root, even one that is off by a unit, rounds to the right
    one.
    """
    if value.device.type == "cpu":
        return out.copy_(value.double().sqrt_())
    return torch.sqrt(value, out=out)


def decay(vector: FlatVector, ranges: Iterable[slice], factor: float) -> None:
    """Decoupled weight decay."""
    if factor != 1.0:
        for here in ranges:
            vector.parameters[here].mul_(factor)


def clipped(gradient: Tensor, clip_factor: float) -> Tensor:
    """In place; multiplying by 1 would change no bit."""
    return gradient if clip_factor == 1.0 else gradient.mul_(clip_factor)


def pieces(vector: FlatVector, kind: str) -> Iterator[Stretch]:
    """All parameters of which this kind of state is kept, a piece at a time."""
    for stretch in vector.stretches(kind):
        yield from stretch.pieces(elements_at_once(vector.parameters.device))
