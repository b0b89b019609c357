"""`palsgd`: between rounds, a step now and then is a pull towards the last average instead of a gradient's.

    with probability p:  theta = theta - (alpha lr / p) (theta - phi)          # nothing is sent or received
    otherwise:           an inner step with the learning rate lr / (1 - p)

In a job a replica takes as many pulls between two steps of the optimizer as p gives, none of which costs a gradient,
and the job's learning rate is that of the optimizer's steps, lr / (1 - p): so p moves nothing but the pulls.

Naganuma et al. 2025, "Pseudo-Asynchronous Local SGD", algorithm 1: in expectation both parts weigh as if each were done
at every step. phi is the fragment's last average that this replica saw. Rounds are those of `pairs` here, since no
barrier is wanted; the paper's are DiLoCo's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_worker.chunks import chunks
from starlings_worker.outer.pairs import Pairs
from starlings_worker.outer.state import FragmentState


@dataclass(frozen=True, slots=True)
class Palsgd(Pairs):
    """`Pairs`, and what happens between its slots."""

    @property
    def gradient_factor(self) -> float:
        """By what the learning rate of the other steps is multiplied."""
        return 1 / (1 - self.rules.pull_probability)

    @torch.no_grad()
    def pull(self, state: FragmentState, theta: Tensor, learning_rate: float) -> None:
        """Towards phi, and never beyond it."""
        if self.rules.pull_probability == 0:
            return
        fraction = min(1.0, self.rules.pull * learning_rate / self.rules.pull_probability)
        for here in chunks(theta):
            theta[here].lerp_(state.phi[here], fraction)
