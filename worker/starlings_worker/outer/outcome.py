"""What came of a round, as types: what was averaged, with whom, who was left out and why. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A value is infinite or not a number."""

    what: str


@dataclass(frozen=True, slots=True)
class OutOfNorm:
    """Larger, or farther away, than any honest one would be."""

    what: str
    norm: float
    limit: float


@dataclass(frozen=True, slots=True)
class ImplausibleWeight:
    """It claims a weight that the ledger does not know of."""

    claimed: float
    ledger: float


@dataclass(frozen=True, slots=True)
class WrongShape:
    """Its vector has another length, or belongs to another (stage, fragment, round)."""

    detail: str


@dataclass(frozen=True, slots=True)
class Missing:
    """It did not come, or not all of it, before the deadline."""

    detail: str


Reason = NotFinite | OutOfNorm | ImplausibleWeight | WrongShape | Missing


@dataclass(frozen=True, slots=True)
class Dropped:
    """A member that the round went on without."""

    member: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Average:
    """A pair's verdict: average with the partner, who is `distance` away (Euclidean norm of z_j - z_i)."""

    distance: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """A pair's verdict: what the partner sent is not averaged with. The round is solo, and says who and why."""

    dropped: Dropped


@dataclass(frozen=True, slots=True)
class Refetch:
    """A pair's verdict: after `solo_rounds` alone this replica is too far from the others to be averaged in; it copies
    their state instead.
    """

    distance: float
    usual_distance: float
    solo_rounds: int


Verdict = Average | Refuse | Refetch


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round did to this replica's fragment. Nothing that failed counts as averaged."""

    fragment: int
    round_id: int
    # Of the fragment.
    elements: int
    elements_averaged: int
    # Those whose vectors are in the average, without oneself.
    partners: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    refetch: Refetch | None = None

    @property
    def fraction_averaged(self) -> float:
        return self.elements_averaged / self.elements if self.elements else 0.0

    @property
    def solo(self) -> bool:
        return self.elements_averaged == 0

    def __str__(self) -> str:
        if self.solo:
            done = "took its own step alone"
        else:
            done = f"averaged {100 * self.fraction_averaged:.4g} % with {', '.join(self.partners)}"
        without = "".join(f"; without {d.member}: {explain(d.reason)}" for d in self.dropped)
        far = ""
        if self.refetch is not None:
            far = (
                f"; fetches state after {self.refetch.solo_rounds} rounds alone: {self.refetch.distance:.3g} from the "
                f"others, usually {self.refetch.usual_distance:.3g}"
            )
        return f"round {self.round_id} of fragment {self.fragment} {done}{without}{far}"


def explain(reason: Reason) -> str:
    match reason:
        case NotFinite(what):
            return f"{what} not finite"
        case OutOfNorm(what, norm, limit):
            return f"{what} of norm {norm:.3g}, at most {limit:.3g} is taken"
        case ImplausibleWeight(claimed, ledger):
            return f"claims a weight of {claimed:.3g}, the ledger says {ledger:.3g}"
        case WrongShape(detail) | Missing(detail):
            return detail
        case _:
            assert_never(reason)
