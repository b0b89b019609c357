"""How a group's contributions become one vector, although some may be wrong.

Always: a contribution with a value that is not finite, of an implausible norm, or with an implausible claim of weight
is refused, and the outcome names it. Beyond that `[exchange] robust` chooses:

| robust | aggregate | source |
| --- | --- | --- |
| none | weighted mean | |
| clip | weighted mean of contributions scaled down to the median norm | Sun et al. 2019 (norm bound) |
| trimmed | per coordinate, weighted mean without the largest and smallest | Yin et al. 2018, definition 2 |
| centered_clip | weighted mean of clipped differences from a centre, repeated | Karimireddy et al. 2021 (CClip) |

Weights come from the coordinator's ledger, never from a contribution. Members are summed in the order of their names,
so that whoever aggregates the same contributions gets the same bits. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from starlings_job.exchange_rules import Robust
from starlings_worker.chunks import chunks
from starlings_worker.outer.judging import CLAIM_FACTOR
from starlings_worker.outer.outcome import (
    Dropped,
    ImplausibleWeight,
    NotFinite,
    OutOfNorm,
    Reason,
    WrongShape,
)
from starlings_worker.outer.state import norm_of

# Of the reference norm. Members' data and step counts differ; ten times as much is no difference of data.
NORM_FACTOR = 10.0
# Members cut off at each end of a coordinate, as a share of all.
TRIM = 0.25
CENTERED_CLIP_ITERATIONS = 5


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member contributed: decoded, flat, float32."""

    member: str
    vector: Tensor
    # By the coordinator's ledger.
    weight: float
    # What the member itself says; used to name it and for nothing else.
    claimed_weight: float | None = None


@dataclass(frozen=True, slots=True)
class Aggregate:
    """`vector` is None when nobody is left to aggregate."""

    vector: Tensor | None
    members: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    # Of `members`, together.
    weight: float


@torch.no_grad()
def aggregate(
    contributions: Sequence[Contribution],
    robust: Robust = "none",
    *,
    reference_norm: float | None = None,
    center: Tensor | None = None,
) -> Aggregate:
    """One vector of what members contributed, refusing what cannot be right.

    Args:
        contributions: of vectors of equal size. A weight of 0 takes no part and is no offence.
        reference_norm: of an earlier round's honest contributions; the lower median of the present ones when None.
            Two members alone have no majority: give a reference where it matters.
        center: centered_clip starts here, at the coordinates' median when None.
    """
    ordered = sorted(contributions, key=lambda c: c.member)
    size = _usual_size(ordered)
    dropped: list[Dropped] = []
    sound: list[tuple[Contribution, float]] = []
    for contribution in ordered:
        reason = _unsound(contribution, size)
        if reason is not None:
            dropped.append(Dropped(contribution.member, reason))
        elif contribution.weight > 0:
            sound.append((contribution, norm_of(contribution.vector)))
    if reference_norm is None:
        reference_norm = _lower_median([norm for _, norm in sound if norm > 0])
    limit = NORM_FACTOR * reference_norm
    kept: list[tuple[Contribution, float]] = []
    for contribution, norm in sound:
        # A norm may overflow although each value is finite.
        if norm <= limit:
            kept.append((contribution, norm))
        else:
            dropped.append(Dropped(contribution.member, OutOfNorm("its vector is", norm, limit)))
    dropped.sort(key=lambda d: d.member)
    if not kept:
        return Aggregate(None, (), tuple(dropped), 0.0)
    weight = math.fsum(c.weight for c, _ in kept)
    vectors = [c.vector for c, _ in kept]
    shares = [c.weight / weight for c, _ in kept]
    match robust:
        case "none":
            vector = _weighted_mean(vectors, shares)
        case "clip":
            vector = _weighted_mean(vectors, _clipped_shares(shares, [norm for _, norm in kept]))
        case "trimmed":
            vector = _trimmed_mean(vectors, shares)
        case "centered_clip":
            vector = _centered_clip(vectors, shares, center)
        case _:
            assert_never(robust)
    return Aggregate(vector, tuple(c.member for c, _ in kept), tuple(dropped), weight)


def _usual_size(contributions: Sequence[Contribution]) -> int:
    sizes = sorted(c.vector.numel() for c in contributions)
    return max(sizes, key=sizes.count, default=0)


def _unsound(contribution: Contribution, size: int) -> Reason | None:
    if contribution.vector.numel() != size or contribution.vector.dim() != 1:
        return WrongShape(f"sent {contribution.vector.numel()} elements, the others {size}")
    weight, claimed = contribution.weight, contribution.claimed_weight
    # Comparisons are written so that nan fails them.
    if not 0 <= weight < math.inf:
        return ImplausibleWeight(weight, 0.0)
    if claimed is not None and not 0 <= claimed <= CLAIM_FACTOR * weight:
        return ImplausibleWeight(claimed, weight)
    low, high = torch.aminmax(contribution.vector) if size else (torch.zeros(()), torch.zeros(()))
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return NotFinite("its vector is")
    return None


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _weighted_mean(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    mean = torch.zeros_like(vectors[0])
    for vector, share in zip(vectors, shares, strict=True):
        mean.add_(vector, alpha=share)
    return mean


def _clipped_shares(shares: Sequence[float], norms: Sequence[float]) -> list[float]:
    """x_i min(1, median / |x_i|): no member moves the mean farther than the median one can. Only scales down."""
    most = _lower_median(norms)
    return [
        share * min(1.0, most / norm) if norm > 0 else share
        for share, norm in zip(shares, norms, strict=True)
    ]


def _trimmed_mean(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Per coordinate: without the b largest and the b smallest of n values, b = floor(n TRIM) but at least 1 of 3.

    Yin et al. 2018, definition 2, weighted: of those that stay, by their shares.
    """
    count = len(vectors)
    cut = max(1, int(count * TRIM)) if count >= 3 else 0
    if cut == 0:
        return _weighted_mean(vectors, shares)
    mean = torch.empty_like(vectors[0])
    weights = torch.tensor(shares, dtype=torch.float32, device=mean.device)
    for here in chunks(mean, count):
        values, places = torch.stack([v[here] for v in vectors]).sort(dim=0, stable=True)
        kept = weights[places[cut : count - cut]]
        mean[here] = (values[cut : count - cut] * kept).sum(0) / kept.sum(0)
    return mean


def _centered_clip(vectors: Sequence[Tensor], shares: Sequence[float], center: Tensor | None) -> Tensor:
    """v = v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|), repeated.

    Karimireddy et al. 2021, "Learning from history for Byzantine robust optimization", centred clipping. tau is the
    median distance from v, found anew each time: so nothing has to be tuned to the model, and whoever is farther away
    counts as if at that distance.
    """
    point = _coordinate_median(vectors) if center is None else center.clone()
    difference = torch.empty_like(point)
    for _ in range(CENTERED_CLIP_ITERATIONS):
        distances = [norm_of(torch.sub(v, point, out=difference)) for v in vectors]
        radius = _lower_median(distances)
        step = torch.zeros_like(point)
        for vector, share, away in zip(vectors, shares, distances, strict=True):
            torch.sub(vector, point, out=difference)
            step.add_(difference, alpha=share * (min(1.0, radius / away) if away > 0 else 1.0))
        point.add_(step)
    return point


def _coordinate_median(vectors: Sequence[Tensor]) -> Tensor:
    median = torch.empty_like(vectors[0])
    for here in chunks(median, len(vectors)):
        median[here] = torch.stack([v[here] for v in vectors]).median(dim=0).values
    return median
