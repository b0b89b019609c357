"""Group rules against references written from their papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression.codec import make_codec
from starlings_job.exchange_rules import Phase, rules_for
from starlings_worker.outer.allreduce import AllReduce
from starlings_worker.outer.diloco import DiLoCo
from starlings_worker.outer.sparseloco import SparseLoCo
from starlings_worker.outer.state import FragmentState
from starlings_worker.robust import Contribution, aggregate
from support.outer import SIZE, close, seeds, tensor, vector

pytestmark = pytest.mark.usefixtures("small_chunks")


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
        assert close(state.momentum, m, among=phi)


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


def top(values: np.ndarray, kept: int, chunk: int) -> np.ndarray:
    """TopK: of each chunk the `kept` largest magnitudes, the others zero."""
    found = np.zeros_like(values)
    for begin in range(0, len(values), chunk):
        part = values[begin : begin + chunk]
        places = begin + np.argsort(-np.abs(part), kind="stable")[:kept]
        found[places] = values[places]
    return found


@settings(max_examples=10, deadline=None)
@given(seeds, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_sparseloco_follows_its_paper(seed: int, rate: float, decay: float) -> None:
    rng, phase, codec = np.random.default_rng(seed), Phase(30, rate, 0.0), make_codec("topk:3/16")
    rule = SparseLoCo(rules_for("sparseloco", feedback_decay=decay))
    start = vector(rng)
    phi, errors = start.copy(), [np.zeros(SIZE), np.zeros(SIZE)]
    thetas = [tensor(start), tensor(start)]
    states = [FragmentState.starting_at(t, momentum=False) for t in thetas]
    for number in range(4):
        steps = [vector(rng, 0.1), vector(rng, 0.1)]
        for theta, step in zip(thetas, steps, strict=True):
            theta.add_(tensor(step))
        own = []
        for state, theta in zip(states, thetas, strict=True):
            own.append(codec.decode(codec.encode(rule.at_slot(state, theta, phase).z), limit_bytes=4 * SIZE))
        common = mean_of(own, [1.0, 1.0])
        if number == 1:
            # This round fails: nothing changes, and the next one sends what it would have sent.
            before = steps
            continue
        if number == 2:
            steps = [a + b for a, b in zip(before, steps, strict=True)]
        owed = [decay * e - step for e, step in zip(errors, steps, strict=True)]
        # At the places that the codec chose: rounding may decide between two that are all but equal.
        sent = [np.where(q.numpy() != 0, e, 0.0) for q, e in zip(own, owed, strict=True)]
        for chosen, e in zip(sent, owed, strict=True):
            assert np.linalg.norm(chosen) >= np.linalg.norm(top(e, 3, 16)) * (1 - 1e-6)
        errors = [e - q for e, q in zip(owed, sent, strict=True)]
        phi = phi - rate * (sent[0] + sent[1]) / 2
        for state, theta, mine in zip(states, thetas, own, strict=True):
            rule.commit(state, theta, mine, common, phase)
            assert torch.equal(theta, state.phi)
        for state, error in zip(states, errors, strict=True):
            assert close(state.phi, phi)
            assert state.residual is not None
            assert close(state.residual, error, 1e-5)


def test_allreduce_steps_along_the_weighted_mean_gradient() -> None:
    rule = AllReduce(rules_for("allreduce"))
    gradients = [torch.full((SIZE,), 1.0), torch.full((SIZE,), 5.0)]
    common = mean_of([rule.at_slot(g).z for g in gradients], [3.0, 1.0])
    for gradient in gradients:
        rule.commit(gradient, common)
        assert torch.equal(gradient, torch.full((SIZE,), 2.0))
