"""`diloco`: everybody averages displacements, then everybody takes the same outer step.

    at the slot:      Delta_i = phi - theta_i, sent
    when it closes:   D = weighted mean of the decoded Delta_i ;  m = mu m + D ;  phi = phi - eta (D + mu m)
                      theta = alpha theta + (1 - alpha) phi

Douillard et al. 2023, "DiLoCo", algorithm 1. By fragments that take turns, with training going on between slot and
close: Douillard et al. 2025, "Streaming DiLoCo", sections 2.2 (fragments) and 2.3 (overlap; alpha merges what was
trained meanwhile, 0 forgets it). phi and m are equal on all replicas: they all decode the same aggregate.

A round that does not close changes nothing: what was trained stays in phi - theta and comes with the next round. An
outer step of one's own instead would part the replicas' phi for good, since only displacements are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules, Phase
from starlings_worker.chunks import chunks
from starlings_worker.outer.state import FragmentState, Payload, merge, nesterov_step


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """Group rule over one fragment: `at_slot`, then `commit` with the aggregate, or nothing at all."""

    rules: ExchangeRules

    @torch.no_grad()
    def at_slot(self, state: FragmentState, theta: Tensor, phase: Phase) -> Payload:
        """The displacement, in `state.outgoing`. Weights and state stay as they are."""
        state.enter(phase)
        return Payload(state.displacement(theta))

    @torch.no_grad()
    def commit(
        self,
        state: FragmentState,
        theta: Tensor,
        aggregate: Tensor,
        phase: Phase,
        *,
        overlapped: bool = False,
    ) -> None:
        """The outer step with the group's mean displacement.

        Args:
            overlapped: steps were taken since the slot; `merge_alpha` says how much of them stays.
        """
        alpha = self.rules.merge_alpha if overlapped else 0.0
        for here in chunks(theta):
            phi, weights = state.phi[here], theta[here]
            nesterov_step(
                phi,
                state.momentum[here],
                aggregate[here].clone(),
                phase.outer_rate,
                phase.outer_momentum,
            )
            merge(weights, phi, alpha)
