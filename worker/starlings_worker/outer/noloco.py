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

from starlings_job.exchange_rules import ExchangeRules, Phase
from starlings_worker.outer.outcome import Average, Verdict
from starlings_worker.outer.pairs import Pairs
from starlings_worker.outer.state import FragmentState, Payload, add_correction, chunks


@dataclass(frozen=True, slots=True)
class NoLoCo:
    """Pair rule over one fragment, with the calls of `Pairs`. `state.momentum` is delta."""

    rules: ExchangeRules

    @torch.no_grad()
    def at_slot(self, state: FragmentState, theta: Tensor, phase: Phase) -> Payload:
        """The own step; what is sent is in `state.outgoing`."""
        state.enter(phase)
        alpha, beta = phase.outer_momentum, phase.outer_rate
        outgoing = state.need_outgoing()
        for begin, end in chunks(theta):
            phi, weights, delta = state.phi[begin:end], theta[begin:end], state.momentum[begin:end]
            torch.add(weights, phi, alpha=self.rules.gamma / beta - 1, out=outgoing[begin:end])
            delta.mul_(alpha).add_(torch.sub(weights, phi), alpha=beta)
            phi.add_(delta)
            weights.copy_(phi)
        return Payload(outgoing)

    def judge(
        self,
        state: FragmentState,
        own: Payload,
        theirs: Payload,
        partner: str,
        *,
        claimed_weight: float | None = None,
        ledger_weight: float | None = None,
    ) -> Verdict:
        """As `Pairs.judge`."""
        return Pairs(self.rules).judge(
            state, own, theirs, partner, claimed_weight=claimed_weight, ledger_weight=ledger_weight
        )

    def commit(
        self,
        state: FragmentState,
        theta: Tensor,
        own: Payload,
        theirs: Payload,
        share: float,
        verdict: Verdict,
    ) -> bool:
        """Averages if the verdict says so. Returns whether it did."""
        if not 0 < share < 1:
            raise ValueError(f"a share of {share} is not between 0 and 1")
        if not isinstance(verdict, Average):
            return False
        assert state.phase is not None, "a swap commits after its slot"
        factor = (1 - share) * state.phase.outer_rate
        add_correction((state.momentum, state.phi, theta), theirs.z, own.z, factor)
        state.note_distance(verdict.distance)
        return True
