"""The gradients of all replicas at once: their llama weights side by side, and batched matrix products.

Small models spend most of a step on calls and on passes over memory. This computes what `Swarm.train` computes, several
times as fast, and faster still where torch compiles the passes, which takes about a minute of a core.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from inprocess.swarm import Swarm, Worker
from starlings_job.data.batch import Batch

# Hugging Face's, where a configuration leaves them out.
_ROTARY_BASE, _NORM_EPSILON = 10000.0, 1e-6
# {name: (R, ...)} of one block.
_Weights = Mapping[str, Tensor]


def can_compile() -> bool:
    """Whether torch finds the C++ compiler that it needs for it."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


class Stacked:
    """Passes of every replica of a swarm, each on a batch of its own and with its own weights.

    Values between stages are float32 (replicas, samples, positions, width).
    """

    def __init__(self, swarm: Swarm, *, compiled: bool = False) -> None:
        """`compiled`: worth it for hundreds of steps; without a compiler passes stay as they are."""
        description = swarm.workers[0].held.description
        if description.family != "llama":
            raise ValueError(f"weights of {description.family} cannot be stacked")
        stages, compiled = range(swarm.setup.stages), compiled and can_compile()
        self._stages = [_Stage(swarm.replicas_of(stage), description.config) for stage in stages]
        # (value, its weights) -> value, or at the end (value, targets, its weights) -> losses.
        passes = [_losses_of(stage) if stage is self._stages[-1] else stage.through for stage in self._stages]
        self._passes = [torch.compile(one, dynamic=False) if compiled else one for one in passes]

    def train(self, batches: Sequence[Batch], denominators: Sequence[float]) -> list[float]:
        """Adds each replica's gradient to its accumulators; returns the sums of their losses in nats."""
        value = torch.stack([batch.inputs for batch in batches])
        for stage, run in zip(self._stages[:-1], self._passes[:-1], strict=True):
            stage.load()
            value = run(value, *stage.leaves)
        losses = self._losses(value, batches)
        leaves = [leaf for stage in self._stages for leaf in stage.leaves]
        gradients = iter(torch.autograd.grad(losses, leaves, 1 / torch.tensor(denominators)))
        for stage in self._stages:
            stage.add([next(gradients) for _ in stage.leaves])
        return list(map(float, losses.detach()))

    @torch.no_grad()
    def forward(self, stage: int, value: Tensor) -> Tensor:
        """What a stage that is not the last makes of its input; nothing is kept."""
        self._stages[stage].load()
        found: Tensor = self._passes[stage](value, *self._stages[stage].leaves)
        return found

    def backward(self, stage: int, value: Tensor, gradient: Tensor) -> Tensor | None:
        """Computes again from the input, with the weights of now; adds to the accumulators, and returns the gradient
        at the input (None at stage 0).
        """
        self._stages[stage].load()
        entry = _entry(value)
        made = self._passes[stage](entry, *self._stages[stage].leaves)
        return self._back(stage, made, entry, gradient)

    def end(
        self, value: Tensor, batches: Sequence[Batch], denominators: Sequence[float]
    ) -> tuple[list[float], Tensor | None]:
        """The last stage, forward and backward: losses as of `train`, and the gradient at its input."""
        entry = _entry(value)
        losses = self._losses(entry, batches)
        before = self._back(len(self._stages) - 1, losses, entry, 1 / torch.tensor(denominators))
        return list(map(float, losses.detach())), before

    def _back(self, stage: int, made: Tensor, entry: Tensor, gradient: Tensor) -> Tensor | None:
        """Through one stage, down to its input unless that is tokens."""
        held, wanted = self._stages[stage], [entry] if entry.requires_grad else []
        found = torch.autograd.grad(made, [*held.leaves, *wanted], gradient)
        held.add(found[: len(held.leaves)])
        return found[-1] if wanted else None

    def _losses(self, value: Tensor, batches: Sequence[Batch]) -> Tensor:
        last = self._stages[-1]
        last.load()
        targets = torch.stack([batch.targets for batch in batches])
        found: Tensor = self._passes[-1](value, targets, *last.leaves)
        return found


class _Stage:
    """The weights of one stage in all replicas, as leaves of torch's graph."""

    def __init__(self, workers: Sequence[Worker], config: Mapping[str, Any]) -> None:
        self._config = config
        self._vectors = [next(iter(worker.held.vectors.values())) for worker in workers]
        self._weights = torch.zeros(len(workers), self._vectors[0].size)
        self._gradients = torch.zeros_like(self._weights)
        self._places = [(slot.block, slot.name) for slot in self._vectors[0].slots]
        self.leaves = [
            self._weights[:, slot.start : slot.stop].unflatten(1, slot.shape).requires_grad_()
            for slot in self._vectors[0].slots
        ]

    @torch.no_grad()
    def load(self) -> None:
        """Takes the weights that the replicas have now."""
        torch.stack([vector.parameters for vector in self._vectors], out=self._weights)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds what came for the leaves to the replicas' accumulators."""
        torch.cat([gradient.flatten(1) for gradient in gradients], 1, out=self._gradients)
        for vector, own in zip(self._vectors, self._gradients, strict=True):
            vector.gradient.add_(own)

    def through(self, value: Tensor, *leaves: Tensor) -> Tensor:
        """Its blocks, one after the other. Pure."""
        blocks: dict[str, dict[str, Tensor]] = {}
        for (block, name), leaf in zip(self._places, leaves, strict=True):
            blocks.setdefault(block, {})[name] = leaf
        for block, weights in blocks.items():
            if block == "embed":
                (table,) = weights.values()
                value = _embedded(value, table)
            elif block == "head":
                (norm,) = (weight for name, weight in weights.items() if "norm" in name)
                value = _linear(self._norm(value, norm), weights["lm_head.weight"])
            else:
                value = self._layer(weights, value)
        return value

    def _layer(self, weights: _Weights, value: Tensor) -> Tensor:
        replicas, samples, positions, width = value.shape
        heads = self._config["num_attention_heads"]
        normed = self._norm(value, weights["input_layernorm.weight"])
        query, key, values = (
            _linear(normed, weights[f"self_attn.{name}_proj.weight"])
            .view(replicas * samples, positions, heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        query, key = (_turned(part, *self._rotation(positions, width // heads)) for part in (query, key))
        later = torch.ones(positions, positions, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(-1, -2) * (width // heads) ** -0.5).masked_fill(later, -torch.inf)
        met = (
            (torch.softmax(scores, -1) @ values).transpose(1, 2).reshape(replicas, samples, positions, width)
        )
        value = value + _linear(met, weights["self_attn.o_proj.weight"])
        normed = self._norm(value, weights["post_attention_layernorm.weight"])
        gate, up = (_linear(normed, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return value + _linear(functional.silu(gate) * up, weights["mlp.down_proj.weight"])

    def _norm(self, value: Tensor, weight: Tensor) -> Tensor:
        """Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4."""
        epsilon = self._config.get("rms_norm_eps", _NORM_EPSILON)
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon) * weight[:, None, None]

    def _rotation(self, positions: int, width: int) -> tuple[Tensor, Tensor]:
        """Su et al. 2021, "RoFormer", section 3.4.2, of the halves that llama turns."""
        frequencies = _ROTARY_BASE ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(positions), frequencies)
        return angles.cos(), angles.sin()


def _losses_of(stage: _Stage) -> Callable[..., Tensor]:
    """Per replica the sum over its targets."""

    def losses(value: Tensor, targets: Tensor, *leaves: Tensor) -> Tensor:
        logits = stage.through(value, *leaves)
        each = functional.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
        return each.view(len(targets), -1).sum(1)

    return losses


def _entry(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


def _embedded(tokens: Tensor, table: Tensor) -> Tensor:
    """Of the own table (R, vocabulary, width) for the tokens of each replica."""
    replicas, vocabulary, width = table.shape
    rows = tokens + vocabulary * torch.arange(replicas)[:, None, None]
    return functional.embedding(rows, table.reshape(-1, width))


def _linear(value: Tensor, weight: Tensor) -> Tensor:
    """(R, samples, positions, in) with a weight (R, out, in)."""
    return torch.bmm(value.flatten(1, 2), weight.transpose(1, 2)).view(*value.shape[:3], -1)


def _turned(value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """(..., positions, width): its halves turned by the angles (positions, width / 2)."""
    one, other = value.chunk(2, -1)
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), -1)
