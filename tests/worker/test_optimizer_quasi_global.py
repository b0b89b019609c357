"""Quasi-global momentum as the inner optimizer of replicas that gossip, on vectors and over the device."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from starlings_job.exchange_rules import ExchangeRules, rules_for
from starlings_protos.messages import WorkerId
from starlings_worker.core.pairing.work import CommitPair, EncodePair, JudgePair, PairKey, TakeOuterStep
from starlings_worker.flat import Entry, FlatVector
from starlings_worker.optimizers.quasi_global import QuasiGlobalOptimizer
from starlings_worker.pair_device import PairDevice

SHAPES = ((6, 5), (5,), (4, 3))
RATE, DECAY = 0.05, 0.1


def replicas(rules: ExchangeRules, count: int = 2) -> list[tuple[FlatVector, QuasiGlobalOptimizer]]:
    entries = [Entry("layers.0", f"p{number}", shape) for number, shape in enumerate(SHAPES)]
    first = torch.tensor(np.random.default_rng(3).standard_normal(sum(int(np.prod(s)) for s in SHAPES)))
    found = []
    for _ in range(count):
        optimizer = QuasiGlobalOptimizer(rules, DECAY)
        vector = FlatVector("stage:0", entries, optimizer.keeps, torch.device("cpu"))
        vector.parameters.copy_(first)
        found.append((vector, optimizer))
    return found


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_two_replicas_that_gossip_over_the_device_follow_the_paper(kind: Literal["sgd", "adam"]) -> None:
    """Lin et al. 2021, algorithm 1, with decoupled decay for "adam"; three steps between slots, clipped to a half."""
    rules = rules_for("gossip", codec="exact", quasi_global=kind)
    pair = replicas(rules)
    devices = [PairDevice(rules, {0: vector}, optimizer) for vector, optimizer in pair]
    rng = np.random.default_rng(9)
    x = np.stack([vector.parameters.double().numpy() for vector, _ in pair])
    decays = np.concatenate([np.full(int(np.prod(s)), float(len(s) >= 2)) for s in SHAPES])
    before, buffer, first = x.copy(), np.zeros_like(x), np.zeros_like(x)
    mu, beta = rules.quasi_global_mu, rules.quasi_global_beta
    beta1, beta2 = rules.inner_beta1, rules.inner_beta2
    number = 0
    for slot in range(1, 5):
        for _ in range(3):
            number += 1
            gradients = rng.standard_normal(x.shape)
            for (vector, optimizer), gradient in zip(pair, gradients, strict=True):
                vector.gradient.copy_(torch.tensor(gradient))
                optimizer.step(vector, number=number, learning_rate=RATE, clip_factor=0.5)
            g = gradients / 2
            if kind == "sgd":
                x = x - RATE * (beta * buffer + g)
                continue
            x = x * (1 - RATE * DECAY * decays)
            first = beta1 * first + (1 - beta1) * g
            second = beta2 * buffer + (1 - beta2) * g**2
            v = second / (1 - beta2**number)
            # Before gossip was through for the first time.
            buffer = second if slot == 1 else buffer
            x = x - RATE * first / (1 - beta1**number) / (np.sqrt(v) + 1e-8)
        # What came since the last slot began: the average in it, and steps.
        change = before - x
        if kind == "sgd":
            buffer = mu * buffer + (1 - mu) * change / (3 * RATE)
        else:
            buffer = (
                beta2 * buffer + (1 - beta2) * (change / np.linalg.norm(change, axis=1, keepdims=True)) ** 2
            )
        before = x.copy()
        exchange(devices, slot)
        x = np.stack([x.mean(axis=0)] * 2)
        found = np.stack([vector.parameters.double().numpy() for vector, _ in pair])
        assert np.allclose(found, x, rtol=0, atol=5e-6)
    name = "momentum" if kind == "sgd" else "exp_avg_sq"
    kept = np.stack([vector.state[name].double().numpy() for vector, _ in pair])
    assert np.allclose(kept, buffer, rtol=1e-4, atol=1e-6)


def exchange(devices: list[PairDevice], slot: int) -> None:
    """A whole swap of even weights."""
    key = PairKey(0, 0, slot, 0, 100 + slot)
    for device in devices:
        device.execute(TakeOuterStep(0, slot, 0, False, 0))
    for device in devices:
        device.execute(EncodePair(key))
    for one, other in (devices, devices[::-1]):
        assert other.keep(key, {part.name: bytes(part.data) for part in one.outgoing(key)})
    for device in devices:
        judged = device.execute(JudgePair(key, WorkerId("peer")))
        assert not getattr(judged, "refused", "?"), judged
        outcome = device.execute(CommitPair(key, WorkerId("peer"), 0.5))
        assert getattr(outcome, "fraction", 0.0) == 1.0, outcome


def test_with_opposite_gradients_nothing_is_remembered_but_what_both_do() -> None:
    """An own momentum would grow with each step; the common way is none."""
    rules = rules_for("gossip", codec="exact", quasi_global="sgd")
    pair = replicas(rules)
    devices = [PairDevice(rules, {0: vector}, optimizer) for vector, optimizer in pair]
    for slot in range(1, 40):
        for (vector, optimizer), sign in zip(pair, (1.0, -1.0), strict=True):
            vector.gradient.fill_(sign)
            optimizer.step(vector, number=slot, learning_rate=RATE, clip_factor=1.0)
        exchange(devices, slot)
    # Of each slot's change, the last step is the own one, and the average took back the one before.
    for vector, _ in pair:
        assert float(vector.state["momentum"].abs().max()) < 0.2


def test_weights_that_are_new_are_no_change() -> None:
    rules = rules_for("gossip", codec="exact", quasi_global="sgd")
    ((vector, optimizer),) = replicas(rules, 1)
    device = PairDevice(rules, {0: vector}, optimizer)
    vector.gradient.fill_(1.0)
    optimizer.step(vector, number=1, learning_rate=RATE, clip_factor=1.0)
    vector.parameters.add_(100.0)
    device.restart()
    device.execute(TakeOuterStep(0, 1, 0, False, 0))
    assert float(vector.state["momentum"].abs().max()) == 0.0
