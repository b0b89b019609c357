"""Muon: momentum whose direction is made orthogonal, for hidden matrices; AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from starlings_compression.products import one_thread
from starlings_job.optimizers import MUON_MOMENTUM, Kept, kept_tensor, kinds_kept
from starlings_worker.digest import squared_norm
from starlings_worker.flat import Entry, FlatVector
from starlings_worker.optimizers.adam import AdamW
from starlings_worker.optimizers.elementary import clipped, decay

# Jordan et al. 2024, "Newton-Schulz iteration with tuned coefficients": a x + b x^3 + c x^5, steep at zero.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NORM_AT_LEAST = 1e-7


@dataclass(frozen=True, slots=True)
class Muon:
    """Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with Nesterov momentum and the
    decoupled weight decay of Liu et al., "Muon is scalable for LLM training" (2025), section 2.2; the formula of
    torch.optim.Muon, with the iteration in float32 instead of bfloat16.

    `takes_muon` says which parameters these are. Their momentum is v = momentum v + g, and a step

        w = (1 - lr weight_decay) w - lr scale orthogonal(g + momentum v)

    scale: "rms", 0.2 sqrt(max(rows, columns)), gives updates the root mean square of AdamW's, so that one rate suits
    all (Liu et al., section 2.2, equation 4); "original": sqrt(max(1, rows / columns)).
    adamw: of everything else, at `adamw_rate` times the learning rate.

    Matrix products are not separately rounded operations: they give the same bits for every number of threads (one is
    used), but for certain only within a numeric class. Replicas of different classes drift apart as their gradients do,
    and are averaged at the end.
    """

    adamw: AdamW = field(default_factory=AdamW)
    momentum: float = MUON_MOMENTUM
    scale: Literal["rms", "original"] = "rms"
    iterations: int = 5
    adamw_rate: float = 1.0

    def keeps(self, entry: Entry) -> Sequence[Kept]:
        kinds = kinds_kept("muon", self.momentum, entry.shape, hidden=entry.hidden)
        return [kept for kind in kinds if (kept := kept_tensor(kind, entry.shape)) is not None]

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        self.adamw.step(
            vector, number=number, learning_rate=learning_rate * self.adamw_rate, clip_factor=clip_factor
        )
        decay(vector, vector.decaying("momentum"), 1.0 - learning_rate * self.adamw.weight_decay)
        with one_thread() if vector.parameters.device.type == "cpu" else nullcontext():
            for slot in vector.slots_with("momentum"):
                gradient = clipped(vector.gradient_view(slot), clip_factor)
                velocity = vector.state_view("momentum", slot)
                velocity.mul_(self.momentum).add_(gradient)
                update = orthogonal(gradient.add_(velocity * self.momentum), self.iterations)
                vector.parameter_view(slot).sub_(update.mul_(learning_rate * self.scale_of(slot.shape)))

    def scale_of(self, shape: tuple[int, ...]) -> float:
        """By what the update of a matrix is multiplied, beside the learning rate."""
        rows, columns = shape
        if self.scale == "rms":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def orthogonal(matrix: Tensor, iterations: int = 5) -> Tensor:
    """About the nearest orthogonal matrix, (rows, columns), float32: singular values become some 0.7 to 1.2.

    The products take the matrix lying, so that they are as small as can be, and memory of their own, which is aligned.
    """
    rows, columns = matrix.shape
    lying = (matrix.t() if rows > columns else matrix).clone(memory_format=torch.contiguous_format)
    # Summed up in float64: what the order of summation changes there is lost when it is rounded.
    lying.mul_(1.0 / max(math.sqrt(squared_norm(lying.view(-1))), _NORM_AT_LEAST))
    for _ in range(iterations):
        square = lying @ lying.t()
        polynomial = (square @ square).mul_(_C).add_(square.mul_(_B))
        lying = (polynomial @ lying).add_(lying.mul_(_A))
    return lying.t().contiguous() if rows > columns else lying
