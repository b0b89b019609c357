"""`sparseloco`: few values of each displacement travel, and what did not is owed.

    at the slot:      e' = decay e + (phi - theta_i), sent as q_i = Q(TopK(e'))
    when it closes:   e = e' - q_i ;  phi = phi - rate * mean of q_i ;  theta = phi

Sarfi et al. 2025, "SparseLoCo", algorithm 1: error feedback takes the place of outer momentum. TopK and Q are the
codec's (`topk:64/4096|int2`); clipping to the median norm is `robust = "clip"` where contributions are averaged.

A round that does not close changes nothing, the error neither: the displacement stays in phi - theta and is sent again,
which is why this rule feeds back by itself instead of letting the codec's wrapper do it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules, Phase
from starlings_worker.chunks import chunks
from starlings_worker.outer.state import FragmentState, Payload, merge


@dataclass(frozen=True, slots=True)
class SparseLoCo:
    """Group rule over one fragment: `at_slot`, then `commit` with the aggregate and one's own decoded part."""

    rules: ExchangeRules

    @torch.no_grad()
    def at_slot(self, state: FragmentState, theta: Tensor, phase: Phase) -> Payload:
        """e', in `state.outgoing`. To be encoded without another error feedback."""
        state.enter(phase)
        outgoing = state.displacement(theta)
        if state.residual is not None:
            outgoing.add_(state.residual, alpha=self._decay)
        return Payload(outgoing)

    @torch.no_grad()
    def commit(
        self,
        state: FragmentState,
        theta: Tensor,
        own: Tensor,
        aggregate: Tensor,
        phase: Phase,
        *,
        overlapped: bool = False,
    ) -> None:
        """The outer step.

        Args:
            own: what this replica sent since `at_slot`, decoded.
            aggregate: the group's mean of such, which everybody decoded from the same bytes.
            overlapped: as in `DiLoCo.commit`.
        """
        assert state.outgoing is not None, "a round closes after its slot"
        if state.residual is None:
            state.residual = torch.empty_like(state.phi)
        torch.sub(state.outgoing, own, out=state.residual)
        alpha = self.rules.merge_alpha if overlapped else 0.0
        for here in chunks(theta):
            phi = state.phi[here].sub_(aggregate[here] * phase.outer_rate)
            merge(theta[here], phi, alpha)

    @property
    def _decay(self) -> float:
        return 1.0 if self.rules.feedback_decay is None else self.rules.feedback_decay
