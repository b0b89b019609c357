"""Weights where they will be: `correction = "predict"`.

A microbatch that passes a stage now comes back when the stage has made s more steps, and its gradient is added then. So
the forward pass is made with the weights that are expected then,

    w^ = w - s lr u,    u the direction of the last step: m^ / (sqrt(v^) + epsilon) + decay w (AdamW), v (SGD)

and the backward pass, which computes the stage again, with those that are there by then. s is what was measured. Chen
et al. 2018, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (SpecTrain),
section 4, for momentum; Guan et al. 2019, "XPipe", section 3, for Adam. Where the loss follows in the same run nothing
is late, and nothing is predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from starlings_worker.chunks import chunks
from starlings_worker.errors import EngineFault
from starlings_worker.flat import FlatVector
from starlings_worker.optimizers.adam import AdamW
from starlings_worker.optimizers.elementary import Optimizer
from starlings_worker.optimizers.sgd import Sgd
from starlings_worker.stage import HeldSpan, stage_group


@dataclass(slots=True)
class _Stage:
    # Steps to look ahead, and what the next ones go by.
    steps: float = 0.0
    learning_rate: float = 0.0
    number: int = 0
    weights: Tensor | None = None
    # The weights have changed since `weights` was made.
    old: bool = True


class Ahead:
    """Of one held span. To be called from the compute thread."""

    def __init__(self, held: HeldSpan) -> None:
        self._held = held
        self._stages = {stage: _Stage() for stage in held.span.stages}

    def stepped(self, stage: int, number: int, steps_ahead: float, learning_rate: float) -> None:
        """The stage has made its step `number`, and what passes it now comes back `steps_ahead` steps later."""
        known = self._stages[stage]
        known.number, known.steps, known.learning_rate, known.old = number, steps_ahead, learning_rate, True

    def moved(self) -> None:
        """Something else has changed the weights."""
        for known in self._stages.values():
            known.old = True

    @torch.no_grad()
    def through(self, stage: int, value: Tensor) -> Tensor:
        """The stage's output on the weights that are expected; no graph."""
        module, known = self._held.modules[stage], self._stages[stage]
        if not (known.steps > 0 and known.number > 0):
            return module(value)
        assert isinstance(module, nn.Module)
        vector = self._held.vectors[stage_group(stage)]
        if known.weights is None:
            known.weights = torch.empty_like(vector.parameters)
        if known.old:
            predict(
                vector, self._held.optimizer, known.number, known.steps * known.learning_rate, known.weights
            )
            known.old = False
        expected = _views(module, vector, known.weights)
        result: Tensor = functional_call(module, expected, (value,))
        return result


@torch.no_grad()
def predict(vector: FlatVector, optimizer: Optimizer, number: int, distance: float, out: Tensor) -> None:
    """Into `out`: the weights after steps like the last one, `number`, whose learning rates sum up to `distance`.

    Raises:
        EngineFault: nothing is known of that optimizer's direction.
    """
    out.copy_(vector.parameters)
    match optimizer:
        case AdamW():
            for here in vector.decaying("exp_avg"):
                out[here].mul_(1.0 - distance * optimizer.weight_decay)
            scale = distance / (1.0 - optimizer.beta1**number)
            root_scale = 1.0 / math.sqrt(1.0 - optimizer.beta2**number)
            # Every parameter has both moments, so they lie as the weights do.
            first, second = vector.state["exp_avg"], vector.state["exp_avg_sq"]
            for here in chunks(out):
                denominator = second[here].sqrt().mul_(root_scale).add_(optimizer.epsilon)
                out[here].addcdiv_(first[here], denominator, value=-scale)
        case Sgd():
            if optimizer.momentum:
                out.sub_(vector.state["momentum"], alpha=distance)
        case _:
            raise EngineFault(f"{type(optimizer).__name__} does not say where its next steps go")


def _views(module: nn.Module, vector: FlatVector, weights: Tensor) -> dict[str, Tensor]:
    """By name in the module, the trained parameters' values in `weights`."""
    start, size = vector.parameters.data_ptr(), vector.parameters.element_size()
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = (parameter.data_ptr() - start) // size
        if parameter.requires_grad and 0 <= first < vector.size:
            found[name] = weights[first : first + parameter.numel()].view(parameter.shape)
    return found
