"""AdamW, its Nesterov variant, and its variant with moments of one byte."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from starlings_job.optimizers import CODES, QUANTISED_BLOCK_ELEMENTS, SCALES, Kept, kept_tensor, kinds_kept
from starlings_worker.blockwise import decode, encode
from starlings_worker.chunks import elements_at_once
from starlings_worker.flat import Entry, FlatVector, keeps
from starlings_worker.optimizers.elementary import clipped, decay, pieces, root

_both_moments = keeps("exp_avg", "exp_avg_sq")


class _Rule(Protocol):
    """One step's arithmetic on a piece: changes parameters and moments, leaves the gradient undefined."""

    def __call__(self, parameters: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None: ...


class _TwoMoments(ABC):
    """Decoupled weight decay, then the rule, over float32 moments of the gradient and of its square."""

    __slots__ = ()
    weight_decay: float

    @abstractmethod
    def rule(self, number: int, learning_rate: float) -> _Rule:
        """Of step `number`, which counts from 1, without the weight decay."""

    def keeps(self, entry: Entry) -> Sequence[Kept]:
        return _both_moments(entry)

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        decay(vector, vector.decaying("exp_avg"), 1.0 - learning_rate * self.weight_decay)
        _apply(vector, self.rule(number, learning_rate), clip_factor)


@dataclass(frozen=True, slots=True)
class AdamW(_TwoMoments):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2, without schedule
    factor.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def rule(self, number: int, learning_rate: float) -> _Rule:
        step_size = learning_rate / (1.0 - self.beta1**number)
        second_scale = 1.0 / math.sqrt(1.0 - self.beta2**number)

        def rule(parameters: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
            square = gradient * gradient
            m.mul_(self.beta1).add_(gradient.mul_(1.0 - self.beta1))
            v.mul_(self.beta2).add_(square.mul_(1.0 - self.beta2))
            denominator = root(v, square).mul_(second_scale).add_(self.epsilon)
            parameters.sub_(torch.div(m, denominator, out=gradient).mul_(step_size))

        return rule


@dataclass(frozen=True, slots=True)
class NAdam(_TwoMoments):
    """Dozat, "Incorporating Nesterov momentum into Adam" (2016), algorithm 2, with decoupled weight decay; the formula
    of torch.optim.NAdam.

    The momentum of step t is mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2), and the step

        lr ((1 - mu_t) / (1 - mu_1 ... mu_t) g + mu_(t+1) / (1 - mu_1 ... mu_(t+1)) m)
            / (sqrt(v / (1 - beta2^t)) + epsilon)

    so with momentum_decay = 0 it is beta1 / 2 in all steps. A correction for stale gradients wants beta1 = 0.99 and
    momentum_decay = 0.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    momentum_decay: float = 0.004

    def rule(self, number: int, learning_rate: float) -> _Rule:
        now, following = (nadam_momentum(self.beta1, self.momentum_decay, t) for t in (number, number + 1))
        product = nadam_product(self.beta1, self.momentum_decay, number)
        of_gradient = learning_rate * (1.0 - now) / (1.0 - product)
        of_moment = learning_rate * following / (1.0 - product * following)
        second_scale = 1.0 / math.sqrt(1.0 - self.beta2**number)

        def rule(parameters: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
            square = gradient * gradient
            m.mul_(self.beta1).add_(gradient * (1.0 - self.beta1))
            v.mul_(self.beta2).add_(square.mul_(1.0 - self.beta2))
            denominator = root(v, square).mul_(second_scale).add_(self.epsilon)
            update = gradient.mul_(of_gradient).add_(m * of_moment)
            parameters.sub_(update.div_(denominator))

        return rule


def nadam_momentum(beta1: float, momentum_decay: float, number: int) -> float:
    """mu_t of step `number`, which counts from 1."""
    return beta1 * (1.0 - 0.5 * math.pow(0.96, number * momentum_decay))


@lru_cache(maxsize=64)
def nadam_product(beta1: float, momentum_decay: float, number: int) -> float:
    """mu_1 ... mu_t, multiplied in this order by whoever joins late too; what could change no result is left out."""
    product = 1.0
    for t in range(1, number + 1):
        product *= nadam_momentum(beta1, momentum_decay, t)
        if product < 2.0**-60:
            return 0.0
    return product


@dataclass(frozen=True, slots=True)
class AdamW8bit:
    """AdamW whose moments are kept in one byte per element (`blockwise`), and decoded, advanced and encoded again in
    every step. Small parameters keep float32 moments.

    Dettmers et al., "8-bit optimizers via block-wise quantization" (2022), section 2. Unlike there, embeddings are
    quantised too (no stable embedding layer, section 2.3), and a second moment never becomes zero.
    """

    adamw: AdamW = field(default_factory=AdamW)

    def keeps(self, entry: Entry) -> Sequence[Kept]:
        kinds = kinds_kept("adamw8bit", 0.0, entry.shape, hidden=entry.hidden)
        return [kept for kind in kinds if (kept := kept_tensor(kind, entry.shape)) is not None]

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        decay(vector, vector.decaying(), 1.0 - learning_rate * self.adamw.weight_decay)
        rule = self.adamw.rule(number, learning_rate)
        _apply(vector, rule, clip_factor)
        most = elements_at_once(vector.parameters.device)
        assert most % QUANTISED_BLOCK_ELEMENTS == 0
        moments = ("exp_avg", "exp_avg_sq")
        for slot in vector.slots_with("exp_avg" + CODES):
            kept = [
                (m + CODES, vector.state_view(m + CODES, slot).view(-1), vector.state_view(m + SCALES, slot))
                for m in moments
            ]
            for begin in range(0, slot.stop - slot.start, most):
                here = slice(begin, min(begin + most, slot.stop - slot.start))
                blocks = slice(begin // QUANTISED_BLOCK_ELEMENTS, -(-here.stop // QUANTISED_BLOCK_ELEMENTS))
                m, v = (decode(kind, codes[here], scales[blocks]) for kind, codes, scales in kept)
                there = slice(slot.start + here.start, slot.start + here.stop)
                rule(vector.parameters[there], clipped(vector.gradient[there], clip_factor), m, v)
                for (kind, codes, scales), values in zip(kept, (m, v), strict=True):
                    encode(kind, values, codes[here], scales[blocks])


def _apply(vector: FlatVector, rule: _Rule, clip_factor: float) -> None:
    """To all parameters with float32 moments."""
    first, second = vector.state.get("exp_avg"), vector.state.get("exp_avg_sq")
    if first is None or second is None:
        return
    for piece in pieces(vector, "exp_avg"):
        gradient = clipped(vector.gradient[piece.here], clip_factor)
        rule(vector.parameters[piece.here], gradient, first[piece.state], second[piece.state])
