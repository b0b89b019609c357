"""`gossip`: at every step half of one's weights goes to one peer, and half of another's comes.

    sent:        x_i / 2 and w_i / 2, with x_i = w_i theta_i
    afterwards:  x = x_i - sent + received ;  w likewise ;  theta = x / w

Assran et al. 2019, "Stochastic gradient push", algorithm 1: delivery may be one-sided, since x and w lose and gain
alike, so that theta stays an average. Gradients act on theta. Peers follow the one-peer exponential graph (Ying et
al. 2021): after log2(n) steps of n = 2^k replicas each has the exact mean of all. Inner steps:
`quasi_global.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules
from starlings_worker.chunks import chunks
from starlings_worker.outer.judging import plausible_distance
from starlings_worker.outer.outcome import Average, Dropped, ImplausibleWeight, Reason, Refuse, Verdict
from starlings_worker.outer.state import usual

# Half is given away, half stays.
GIVEN = 0.5
# Weights are 1 while everything arrives. One that only received for long may have gathered some; nobody has more.
WEIGHT_MOST = 4.0
# Losses take weight out of the group for good. Whoever is left with less than this counts as one replica again: or in
# the end theta would be a quotient of nothing, and a newcomer would outweigh everybody.
WEIGHT_LEAST = 1 / 8


@dataclass(frozen=True, slots=True)
class Peers:
    """Of one replica at one step, as places in the sorted list of the group's members."""

    sends_to: int
    receives_from: int


def exponential_peers(step: int, place: int, count: int) -> Peers:
    """The one-peer exponential graph: 1, 2, 4, ... places ahead, in turn. With oneself alone: oneself."""
    if count < 2:
        return Peers(place, place)
    hop = 1 << (step % (count - 1).bit_length())
    return Peers((place + hop) % count, (place - hop) % count)


@dataclass(slots=True)
class PushSumState:
    """Per replica."""

    weight: float = 1.0
    # x as it was sent.
    outgoing: Tensor | None = None
    # Of the weights of peers, as in `FragmentState`.
    usual_distance: float | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """x and w, before they are halved; decoded where they come from the wire (one's own, too)."""

    x: Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class Gossip:
    """One exchange: `at_slot`, `judge` what came, `commit`. A lost message costs its sender and nobody else."""

    rules: ExchangeRules

    @torch.no_grad()
    def at_slot(self, state: PushSumState, theta: Tensor) -> Pushed:
        """x = w theta, in `state.outgoing`. theta stays as it is."""
        if state.outgoing is None:
            state.outgoing = torch.empty_like(theta)
        torch.mul(theta, state.weight, out=state.outgoing)
        return Pushed(state.outgoing, state.weight)

    def judge(self, state: PushSumState, theta: Tensor, received: Pushed, peer: str) -> Average | Refuse:
        """Whether to take what came. A push-sum weight is the peer's own word, so it is bounded."""
        reason: float | Reason
        # Written so that nan is implausible too.
        if not 0 < received.weight <= WEIGHT_MOST:
            reason = ImplausibleWeight(received.weight, 1.0)
        else:
            reason = plausible_distance(theta, received.x / received.weight, state.usual_distance)
        return Average(reason) if isinstance(reason, float) else Refuse(Dropped(peer, reason))

    @torch.no_grad()
    def commit(
        self,
        state: PushSumState,
        theta: Tensor,
        sent: Pushed | None,
        received: Pushed | None,
        verdict: Verdict | None,
    ) -> bool:
        """Gives and takes. Steps taken since the slot are kept. Returns whether anything was taken.

        Args:
            sent: one's own, decoded; None if it certainly did not arrive.
            received: what came, taken only if the verdict says so.
        """
        if received is None or not isinstance(verdict, Average):
            received = None
        else:
            state.usual_distance = usual(state.usual_distance, verdict.distance)
        given = GIVEN * sent.weight if sent is not None else 0.0
        taken = GIVEN * received.weight if received is not None else 0.0
        weight = state.weight - given + taken
        for here in chunks(theta):
            part = theta[here].mul_(state.weight)
            if sent is not None:
                part.sub_(sent.x[here], alpha=GIVEN)
            if received is not None:
                part.add_(received.x[here], alpha=GIVEN)
            part.div_(weight)
        state.weight = weight if weight >= WEIGHT_LEAST else 1.0
        return received is not None
