"""Group rules against references written from their papers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_job.exchange_rules import Phase, rules_for
from starlings_worker.outer import state as state_module
from starlings_worker.outer.allreduce import AllReduce
from starlings_worker.outer.diloco import DiLoCo
from starlings_worker.outer.state import FragmentState
from starlings_worker.robust import Contribution, aggregate

SIZE = 37
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "_CHUNK_ELEMENTS_CPU", 16)
        yield


def vector(rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(SIZE)).astype(np.float32).astype(np.float64)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def close(found: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> bool:
    scale = max(float(np.linalg.norm(expected)), 1e-3)
    return float(np.linalg.norm(found.double().numpy() - expected)) <= tolerance * scale


def mean_of(vectors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    found = aggregate(
        [Contribution(f"w{k}", v, w) for k, (v, w) in enumerate(zip(vectors, weights, strict=True))]
    )
    assert found.vector is not None
    assert not found.dropped
    return found.vector


@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.1, 1.0), st.floats(0.0, 0.95), st.floats(1, 3), st.booleans(), st.floats(0.0, 0.9))
def test_diloco_follows_its_papers(
    seed: int, eta: float, mu: float, weight: float, overlapped: bool, alpha: float
) -> None:
    rng, phase = np.random.default_rng(seed), Phase(50, eta, mu)
    rule = DiLoCo(rules_for("diloco", merge_alpha=alpha))
    start, weights = vector(rng), [weight, 1.0]
    phi, m, fast = start.copy(), np.zeros(SIZE), [start.copy(), start.copy()]
    thetas = [tensor(start), tensor(start)]
    states = [FragmentState.starting_at(t) for t in thetas]

    def train() -> None:
        for k, theta in enumerate(thetas):
            step = vector(rng, 0.1)
            fast[k] = fast[k] + step
            theta.add_(tensor(step))

    for _ in range(4):
        train()
        delta = sum(w * (phi - f) for w, f in zip(weights, fast, strict=True)) / sum(weights)
        sent = [rule.at_slot(s, t, phase).z for s, t in zip(states, thetas, strict=True)]
        common = mean_of(sent, weights)
        if overlapped:
            train()
        m = mu * m + delta
        phi = phi - eta * (delta + mu * m)
        merge = alpha if overlapped else 0.0
        fast = [merge * f + (1 - merge) * phi for f in fast]
        for state, theta in zip(states, thetas, strict=True):
            rule.commit(state, theta, common, phase, overlapped=overlapped)
    assert torch.equal(states[0].phi, states[1].phi)
    for state, theta, expected in zip(states, thetas, fast, strict=True):
        assert close(theta, expected)
        assert close(state.phi, phi)
        assert close(state.momentum, m)


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_diloco_every_step_without_momentum_is_averaging(seed: int) -> None:
    rng, phase = np.random.default_rng(seed), Phase(1, 1.0, 0.0)
    rule = DiLoCo(rules_for("diloco", main=phase, codec="exact"))
    start = vector(rng)
    thetas = [tensor(start) for _ in range(4)]
    states = [FragmentState.starting_at(t) for t in thetas]
    for _ in range(3):
        for theta in thetas:
            theta.add_(tensor(vector(rng, 0.1)))
        average = torch.stack([t.double() for t in thetas]).mean(0).numpy()
        common = mean_of(
            [rule.at_slot(s, t, phase).z for s, t in zip(states, thetas, strict=True)], [1.0] * 4
        )
        for state, theta in zip(states, thetas, strict=True):
            rule.commit(state, theta, common, phase)
            assert close(theta, average)


def test_what_a_failed_round_of_diloco_trained_comes_with_the_next() -> None:
    rule, phase = DiLoCo(rules_for("diloco")), Phase(50, 1.0, 0.0)
    theta = torch.zeros(SIZE)
    state = FragmentState.starting_at(theta)
    theta.add_(1.0)
    rule.at_slot(state, theta, phase)
    theta.add_(2.0)
    assert torch.equal(rule.at_slot(state, theta, phase).z, torch.full((SIZE,), -3.0))


def test_allreduce_steps_along_the_weighted_mean_gradient() -> None:
    rule = AllReduce(rules_for("allreduce"))
    gradients = [torch.full((SIZE,), 1.0), torch.full((SIZE,), 5.0)]
    common = mean_of([rule.at_slot(g).z for g in gradients], [3.0, 1.0])
    for gradient in gradients:
        rule.commit(gradient, common)
        assert torch.equal(gradient, torch.full((SIZE,), 2.0))
