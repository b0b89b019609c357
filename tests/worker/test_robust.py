"""What one bad member of a group can do to the others: nothing, or little, and its name is in the outcome."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from starlings_job.exchange_rules import Robust
from starlings_worker.outer.outcome import ImplausibleWeight, NotFinite, OutOfNorm, WrongShape
from starlings_worker.robust import Contribution, aggregate

SIZE = 4096
HOW: tuple[Robust, ...] = ("none", "clip", "trimmed", "centered_clip")


def honest(count: int, seed: int = 11) -> list[Contribution]:
    """Displacements that share a direction and differ by noise of the same size."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(SIZE)
    return [
        Contribution(
            f"w{k}", torch.tensor(common + rng.standard_normal(SIZE), dtype=torch.float32), 1.0 + k % 3
        )
        for k in range(count)
    ]


def honest_mean(contributions: list[Contribution]) -> torch.Tensor:
    total = sum(c.weight for c in contributions)
    return torch.stack([c.vector.double() * c.weight / total for c in contributions]).sum(0).float()


def error_of(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("robust", HOW)
@pytest.mark.parametrize("bad", ["nan", "inf", "1e30", "1e38", "weight", "length"])
def test_what_cannot_be_right_is_refused_and_named_and_changes_nothing(robust: Robust, bad: str) -> None:
    members = honest(4)
    alone = aggregate(members, robust)
    vector, claimed = members[0].vector.clone(), None
    match bad:
        case "weight":
            claimed = 1e9
        case "length":
            vector = vector[:-1]
        case _:
            vector[17] = float(bad)
    found = aggregate([*members, Contribution("mallory", vector, 1.0, claimed)], robust)
    assert alone.vector is not None
    assert found.vector is not None
    assert torch.equal(found.vector, alone.vector)
    assert found.members == ("w0", "w1", "w2", "w3")
    assert [d.member for d in found.dropped] == ["mallory"]
    reason = {"weight": ImplausibleWeight, "length": WrongShape, "1e30": OutOfNorm, "1e38": OutOfNorm}
    assert isinstance(found.dropped[0].reason, reason.get(bad, NotFinite))


@pytest.mark.parametrize("robust", ["trimmed", "centered_clip"])
def test_one_member_of_eight_that_flips_the_sign_hardly_moves_the_aggregate(robust: Robust) -> None:
    members = honest(7)
    liar = Contribution("mallory", -members[0].vector, 1.0)
    expected = honest_mean(members)
    plain = error_of(aggregate([*members, liar]).vector, expected)
    found = error_of(aggregate([*members, liar], robust).vector, expected)
    print(f"{robust}: {found:.3f}, the plain mean {plain:.3f}")
    assert found < 0.25
    assert aggregate([*members, liar], robust).dropped == ()


@pytest.mark.parametrize("robust", ["clip", "trimmed", "centered_clip"])
def test_one_member_of_eight_that_scales_within_the_norm_bound_hardly_moves_the_aggregate(
    robust: Robust,
) -> None:
    members = honest(7)
    liar = Contribution("mallory", 9 * members[0].vector, 1.0)
    expected = honest_mean(members)
    plain = error_of(aggregate([*members, liar]).vector, expected)
    found = error_of(aggregate([*members, liar], robust).vector, expected)
    print(f"{robust}: {found:.3f}, the plain mean {plain:.3f}")
    assert found < 0.3 < plain / 2


@pytest.mark.parametrize("robust", HOW)
def test_a_scaled_member_beyond_the_norm_bound_is_named(robust: Robust) -> None:
    members = honest(7)
    found = aggregate([*members, Contribution("mallory", 100 * members[0].vector, 1.0)], robust)
    assert [d.member for d in found.dropped] == ["mallory"]
    assert error_of(found.vector, honest_mean(members)) < 0.25


@pytest.mark.parametrize("robust", HOW)
def test_honest_members_alone_give_about_their_mean(robust: Robust) -> None:
    members = honest(8)
    found = aggregate(members, robust)
    assert error_of(found.vector, honest_mean(members)) < 0.2
    assert found.dropped == ()
    assert found.weight == sum(c.weight for c in members)


def test_the_plain_mean_is_the_weighted_mean() -> None:
    members = honest(5)
    assert error_of(aggregate(members).vector, honest_mean(members)) < 1e-6


def test_members_in_any_order_give_the_same_bits() -> None:
    members = honest(6)
    for robust in HOW:
        one, other = aggregate(members, robust).vector, aggregate(members[::-1], robust).vector
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_a_tiny_honest_minority_is_no_reference_and_a_given_one_decides_between_two() -> None:
    small, large = torch.full((8,), 1.0), torch.full((8,), 1e30)
    pair = [Contribution("a", small, 1.0), Contribution("b", large, 1.0)]
    found = aggregate(pair, reference_norm=3.0)
    assert found.members == ("a",)
    assert [d.member for d in found.dropped] == ["b"]


def test_without_anybody_left_there_is_no_aggregate() -> None:
    found = aggregate(
        [Contribution("a", torch.full((8,), math.nan), 1.0), Contribution("b", torch.ones(8), 0.0)]
    )
    assert found.vector is None
    assert found.members == ()
    assert [d.member for d in found.dropped] == ["a"]
