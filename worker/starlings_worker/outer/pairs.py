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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules, Phase
from starlings_worker.outer.outcome import (
    Average,
    Dropped,
    ImplausibleWeight,
    NotFinite,
    OutOfNorm,
    Reason,
    Refetch,
    Refuse,
    Verdict,
    WrongShape,
)
from starlings_worker.outer.state import (
    FragmentState,
    Payload,
    add_correction,
    chunks,
    distance,
    nesterov_step,
    norm_of,
)

# Farther away than this many times the usual distance is no honest partner. Wide, so that the sides of a network that
# was cut in two find together again: a side that is cut off stops when its leases end. And nobody is averaged with who
# is farther away than zero is, as scaled and sign-flipped weights are.
DISTANCE_FACTOR = 30.0
# A settled momentum of .9 is ten times a first displacement, and a partner may be several times as fast.
MOMENTUM_FACTOR = 100.0
# A worker's own count may run ahead of the ledger, by what was not reported yet.
CLAIM_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """The arithmetic of `pairs`, over the `FragmentState` and the weights `theta` of one fragment (flat float32, the
    training's own memory: changed in place).

    One round: `at_slot`; then per swap `payload` (encode it, decode it again for oneself), `judge` before one says
    PREPARED, `commit` once the swap stands; at last `FragmentState.end_round`.
    """

    rules: ExchangeRules

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
        for begin, end in chunks(theta):
            displacement = torch.sub(phi[begin:end], theta[begin:end])
            if mu == 0 and eta == 1:
                # z = theta, without the rounding of phi - (phi - theta).
                momentum[begin:end].copy_(displacement)
                phi[begin:end].copy_(theta[begin:end])
                continue
            nesterov_step(phi[begin:end], momentum[begin:end], displacement, eta, mu)
            theta[begin:end].copy_(phi[begin:end])
        return self.payload(state, phase)

    def payload(self, state: FragmentState, phase: Phase) -> Payload:
        """What the next swap of this round sends. Momentum that nobody will use (mu = 0) stays at home."""
        return Payload(state.phi, state.momentum if phase.outer_momentum > 0 else None)

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
        """Whether to average, from both decoded payloads. Changes nothing.

        Args:
            claimed_weight: what the partner itself says, if it says so; never used but to name it.
            ledger_weight: the partner's, by the coordinator's ledger.
        """

        def refuse(reason: Reason) -> Refuse:
            return Refuse(Dropped(partner, reason))

        # Written so that nan is implausible too.
        if (
            claimed_weight is not None
            and ledger_weight is not None
            and not 0 <= claimed_weight <= CLAIM_FACTOR * ledger_weight
        ):
            return refuse(ImplausibleWeight(claimed_weight, ledger_weight))
        if theirs.m is not None and theirs.m.shape != own.z.shape:
            return refuse(WrongShape(f"sent {theirs.m.numel()} elements for a fragment of {own.z.numel()}"))
        far = plausible_distance(own.z, theirs.z, state.usual_distance)
        if not isinstance(far, float):
            return refuse(far)
        if state.usual_distance is not None:
            verdict = comeback(far, state.usual_distance, state.solo_rounds, self.rules)
            if verdict is not None:
                return verdict
        if own.m is not None and theirs.m is not None:
            size = norm_of(theirs.m)
            if not math.isfinite(size):
                return refuse(NotFinite("its momentum is"))
            limit = MOMENTUM_FACTOR * max(norm_of(own.m), far)
            if size > limit:
                return refuse(OutOfNorm("its momentum is", size, limit))
        return Average(far)

    def commit(
        self,
        state: FragmentState,
        theta: Tensor,
        own: Payload,
        theirs: Payload,
        share: float,
        verdict: Verdict,
    ) -> bool:
        """Averages if the verdict says so. Returns whether it did.

        Args:
            own, theirs: decoded payloads of this swap.
            share: w, this replica's share of the pair's weight, from the coordinator: 0 < w < 1.
        """
        if not 0 < share < 1:
            raise ValueError(f"a share of {share} is not between 0 and 1")
        if not isinstance(verdict, Average):
            return False
        add_correction((state.phi, theta), theirs.z, own.z, 1 - share)
        if own.m is not None and theirs.m is not None:
            add_correction((state.momentum,), theirs.m, own.m, 1 - share)
        state.note_distance(verdict.distance)
        return True


def plausible_distance(own: Tensor, theirs: Tensor, usual_distance: float | None) -> float | Reason:
    """How far a partner's weights are away, or why they are not to be averaged with."""
    if theirs.shape != own.shape:
        return WrongShape(f"sent {theirs.numel()} elements for a fragment of {own.numel()}")
    far = distance(theirs, own)
    if not math.isfinite(far):
        return NotFinite("its weights are")
    limit = norm_of(own)
    if usual_distance:
        limit = min(limit, DISTANCE_FACTOR * usual_distance)
    return far if far <= limit else OutOfNorm("its distance is", far, limit)


def comeback(
    distance: float, usual_distance: float, solo_rounds: int, rules: ExchangeRules
) -> Refetch | None:
    """Whether a replica that was alone for a while is too far from the others to be averaged in. Pure.

    Averaging with it would move its partner half of that way.
    """
    if solo_rounds >= rules.solo_rounds_limit and distance > rules.comeback_factor * usual_distance:
        return Refetch(distance, usual_distance, solo_rounds)
    return None


def pair_share(own_weight: float, partner_weight: float) -> float:
    """w: the own share of the pair's tokens, both by the ledger. Half each when neither has any."""
    total = own_weight + partner_weight
    if not (math.isfinite(total) and min(own_weight, partner_weight) >= 0):
        raise ValueError(f"weights {own_weight} and {partner_weight} are no token counts")
    # Neither side may vanish: it would take the other's weights whole.
    return 0.5 if total == 0 else min(0.99, max(0.01, own_weight / total))
