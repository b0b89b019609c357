"""`noloco`: Nesterov's momentum and averaging with a random partner in one formula.

    delta = alpha delta - beta mean(Delta) - gamma (phi - mean(phi)) ;  phi = theta = phi + delta

Means over the two of a pair, Delta = phi - theta. Kolehmainen et al. 2025, "NoLoCo", section 3. alpha is
`outer_momentum`, beta `outer_rate`; the authors train with alpha .5, beta .7 and gamma .7, every 50 steps.

It is linear, so it is split here into what a replica does alone at the slot, and what is added when the swap commits:

    at the slot:      delta = alpha delta - beta Delta ;  phi = theta = phi + delta          (a partner like oneself)
    when it commits:  c = (1 - w) beta (q^_j - q^_i) ;  delta, phi and theta += c
                      with q = theta + (gamma / beta - 1) phi, as they were at the slot

so that one vector travels instead of two, and a failed swap costs the averaging only. delta keeps c, which is what
"coupled" means: the next round repeats alpha of it, and too much alpha or gamma drives replicas apart. Where that
begins, `starlings_job.noloco_stability` computes and `exchange_rules.check` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import Phase
from starlings_worker.chunks import chunks
from starlings_worker.outer.judging import PairRule
from starlings_worker.outer.state import FragmentState, Payload, add_correction


@dataclass(frozen=True, slots=True)
class NoLoCo(PairRule):
    """A `PairRule`. `state.momentum` is delta."""

    @torch.no_grad()
    def at_slot(self, state: FragmentState, theta: Tensor, phase: Phase) -> Payload:
        """The own step; what is sent is in `state.outgoing`."""
        state.enter(phase)
        alpha, beta = phase.outer_momentum, phase.outer_rate
        outgoing = state.need_outgoing()
        for here in chunks(theta):
            phi, weights, delta = state.phi[here], theta[here], state.momentum[here]
            torch.add(weights, phi, alpha=self.rules.gamma / beta - 1, out=outgoing[here])
            delta.mul_(alpha).add_(torch.sub(weights, phi), alpha=beta)
            phi.add_(delta)
            weights.copy_(phi)
        return Payload(outgoing)

    def _average(
        self, state: FragmentState, theta: Tensor, own: Payload, theirs: Payload, factor: float
    ) -> None:
        assert state.phase is not None, "a swap commits after its slot"
        add_correction((state.momentum, state.phi, theta), theirs.z, own.z, factor * state.phase.outer_rate)
