"""Gradient descent, with heavy-ball momentum or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from starlings_job.optimizers import Kept
from starlings_worker.chunks import elements_at_once
from starlings_worker.flat import Entry, FlatVector, Stretch, keeps
from starlings_worker.optimizers.elementary import clipped

_momentum = keeps("momentum")


@dataclass(frozen=True, slots=True)
class Sgd:
    """Gradient descent with heavy-ball momentum: torch.optim.SGD without dampening; decay is part of the
    gradient.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    def keeps(self, entry: Entry) -> Sequence[Kept]:
        return _momentum(entry) if self.momentum else ()

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        del number
        everything = list(Stretch(0, vector.size, 0).pieces(elements_at_once(vector.parameters.device)))
        for piece in everything:
            clipped(vector.gradient[piece.here], clip_factor)
        if self.weight_decay:
            for here in vector.decaying():
                vector.gradient[here].add_(vector.parameters[here] * self.weight_decay)
        for piece in everything:
            update = vector.gradient[piece.here]
            if self.momentum:
                velocity = vector.state["momentum"][piece.state]
                velocity.mul_(self.momentum).add_(update)
                update = torch.mul(velocity, learning_rate, out=update)
            else:
                update.mul_(learning_rate)
            vector.parameters[piece.here].sub_(update)
