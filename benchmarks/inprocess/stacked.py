"""The gradients of all replicas at once: their llama weights side by side, and batched matrix products.

Small models spend most of a step on calls. This computes what `Swarm.train` computes, several times as fast; the
derivatives of a layer's parts are written down, so that each of them is a few passes over memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from inprocess.swarm import Swarm
from starlings_job.data.batch import Batch

# Hugging Face's, where a configuration leaves them out.
_ROTARY_BASE, _NORM_EPSILON = 10000.0, 1e-6


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter of all replicas, and where its gradient is added: (R, ...) both."""

    value: Tensor
    gradient: Tensor


class Stacked:
    """Passes of every replica of a swarm, each on a batch of its own and with its own weights.

    Values between stages are float32 (replicas, samples, positions, width).
    """

    def __init__(self, swarm: Swarm) -> None:
        description = swarm.workers[0].held.description
        if description.family != "llama":
            raise ValueError(f"weights of {description.family} cannot be stacked")
        self._config: Mapping[str, Any] = description.config
        self._vectors = [
            [next(iter(worker.held.vectors.values())) for worker in swarm.replicas_of(stage)]
            for stage in range(swarm.setup.stages)
        ]
        self._last = swarm.setup.stages - 1
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients = [
            torch.zeros(len(vectors), vectors[0].size, dtype=torch.float32) for vectors in self._vectors
        ]
        self._weights = [torch.empty_like(gradients) for gradients in self._gradients]
        self._blocks = [self._blocks_of(stage) for stage in range(len(self._vectors))]

    def _blocks_of(self, stage: int) -> dict[str, dict[str, _Weight]]:
        blocks: dict[str, dict[str, _Weight]] = {}
        for slot in self._vectors[stage][0].slots:
            value, gradient = (
                flat[:, slot.start : slot.stop].unflatten(1, slot.shape)
                for flat in (self._weights[stage], self._gradients[stage])
            )
            blocks.setdefault(slot.block, {})[slot.name] = _Weight(value, gradient)
        return blocks

    # ---------------------------------------------------------------- passes

    def train(self, batches: Sequence[Batch], denominators: Sequence[float]) -> list[float]:
        """Adds each replica's gradient to its accumulators; returns the sums of their losses in nats."""
        value = torch.stack([batch.inputs for batch in batches])
        for stage in range(self._last + 1):
            self._load(stage)
            value = self._through(stage, value)
        losses = _losses(value, batches)
        losses.backward(1 / torch.tensor(denominators))  # type: ignore[no-untyped-call]
        for stage in range(self._last + 1):
            self._unload(stage)
        return list(map(float, losses.detach()))

    @torch.no_grad()
    def forward(self, stage: int, value: Tensor) -> Tensor:
        """What a stage that is not the last makes of its input; nothing is kept."""
        self._load(stage)
        return self._through(stage, value)

    def backward(self, stage: int, value: Tensor, gradient: Tensor) -> Tensor | None:
        """Computes again from the input, with the weights of now; adds to the accumulators, and returns the gradient
        at the input (None at stage 0).
        """
        self._load(stage)
        entry = _entry(value)
        self._through(stage, entry).backward(gradient)  # type: ignore[no-untyped-call]
        self._unload(stage)
        return entry.grad

    def end(
        self, value: Tensor, batches: Sequence[Batch], denominators: Sequence[float]
    ) -> tuple[list[float], Tensor | None]:
        """The last stage, forward and backward: losses as of `train`, and the gradient at its input."""
        self._load(self._last)
        entry = _entry(value)
        losses = _losses(self._through(self._last, entry), batches)
        losses.backward(1 / torch.tensor(denominators))  # type: ignore[no-untyped-call]
        self._unload(self._last)
        return list(map(float, losses.detach())), entry.grad

    def _load(self, stage: int) -> None:
        torch.stack([vector.parameters for vector in self._vectors[stage]], out=self._weights[stage])

    def _unload(self, stage: int) -> None:
        for vector, own in zip(self._vectors[stage], self._gradients[stage], strict=True):
            vector.gradient.add_(own)
        self._gradients[stage].zero_()

    # ---------------------------------------------------------------- the model

    def _through(self, stage: int, value: Tensor) -> Tensor:
        for block, weights in self._blocks[stage].items():
            if block == "embed":
                (table,) = weights.values()
                value = _Embedding.apply(torch.zeros((), requires_grad=True), value, table)
            elif block == "head":
                (norm,) = (weight for name, weight in weights.items() if "norm" in name)
                value = _Linear.apply(self._norm(value, norm), weights["lm_head.weight"])
            else:
                value = self._layer(weights, value)
        return value

    def _layer(self, weights: Mapping[str, _Weight], value: Tensor) -> Tensor:
        replicas, samples, positions, width = value.shape
        heads = self._config["num_attention_heads"]
        normed = self._norm(value, weights["input_layernorm.weight"])
        query, key, values = (
            _Linear.apply(normed, weights[f"self_attn.{name}_proj.weight"])
            .view(replicas * samples, positions, heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        turn = self._rotation(positions, width // heads)
        met = functional.scaled_dot_product_attention(
            _Rotary.apply(query, *turn), _Rotary.apply(key, *turn), values, is_causal=True
        )
        met = met.transpose(1, 2).reshape(replicas, samples, positions, width)
        value = value + _Linear.apply(met, weights["self_attn.o_proj.weight"])
        normed = self._norm(value, weights["post_attention_layernorm.weight"])
        gate, up = (_Linear.apply(normed, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return value + _Linear.apply(_Gated.apply(gate, up), weights["mlp.down_proj.weight"])

    def _norm(self, value: Tensor, weight: _Weight) -> Tensor:
        normed: Tensor = _Norm.apply(value, weight, self._config.get("rms_norm_eps", _NORM_EPSILON))
        return normed

    def _rotation(self, positions: int, width: int) -> tuple[Tensor, Tensor]:
        """Su et al. 2021, "RoFormer", section 3.4.2, of the halves that llama turns."""
        if positions not in self._turns:
            frequencies = _ROTARY_BASE ** -(torch.arange(0, width, 2) / width)
            angles = torch.outer(torch.arange(positions), frequencies)
            self._turns[positions] = (angles.cos(), angles.sin())
        return self._turns[positions]


def _entry(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


def _losses(logits: Tensor, batches: Sequence[Batch]) -> Tensor:
    """Per replica the sum over its targets."""
    targets = torch.stack([batch.targets for batch in batches])
    each = functional.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return each.view(len(batches), -1).sum(1)


class _Embedding(Function):
    """`root` is there to be differentiated; tokens are whole numbers."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tokens: Tensor, table: _Weight) -> Tensor:
        ctx.tokens, ctx.table = tokens, table
        return torch.stack([rows[own] for rows, own in zip(table.value, tokens, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        for rows, own, came in zip(ctx.table.gradient, ctx.tokens, gradient, strict=True):
            rows.index_add_(0, own.flatten(), came.flatten(0, 1))
        return None, None, None


class _Linear(Function):
    """(R, samples, positions, in) with a weight (R, out, in)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: _Weight) -> Tensor:
        flat = value.flatten(1, 2)
        ctx.flat, ctx.weight = flat, weight
        return torch.bmm(flat, weight.value.transpose(1, 2)).view(*value.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        came = gradient.flatten(1, 2)
        ctx.weight.gradient.add_(torch.bmm(came.transpose(1, 2), ctx.flat))
        return torch.bmm(came, ctx.weight.value).view(*gradient.shape[:3], -1), None


class _Norm(Function):
    """Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: _Weight, epsilon: float) -> Tensor:
        scale = torch.linalg.vector_norm(value, dim=-1, keepdim=True).square_().div_(value.shape[-1])
        scale.add_(epsilon).rsqrt_()
        even = value * scale
        ctx.even, ctx.scale, ctx.weight = even, scale, weight
        return even * weight.value[:, None, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        along = gradient * ctx.even
        ctx.weight.gradient.add_(along.flatten(1, 2).sum(1))
        weight = ctx.weight.value
        size = gradient.shape[-1]
        # Mean over the width of gradient * weight * even.
        mean = torch.bmm(along.flatten(1, 2), weight[..., None]).view(*gradient.shape[:3], 1).div_(size)
        found = torch.mul(gradient, weight[:, None, None], out=along)
        return found.addcmul_(ctx.even, mean, value=-1).mul_(ctx.scale), None, None


class _Rotary(Function):
    """(..., positions, width): its halves turned by the angles (positions, width / 2)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.turn = (cosine, sine)
        return _turned(value, cosine, sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _turned(gradient, *ctx.turn, -1), None, None


def _turned(value: Tensor, cosine: Tensor, sine: Tensor, way: int) -> Tensor:
    (one, other), result = value.chunk(2, -1), torch.empty_like(value)
    first, second = result.chunk(2, -1)
    torch.mul(one, cosine, out=first).addcmul_(other, sine, value=-way)
    torch.mul(other, cosine, out=second).addcmul_(one, sine, value=way)
    return result


class _Gated(Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        soft = torch.sigmoid(gate)
        ctx.kept = (gate, up, soft)
        return (gate * soft).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, soft = ctx.kept
        # silu' = s + silu (1 - s)
        silu = gate * soft
        slope = torch.addcmul(silu, silu, soft, value=-1).add_(soft)
        return slope.mul_(up).mul_(gradient), silu.mul_(gradient)
