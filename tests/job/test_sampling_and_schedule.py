"""Order of samples and learning rates: pure, seeded, without gaps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_job.sampling import epochs_of_step, permuted, samples_of_step
from starlings_job.schedule import learning_rate, warmup_steps
from starlings_job.sections import TrainSection


@given(st.binary(min_size=1, max_size=32), st.integers(1, 300))
def test_the_walk_is_a_permutation(key: bytes, population: int) -> None:
    assert sorted(permuted(key, i, population) for i in range(population)) == list(range(population))


@given(st.integers(0, 2**63 - 1), st.integers(1, 97), st.integers(1, 40))
def test_epochs_use_every_sample_once(seed: int, population: int, batch: int) -> None:
    steps = 3 * population // batch + 1
    used: list[tuple[int, int]] = []
    for step in range(steps):
        samples = samples_of_step(seed, population, step, batch)
        used += zip(epochs_of_step(population, step, batch), samples, strict=True)
    assert len(set(used)) == len(used) == steps * batch
    whole = Counter(epoch for epoch, _ in used)
    assert [whole[e] for e in range(max(whole))] == [population] * max(whole)


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    first = samples_of_step(7, 1000, 0, 1000)
    assert first == samples_of_step(7, 1000, 0, 1000)
    assert first != samples_of_step(8, 1000, 0, 1000)
    assert first != samples_of_step(7, 1000, 1, 1000)
    # Frozen: a swarm of several versions must derive the same order.
    assert samples_of_step(7, 1000, 0, 5) == (98, 745, 18, 346, 754)
    assert sum(abs(a - b) > 1 for a, b in pairwise(first)) > 950


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        samples_of_step(0, 0, 0, 4)
    with pytest.raises(ValueError, match="not in a population"):
        permuted(b"k", 5, 5)


def test_warm_up_then_cosine() -> None:
    train = TrainSection(lr=1.0, warmup=10, lr_end=0.1)
    rates = [learning_rate(train, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert learning_rate(train, 1000, 100) == pytest.approx(0.1)


def test_warm_up_as_a_fraction_and_without_decay() -> None:
    train = TrainSection(lr=2.0, warmup=0.05, decay="none")
    assert warmup_steps(train, 200) == 10
    assert learning_rate(train, 199, 200) == 2.0
    assert learning_rate(TrainSection(warmup=0.0), 0, 10) == pytest.approx(1e-3)
    # A job shorter than its warm-up still has rates above zero.
    assert learning_rate(TrainSection(lr=1.0, warmup=50), 0, 5) == pytest.approx(0.2)
