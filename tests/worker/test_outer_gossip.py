"""`gossip` with quasi-global momentum, and `palsgd`, against references written from their papers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_job.exchange_rules import rules_for
from starlings_worker.core.streaming.rules import pulls_before_a_step
from starlings_worker.outer.gossip import (
    WEIGHT_LEAST,
    WEIGHT_MOST,
    Gossip,
    Peers,
    Pushed,
    PushSumState,
    exponential_peers,
)
from starlings_worker.outer.outcome import Average, ImplausibleWeight, NotFinite, OutOfNorm, Refuse
from starlings_worker.outer.palsgd import Palsgd
from starlings_worker.outer.quasi_global import QuasiGlobal, QuasiGlobalState
from starlings_worker.outer.state import FragmentState
from support.outer import SIZE, close, seeds

pytestmark = pytest.mark.usefixtures("small_chunks")

GOSSIP = Gossip(rules_for("gossip"))


def push(rule: Gossip, states: list[PushSumState], thetas: list[torch.Tensor]) -> list[Pushed]:
    sent = [rule.at_slot(s, t) for s, t in zip(states, thetas, strict=True)]
    return [Pushed(p.x.clone(), p.weight) for p in sent]


# ------------------------------------------------------------------ the graph


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_whoever_is_sent_to_receives_from_the_sender(count: int) -> None:
    for step in range(9):
        peers = [exponential_peers(step, place, count) for place in range(count)]
        for place, mine in enumerate(peers):
            assert peers[mine.sends_to].receives_from == place
            assert mine == Peers(place, place) if count == 1 else mine.sends_to != place


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_after_log_n_steps_everybody_has_the_exact_mean(count: int) -> None:
    rng = np.random.default_rng(count)
    thetas = [torch.tensor(rng.standard_normal(SIZE)) for _ in range(count)]
    mean = torch.stack(thetas).mean(0).numpy()
    states = [PushSumState() for _ in thetas]
    for step in range(int(math.log2(count))):
        sent = push(GOSSIP, states, thetas)
        for place, (state, theta) in enumerate(zip(states, thetas, strict=True)):
            source = exponential_peers(step, place, count).receives_from
            assert GOSSIP.commit(state, theta, sent[place], sent[source], Average(1.0))
    for state, theta in zip(states, thetas, strict=True):
        assert close(theta, mean, 1e-12)
        assert state.weight == 1.0


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.5))
def test_lost_messages_leave_weighted_averages_and_replicas_still_agree(seed: int, loss: float) -> None:
    """Assran et al. 2019: what is lost is lost of x and of w alike, so every theta stays between the others'."""
    dice, count = random.Random(seed), 6
    values = [torch.full((SIZE,), float(k)) for k in range(count)]
    states = [PushSumState() for _ in values]
    for step in range(45):
        sent = push(GOSSIP, states, values)
        arrives = [dice.random() >= loss for _ in states]
        for place, (state, theta) in enumerate(zip(states, values, strict=True)):
            source = exponential_peers(step, place, count).receives_from
            GOSSIP.commit(state, theta, sent[place], sent[source] if arrives[source] else None, Average(1.0))
            assert WEIGHT_LEAST <= state.weight <= WEIGHT_MOST
    stacked = torch.stack(values)
    print(f"seed {seed}, loss {loss:.2f}: weights {[round(s.weight, 3) for s in states]}")
    assert bool((stacked > -1e-4).all() & (stacked < count - 1 + 1e-4).all())
    assert float(stacked.max() - stacked.min()) < 0.1


def test_nothing_changes_when_nothing_is_sent_and_nothing_comes() -> None:
    theta, state = torch.arange(5.0), PushSumState(0.75)
    assert not GOSSIP.commit(state, theta, None, None, None)
    assert torch.allclose(theta, torch.arange(5.0))
    assert state.weight == 0.75


@pytest.mark.parametrize(
    ("pushed", "reason"),
    [
        (Pushed(torch.ones(SIZE), 1e9), ImplausibleWeight),
        (Pushed(torch.ones(SIZE), math.nan), ImplausibleWeight),
        (Pushed(torch.ones(SIZE), -1.0), ImplausibleWeight),
        (Pushed(torch.ones(SIZE), 0.0), ImplausibleWeight),
        (Pushed(torch.full((SIZE,), math.nan), 1.0), NotFinite),
        (Pushed(torch.full((SIZE,), 1e30), 1.0), OutOfNorm),
        (Pushed(-torch.ones(SIZE), 1.0), OutOfNorm),
    ],
)
def test_what_cannot_be_right_is_not_taken_and_named(pushed: Pushed, reason: type) -> None:
    state, theta = PushSumState(), torch.ones(SIZE)
    verdict = GOSSIP.judge(state, theta, pushed, "mallory")
    assert isinstance(verdict, Refuse)
    assert verdict.dropped.member == "mallory"
    assert isinstance(verdict.dropped.reason, reason)
    assert not GOSSIP.commit(state, theta, None, pushed, verdict)
    assert torch.equal(theta, torch.ones(SIZE))
    assert isinstance(GOSSIP.judge(state, theta, Pushed(1.2 * torch.ones(SIZE), 1.0), "alice"), Average)


# ------------------------------------------------------------------ quasi-global momentum


@settings(max_examples=10, deadline=None)
@given(seeds, st.floats(0.01, 0.3), st.floats(0.0, 0.95), st.floats(0.0, 0.95))
def test_two_replicas_with_quasi_global_momentum_follow_the_paper(
    seed: int, rate: float, beta: float, mu: float
) -> None:
    rng = np.random.default_rng(seed)
    inner = QuasiGlobal(rules_for("gossip", quasi_global_beta=beta, quasi_global_mu=mu))
    x = [rng.standard_normal(SIZE), rng.standard_normal(SIZE)]
    buffers = [np.zeros(SIZE), np.zeros(SIZE)]
    thetas = [torch.tensor(v) for v in x]
    states, inners = [PushSumState(), PushSumState()], [QuasiGlobalState.starting_at(t) for t in thetas]
    for _ in range(4):
        gradients = [rng.standard_normal(SIZE), rng.standard_normal(SIZE)]
        half = [v - rate * (beta * m + g) for v, m, g in zip(x, buffers, gradients, strict=True)]
        mixed = [(half[0] + half[1]) / 2] * 2
        buffers = [
            mu * m + (1 - mu) * (old - new) / rate for m, old, new in zip(buffers, x, mixed, strict=True)
        ]
        x = mixed
        for state, theta, gradient in zip(inners, thetas, gradients, strict=True):
            inner.step(state, theta, torch.tensor(gradient), rate)
        sent = push(GOSSIP, states, thetas)
        for k in range(2):
            GOSSIP.commit(states[k], thetas[k], sent[k], sent[1 - k], Average(1.0))
            inner.after_gossip(inners[k], thetas[k])
    for theta, state, expected, buffer in zip(thetas, inners, x, buffers, strict=True):
        assert close(theta, expected)
        assert close(state.buffer, buffer)


@settings(max_examples=8, deadline=None)
@given(seeds, st.floats(0.001, 0.1))
def test_quasi_global_adam_follows_its_formula(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    rules = rules_for("gossip", quasi_global="adam")
    inner, beta1, beta2 = QuasiGlobal(rules), rules.inner_beta1, rules.inner_beta2
    x, m, v_hat = rng.standard_normal(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    theta = torch.tensor(x)
    state = QuasiGlobalState.starting_at(theta)
    for t in range(1, 5):
        g, pulled = rng.standard_normal(SIZE), 0.01 * rng.standard_normal(SIZE)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v_hat + (1 - beta2) * g**2
        new = x - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8) + pulled
        d = (x - new) / np.linalg.norm(x - new)
        x, v_hat = new, beta2 * v_hat + (1 - beta2) * d**2
        inner.step(state, theta, torch.tensor(g), rate)
        # What gossip did to the weights.
        theta.add_(torch.tensor(pulled))
        inner.after_gossip(state, theta)
    assert close(theta, x)
    assert close(state.buffer, v_hat)


def test_quasi_global_momentum_forgets_what_gossip_took_back() -> None:
    """Two replicas with opposite gradients: their own momentum would grow apart, the common one is zero."""
    inner = QuasiGlobal(rules_for("gossip"))
    thetas, states = [torch.zeros(SIZE), torch.zeros(SIZE)], [PushSumState(), PushSumState()]
    inners = [QuasiGlobalState.starting_at(t) for t in thetas]
    for _ in range(5):
        for sign, state, theta in zip((1.0, -1.0), inners, thetas, strict=True):
            inner.step(state, theta, torch.full((SIZE,), sign), 0.1)
        sent = push(GOSSIP, states, thetas)
        for k in range(2):
            GOSSIP.commit(states[k], thetas[k], sent[k], sent[1 - k], Average(1.0))
            inner.after_gossip(inners[k], thetas[k])
    for state in inners:
        assert float(state.buffer.abs().max()) < 1e-6


# ------------------------------------------------------------------ palsgd


@settings(max_examples=10, deadline=None)
@given(seeds, st.floats(0.05, 0.9), st.floats(0.0, 1.0), st.floats(0.001, 0.05))
def test_palsgd_pulls_towards_the_last_average_as_its_paper_says(
    seed: int, probability: float, alpha: float, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    rule = Palsgd(rules_for("palsgd", pull_probability=probability, pull=alpha))
    phi = rng.standard_normal(SIZE)
    x, theta = phi.copy(), torch.tensor(phi)
    state = FragmentState.starting_at(theta)
    for dice in rng.random(12):
        gradient = rng.standard_normal(SIZE)
        if dice < probability:
            x = x - alpha * rate / probability * (x - phi) if alpha * rate < probability else phi
        else:
            x = x - rate / (1 - probability) * gradient
        if dice < probability:
            rule.pull(state, theta, rate)
        else:
            theta.sub_(torch.tensor(gradient), alpha=rate * rule.gradient_factor)
    assert close(theta, x)
    assert close(state.phi, phi)


def test_without_a_probability_palsgd_is_pairs() -> None:
    rule = Palsgd(rules_for("palsgd", pull_probability=0.0))
    theta = torch.ones(SIZE)
    state = FragmentState(torch.zeros(SIZE), torch.zeros(SIZE))
    assert pulls_before_a_step(rule.rules, lambda: 0.0) == 0
    assert rule.gradient_factor == 1.0
    rule.pull(state, theta, 0.1)
    assert torch.equal(theta, torch.ones(SIZE))
