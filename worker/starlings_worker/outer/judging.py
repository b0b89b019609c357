"""What all pair rules share: which partner is plausible, and that only such a one is averaged with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules
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
from starlings_worker.outer.state import FragmentState, Payload, distance, norm_of

# Farther away than this many times the usual distance is no honest partner. Wide, so that the sides of a network that
# was cut in two find together again: a side that is cut off stops when its leases end. And nobody is averaged with who
# is farther away than zero is, as scaled and sign-flipped weights are.
DISTANCE_FACTOR = 30.0
# A settled momentum of .9 is ten times a first displacement, and a partner may be several times as fast.
MOMENTUM_FACTOR = 100.0
# A worker's own count may run ahead of the ledger, by what was not reported yet.
CLAIM_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class PairRule(ABC):
    """The arithmetic of a preset that averages with one partner at a time, over the `FragmentState` and the weights
    `theta` of one fragment (flat float32, the training's own memory: changed in place).

    One round: the rule's `at_slot`; then per swap `judge` before one says PREPARED, and `commit` once the swap stands.
    """

    rules: ExchangeRules

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
        self._average(state, theta, own, theirs, 1 - share)
        state.note_distance(verdict.distance)
        return True

    @abstractmethod
    def _average(
        self, state: FragmentState, theta: Tensor, own: Payload, theirs: Payload, factor: float
    ) -> None:
        """`factor`: the partner's share."""


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
