"""AdamW and SGD on flat vectors, as separately rounded elementwise operations.

Replicas must stay bit-identical although their processors differ. Stock optimizers fuse multiply and add
where the processor can, and so give other last bits on AVX2 than on AVX-512 (measured). Here every operation
is one IEEE multiplication, addition, division or square root whose result is rounded to float32, and every
scalar is rounded to float32 by torch in the same way everywhere. Divisions by a scalar are written as
multiplications with its reciprocal, because torch's CUDA kernels do that anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from starlings_worker.flat import FlatVector

# Temporaries stay this small: within a core's cache on a CPU, few launches on a GPU.
_CHUNK_ELEMENTS_CPU = 1 << 16
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 24


class Optimizer(Protocol):
    @property
    def state_names(self) -> tuple[str, ...]:
        """What is kept per parameter beside its value."""
        ...

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        """Applies `vector.gradient * clip_factor`. `number` counts from 1: the version after the step.

        Leaves the gradient undefined.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdamW:
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2, without schedule
    factor.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        _decay(vector, 1.0 - learning_rate * self.weight_decay)
        step_size = learning_rate / (1.0 - self.beta1**number)
        second_scale = 1.0 / math.sqrt(1.0 - self.beta2**number)
        first, second = vector.state["exp_avg"], vector.state["exp_avg_sq"]
        for begin, end in _chunks(vector):
            gradient = _clipped(vector.gradient[begin:end], clip_factor)
            m, v = first[begin:end], second[begin:end]
            square = gradient * gradient
            m.mul_(self.beta1).add_(gradient.mul_(1.0 - self.beta1))
            v.mul_(self.beta2).add_(square.mul_(1.0 - self.beta2))
            denominator = _root(v, square).mul_(second_scale).add_(self.epsilon)
            update = torch.div(m, denominator, out=gradient).mul_(step_size)
            vector.parameters[begin:end].sub_(update)


@dataclass(frozen=True, slots=True)
class Sgd:
    """Gradient descent with heavy-ball momentum: torch.optim.SGD without dampening; decay is part of the
    gradient.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        del number
        for begin, end in _chunks(vector):
            _clipped(vector.gradient[begin:end], clip_factor)
        if self.weight_decay:
            for begin, end in vector.decaying:
                vector.gradient[begin:end].add_(vector.parameters[begin:end] * self.weight_decay)
        for begin, end in _chunks(vector):
            update = vector.gradient[begin:end]
            if self.momentum:
                velocity = vector.state["momentum"][begin:end]
                velocity.mul_(self.momentum).add_(update)
                update = torch.mul(velocity, learning_rate, out=update)
            else:
                update.mul_(learning_rate)
            vector.parameters[begin:end].sub_(update)


def _root(value: Tensor, out: Tensor) -> Tensor:
    """The correctly rounded square root, into `out`.

    On CPUs torch's own float32 root comes from a vendor library whose last bit varies with the processor
    (measured: 1 of 30,000 is not the nearest float32). The root of a float32 lies at least 2^-50 away from
    every midpoint of two float32, so that a float64 root, even one that is off by a unit, rounds to the right
    one.
    """
    if value.device.type == "cpu":
        return out.copy_(value.double().sqrt_())
    return torch.sqrt(value, out=out)


def _decay(vector: FlatVector, factor: float) -> None:
    if factor != 1.0:
        for begin, end in vector.decaying:
            vector.parameters[begin:end].mul_(factor)


def _clipped(gradient: Tensor, clip_factor: float) -> Tensor:
    """In place; multiplying by 1 would change no bit."""
    return gradient if clip_factor == 1.0 else gradient.mul_(clip_factor)


def _chunks(vector: FlatVector) -> Iterator[tuple[int, int]]:
    size = _CHUNK_ELEMENTS_CPU if vector.parameters.device.type == "cpu" else _CHUNK_ELEMENTS_ACCELERATOR
    for begin in range(0, vector.size, size):
        yield begin, min(begin + size, vector.size)
