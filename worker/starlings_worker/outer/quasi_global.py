"""Quasi-global momentum: inner steps remember where gossip took the weights, not what the own data says.

With unequal data a replica's own momentum points away from the others'. Lin et al. 2021, "Quasi-Global Momentum",
algorithm 1: the buffer is fed with the whole change of the weights, averaging included,

    step:           theta = theta - lr (beta m^ + g)
    after gossip:   d = (theta_before - theta) / lr ;  m^ = mu m^ + (1 - mu) d

and for Adam (as in its authors' code) the second moment, with the change scaled to norm 1:

    step:           m = beta1 m + (1 - beta1) g ;  v = beta2 v^ + (1 - beta2) g^2, both corrected for their start
                    theta = theta - lr m / (sqrt(v) + eps)
    after gossip:   d = (theta_before - theta) / |theta_before - theta| ;  v^ = beta2 v^ + (1 - beta2) d^2

There gossip follows each step. Where several steps come before the first gossip, v^ is the own v until then: with v^ =
0 a value whose gradient happens to be small would be divided by next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules
from starlings_worker.chunks import chunks
from starlings_worker.outer.state import distance

_EPSILON = 1e-8


@dataclass(slots=True)
class QuasiGlobalState:
    """Per replica; flat float32 vectors of the weights' size."""

    # Weights when gossip was last through.
    before: Tensor
    # m^ (sgd) or v^ (adam).
    buffer: Tensor
    # adam: m.
    first: Tensor | None = None
    # Sum of the learning rates of the steps since then.
    learning_rates: float = 0.0
    steps: int = 0
    # Steps since gossip was last through, and whether it ever was.
    steps_since: int = 0
    met: bool = False

    @classmethod
    def starting_at(cls, theta: Tensor) -> QuasiGlobalState:
        return cls(theta.clone(), torch.zeros_like(theta))


@dataclass(frozen=True, slots=True)
class QuasiGlobal:
    """The inner optimizer of `gossip`: any number of `step`, then `after_gossip` when an exchange is through."""

    rules: ExchangeRules

    @torch.no_grad()
    def step(self, state: QuasiGlobalState, theta: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """In place. `gradient` stays as it is."""
        state.steps += 1
        state.steps_since += 1
        state.learning_rates += learning_rate
        if self.rules.quasi_global == "adam":
            self._adam_step(state, theta, gradient, learning_rate)
            return
        for here in chunks(theta):
            direction = torch.add(gradient[here], state.buffer[here], alpha=self.rules.quasi_global_beta)
            theta[here].sub_(direction, alpha=learning_rate)

    def _adam_step(
        self, state: QuasiGlobalState, theta: Tensor, gradient: Tensor, learning_rate: float
    ) -> None:
        beta1, beta2 = self.rules.inner_beta1, self.rules.inner_beta2
        step_size = learning_rate / (1 - beta1**state.steps)
        root_scale = 1 / math.sqrt(1 - beta2**state.steps)
        if state.first is None:
            state.first = torch.zeros_like(theta)
        for here in chunks(theta):
            g, first = gradient[here], state.first[here]
            first.mul_(beta1).add_(g, alpha=1 - beta1)
            second = torch.mul(state.buffer[here], beta2).addcmul_(g, g, value=1 - beta2)
            if not state.met:
                state.buffer[here].copy_(second)
            denominator = second.sqrt_().mul_(root_scale).add_(_EPSILON)
            theta[here].addcdiv_(first, denominator, value=-step_size)

    @torch.no_grad()
    def after_gossip(self, state: QuasiGlobalState, theta: Tensor) -> None:
        """Feeds the buffer with where the weights went since the last call. Without a step since then: nothing."""
        if state.learning_rates == 0:
            return
        if self.rules.quasi_global == "adam":
            if not state.met and state.steps_since == 1:
                state.buffer.zero_()
            keep = self.rules.inner_beta2
            scale = 1 / (distance(state.before, theta) + _EPSILON)
        else:
            keep = self.rules.quasi_global_mu
            scale = 1 / state.learning_rates
        for here in chunks(theta):
            change = torch.sub(state.before[here], theta[here]).mul_(scale)
            if self.rules.quasi_global == "adam":
                change.square_()
            state.buffer[here].mul_(keep).add_(change, alpha=1 - keep)
            state.before[here].copy_(theta[here])
        state.learning_rates, state.steps_since, state.met = 0.0, 0, True
