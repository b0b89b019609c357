"""`pairs`: each replica takes its own outer step at once, then averages with a partner whenever that commits.

    at the slot:      Delta = phi - theta ;  m = mu m + Delta ;  z = phi - eta (Delta + mu m)
                      phi = theta = z, and training goes on: this is the solo outcome
    when it commits:  c = (1 - w) (z^_j - z^_i) ;  phi += c ;  theta += c ;  m += (1 - w) (m^_j - m^_i)

z^ and m^ are decoded, one's own too, so that the weighted mean over both is kept exactly, whatever the codec dropped.
Adding c keeps the steps taken since the slot. The outer step is Lookahead with Nesterov momentum (Zhang et al. 2019,
"Lookahead", algorithm 1; Kallusky et al. 2025, "SNOO", algorithm 1); averaging weights after local steps is gossip
averaging (Boyd et al. 2006, section 2). Momentum never sees c: so the difference between replicas is multiplied by
averaging alone, and no rate of dropped swaps makes it grow (NoLoCo's form, where it does, has a limit; `noloco.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import Phase
from starlings_worker.chunks import chunks
from starlings_worker.outer.judging import PairRule
from starlings_worker.outer.state import FragmentState, Payload, add_correction, nesterov_step


@dataclass(frozen=True, slots=True)
class Pairs(PairRule):
    """A `PairRule`; before each further swap of a round, `payload` is what to send."""

    def numbers(self, state: FragmentState, phase: Phase) -> tuple[float, float]:
        """(eta, mu) of this slot: plain averaging of weights after too many rounds alone."""
        if state.solo_rounds >= self.rules.solo_rounds_limit:
            return 1.0, 0.0
        return phase.outer_rate, phase.outer_momentum

    @torch.no_grad()
    def at_slot(self, state: FragmentState, theta: Tensor, phase: Phase) -> Payload:
        """The own outer step. Afterwards phi = theta = z."""
        state.enter(phase)
        eta, mu = self.numbers(state, phase)
        phi, momentum = state.phi, state.momentum
        for here in chunks(theta):
            displacement = torch.sub(phi[here], theta[here])
            if mu == 0 and eta == 1:
                # z = theta, without the rounding of phi - (phi - theta).
                momentum[here].copy_(displacement)
                phi[here].copy_(theta[here])
                continue
            nesterov_step(phi[here], momentum[here], displacement, eta, mu)
            theta[here].copy_(phi[here])
        return self.payload(state, phase)

    def payload(self, state: FragmentState, phase: Phase) -> Payload:
        """What the next swap of this round sends. Momentum that nobody will use (mu = 0) stays at home."""
        return Payload(state.phi, state.momentum if phase.outer_momentum > 0 else None)

    def _average(
        self, state: FragmentState, theta: Tensor, own: Payload, theirs: Payload, factor: float
    ) -> None:
        add_correction((state.phi, theta), theirs.z, own.z, factor)
        if own.m is not None and theirs.m is not None:
            add_correction((state.momentum,), theirs.m, own.m, factor)
