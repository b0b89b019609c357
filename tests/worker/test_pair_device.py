"""Pair exchanges on the device: two replicas' vectors, from outer step to commit, over memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from starlings_job.exchange_rules import Phase, rules_for
from starlings_protos.messages import WorkerId
from starlings_worker.core.pairing.work import (
    CommitPair,
    EncodePair,
    JudgePair,
    OuterStepTaken,
    PairCommitted,
    PairEncoded,
    PairFailed,
    PairJudged,
    PairKey,
    TakeOuterStep,
)
from starlings_worker.errors import EngineFault
from starlings_worker.flat import Entry, FlatVector, keeps
from starlings_worker.pair_device import MOMENTUM, WEIGHTS, PairDevice, digest_of

SHAPES = ((7, 5), (5,), (6, 4))
A, B = WorkerId("a"), WorkerId("b")
ETA, MU = 0.7, 0.9


class Pair:
    """Two replicas of stage 3 that begin with equal weights."""

    def __init__(self, seed: int = 0, fragments: int = 1, codec: str = "exact", **changes: object) -> None:
        self.rng = np.random.default_rng(seed)
        rules = rules_for("pairs", fragments=fragments, codec=codec, momentum_codec="exact", **changes)
        entries = [Entry("layers.0", f"p{i}", shape) for i, shape in enumerate(SHAPES)]
        first = self.rng.standard_normal(sum(int(np.prod(shape)) for shape in SHAPES))
        self.vectors = []
        for _ in range(2):
            vector = FlatVector("stage:3", entries, keeps(), torch.device("cpu"))
            vector.parameters.copy_(torch.tensor(first))
            self.vectors.append(vector)
        self.devices = [PairDevice(rules, {3: vector}) for vector in self.vectors]

    def train(self, scale: float = 0.1) -> None:
        for vector in self.vectors:
            vector.parameters += torch.tensor(
                scale * self.rng.standard_normal(vector.size), dtype=torch.float32
            )

    def key(self, slot: int, fragment: int = 0, swap: int = 0) -> PairKey:
        return PairKey(3, fragment, slot, swap, 100 * slot + swap + 1)

    def step(self, slot: int, fragment: int = 0, *, warmup: bool = False, solo_rounds: int = 0) -> None:
        for device in self.devices:
            effect = TakeOuterStep(3, slot, fragment, warmup, solo_rounds)
            assert device.execute(effect) == OuterStepTaken(3, slot)

    def send(self, key: PairKey) -> None:
        for device in self.devices:
            encoded = device.execute(EncodePair(key))
            assert isinstance(encoded, PairEncoded)
            assert encoded.sha256 == digest_of([part.data for part in device.outgoing(key)])
        for one, other in (self.devices, self.devices[::-1]):
            assert other.keep(key, {part.name: bytes(part.data) for part in one.outgoing(key)})

    def commit(self, key: PairKey, weight: float = 0.5) -> list[PairCommitted]:
        outcomes = []
        for device, partner, share in zip(self.devices, (B, A), (weight, 1 - weight), strict=True):
            judged = device.execute(JudgePair(key, partner))
            assert isinstance(judged, PairJudged)
            assert judged.refused == ""
            outcome = device.execute(CommitPair(key, partner, share))
            assert isinstance(outcome, PairCommitted)
            assert outcome.fraction == 1.0
            outcomes.append(outcome)
        return outcomes

    def weights(self) -> np.ndarray:
        return np.stack([vector.parameters.double().numpy() for vector in self.vectors])


def test_two_rounds_equal_the_formulas_of_the_design() -> None:
    """Delta = phi - theta; m = mu m + Delta; z = phi - eta (Delta + mu m); then c = (1 - w) (z_j - z_i)."""
    pair = Pair(seed=4)
    theta = pair.weights()
    phi, m = theta.copy(), np.zeros_like(theta)
    share = np.array([[0.3], [0.7]])
    for slot in range(2):
        before = pair.weights()
        pair.train()
        theta = theta + (pair.weights() - before)
        delta = phi - theta
        m = MU * m + delta
        phi = theta = phi - ETA * (delta + MU * m)
        pair.step(slot)
        pair.send(pair.key(slot))
        # Training goes on until the swap commits.
        before = pair.weights()
        pair.train()
        theta = theta + (pair.weights() - before)
        pair.commit(pair.key(slot), 0.3)
        correction = (1 - share) * (phi[::-1] - phi)
        m = m + (1 - share) * (m[::-1] - m)
        phi, theta = phi + correction, theta + correction
        assert np.allclose(pair.weights(), theta, rtol=0, atol=2e-6)
    # Training was different on both sides, and exchanges brought them together.
    assert 0 < np.abs(theta[0] - theta[1]).max() < 1


@pytest.mark.parametrize("codec", ["exact", "int8:128", "int4:64", "fp16", "bf16", "fp8", "int8:128|zstd"])
def test_the_weighted_mean_is_kept_whatever_the_codec_drops(codec: str) -> None:
    pair = Pair(seed=7, codec=codec)
    pair.train()
    pair.step(0)
    pair.send(pair.key(0))
    before = pair.weights()
    outcomes = pair.commit(pair.key(0), 0.25)
    after = pair.weights()
    assert np.abs(after - before).max() > 0.01, "nothing was averaged"
    assert np.allclose(0.25 * after[0] + 0.75 * after[1], 0.25 * before[0] + 0.75 * before[1], atol=1e-6)
    assert outcomes[0].distance == pytest.approx(outcomes[1].distance, rel=1e-6)
    assert outcomes[0].distance > 0


@pytest.mark.parametrize("fragments", [1, 3])
def test_for_a_while_both_sides_have_their_average_whatever_they_trained_since(fragments: int) -> None:
    pair = Pair(seed=3, fragments=fragments)
    pair.train()
    for fragment in range(fragments):
        pair.step(fragment, fragment)
        pair.send(pair.key(fragment, fragment))
        pair.commit(pair.key(fragment, fragment))
    average = pair.weights()
    assert np.allclose(average[0], average[1], atol=1e-6)
    pair.train()
    trained = pair.weights()
    for device in pair.devices:
        # Of stages that it does not hold: nothing.
        with device.averages([0]):
            assert np.array_equal(pair.weights(), trained)
    with pair.devices[0].averages([2, 3]), pair.devices[1].averages([3]):
        assert np.array_equal(pair.weights(), average)
    assert np.array_equal(pair.weights(), trained)
    with pytest.raises(RuntimeError, match="out of memory"), pair.devices[0].averages([3]):
        raise RuntimeError("out of memory")
    assert np.array_equal(pair.weights(), trained)
    # Displacements are measured from it, as before.
    with pair.devices[1].averages([3]):
        assert np.array_equal(pair.weights()[1], average[1])


def test_fragments_take_turns_and_the_rest_stays_as_it_is() -> None:
    pair = Pair(fragments=3)
    bounds = np.cumsum([0, *(pair.devices[0].elements(3, fragment) for fragment in range(3))])
    assert bounds[-1] == pair.vectors[0].size
    assert pair.devices[0].elements(3, 3) == pair.devices[0].elements(2, 0) == 0
    for slot in range(3):
        pair.train()
        before = pair.weights()
        pair.step(slot, slot)
        pair.send(pair.key(slot, slot))
        pair.commit(pair.key(slot, slot))
        changed = np.flatnonzero((pair.weights() != before).any(axis=0))
        assert (changed.min(), changed.max()) == (bounds[slot], bounds[slot + 1] - 1)


def test_the_second_swap_sends_what_the_first_one_made() -> None:
    pair = Pair()
    pair.train()
    pair.step(0)
    pair.send(pair.key(0))
    pair.commit(pair.key(0), 0.5)
    pair.send(pair.key(0, swap=1))
    assert pair.commit(pair.key(0, swap=1), 0.5)[0].distance < 1e-6


def test_momentum_stays_at_home_in_the_warm_up_and_after_rounds_alone_the_step_is_plain() -> None:
    pair = Pair(main=Phase(50, ETA, MU))
    pair.train()
    trained = pair.weights()
    pair.step(0, warmup=True)
    pair.send(pair.key(0))
    assert [part.name for part in pair.devices[0].outgoing(pair.key(0))] == [WEIGHTS]
    assert np.array_equal(pair.weights(), trained)
    pair.step(1)
    pair.send(pair.key(1))
    assert [part.name for part in pair.devices[0].outgoing(pair.key(1))] == [WEIGHTS, MOMENTUM]
    pair.train()
    trained = pair.weights()
    pair.step(2, solo_rounds=4)
    assert np.array_equal(pair.weights(), trained)


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (1e30, "distance")]
)
def test_nonsense_is_refused_and_named_and_changes_nothing(value: float, said: str) -> None:
    pair = Pair()
    pair.train()
    pair.step(0)
    key = pair.key(0)
    pair.send(key)
    poisoned = {part.name: bytes(part.data) for part in pair.devices[1].outgoing(key)}
    poisoned[WEIGHTS] = np.full(pair.vectors[0].size, value, dtype=np.float32).tobytes()
    pair.devices[0].keep(key, poisoned)
    before = pair.weights()
    judged = pair.devices[0].execute(JudgePair(key, B))
    assert isinstance(judged, PairJudged)
    assert said in judged.refused
    assert isinstance(pair.devices[0].execute(CommitPair(key, B, 0.5)), PairFailed)
    assert np.array_equal(pair.weights(), before)


def test_bytes_of_another_length_are_refused() -> None:
    pair = Pair(codec="int8:128")
    pair.step(0)
    key = pair.key(0)
    pair.send(key)
    pair.devices[0].keep(key, {WEIGHTS: bytes(pair.devices[1].outgoing(key)[0].data)[:-1]})
    judged = pair.devices[0].execute(JudgePair(key, B))
    assert isinstance(judged, PairJudged)
    assert "malformed" in judged.refused


def test_own_weights_that_are_not_finite_are_not_sent() -> None:
    pair = Pair()
    pair.vectors[0].parameters[3] = float("nan")
    pair.step(0)
    failed = pair.devices[0].execute(EncodePair(pair.key(0)))
    assert isinstance(failed, PairFailed)
    assert "own z" in failed.reason


def test_who_comes_back_far_away_is_told_to_copy_state() -> None:
    pair = Pair()
    for slot in range(3):
        pair.train(0.01)
        pair.step(slot)
        pair.send(pair.key(slot))
        pair.commit(pair.key(slot))
    pair.vectors[0].parameters += 0.2
    pair.step(4, solo_rounds=4)
    pair.send(pair.key(4))
    judged = pair.devices[0].execute(JudgePair(pair.key(4), B))
    assert isinstance(judged, PairJudged)
    assert judged.too_far
    assert "usually" in judged.refused


def test_what_was_forgotten_is_not_brought_back() -> None:
    pair = Pair()
    pair.step(0)
    key = pair.key(0)
    device = pair.devices[0]
    device.forget(key)
    assert isinstance(device.execute(EncodePair(key)), PairFailed)
    assert not device.keep(key, {WEIGHTS: b""})
    assert isinstance(device.execute(JudgePair(key, B)), PairFailed)
    assert isinstance(device.execute(CommitPair(key, B, 0.5)), PairFailed)
    assert device.outgoing(key) == ()


def test_other_presets_and_too_many_fragments_are_refused_with_words() -> None:
    vector = FlatVector("stage:0", [Entry("b", "p", (3, 2))], keeps(), torch.device("cpu"))
    with pytest.raises(EngineFault, match="does not exchange in pairs"):
        PairDevice(rules_for("diloco"), {0: vector})
    with pytest.raises(EngineFault, match="fewer fragments"):
        PairDevice(rules_for("pairs", fragments=4), {0: vector})


def test_noloco_goes_the_same_way() -> None:
    """Its split form equals its paper's: tests/worker/test_outer_pairs.py. Here: that it is the rule that is used."""
    pair = Pair()
    rules = rules_for("noloco", codec="exact")
    pair.devices = [PairDevice(rules, {3: vector}) for vector in pair.vectors]
    pair.train()
    pair.step(0)
    pair.send(pair.key(0))
    before = pair.weights()
    pair.commit(pair.key(0))
    after = pair.weights()
    assert np.allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-6)
    assert np.abs(after[0] - after[1]).max() < np.abs(before[0] - before[1]).max()


def test_palsgd_pulls_every_fragment_of_the_stage_towards_its_last_average() -> None:
    """Naganuma et al. 2025, algorithm 1, at r / (1 - p) = lr: theta -= alpha r / p (theta - phi), as often as told."""
    pair = Pair()
    rules = rules_for("palsgd", fragments=2, codec="exact", momentum_codec="exact")
    device = PairDevice(rules, {3: pair.vectors[0]})
    phi = pair.weights()[0]
    pair.train()
    theta = pair.weights()[0]
    rate = 0.3 * (1 - rules.pull_probability)
    for _ in range(3):
        theta = theta - rules.pull * rate / rules.pull_probability * (theta - phi)
    device.pull(2, 3, 0.3)
    device.pull(3, 3, 0.3)
    assert np.allclose(pair.weights()[0], theta, rtol=0, atol=1e-6)
    # After a slot it is the new average that counts.
    device.execute(TakeOuterStep(3, 1, 0, False, 0))
    averaged = pair.weights()[0]
    device.pull(3, 1, 0.3)
    first = device.elements(3, 0)
    assert np.array_equal(pair.weights()[0][:first], averaged[:first])
    assert np.abs(pair.weights()[0][first:] - averaged[first:]).max() > 1e-3
    # Others do not pull.
    before = pair.weights()
    pair.devices[1].pull(3, 3, 0.3)
    assert np.array_equal(pair.weights(), before)


def test_the_first_moment_of_the_fragment_alone_is_forgotten_where_the_rules_say_so() -> None:
    pair = Pair(fragments=2)
    rules = rules_for("pairs", fragments=2, reset_first_moment=True)
    entries = [Entry("layers.0", f"p{i}", shape) for i, shape in enumerate(SHAPES)]
    vector = FlatVector("stage:3", entries, keeps("exp_avg", "exp_avg_sq"), torch.device("cpu"))
    vector.parameters.copy_(pair.vectors[0].parameters)
    for moments in vector.state.values():
        moments.fill_(1.0)
    device = PairDevice(rules, {3: vector})
    device.execute(TakeOuterStep(3, 1, 1, False, 0))
    first = device.elements(3, 0)
    assert vector.state["exp_avg"][:first].eq(1.0).all()
    assert vector.state["exp_avg"][first:].eq(0.0).all()
    assert vector.state["exp_avg_sq"].eq(1.0).all()
    keep = PairDevice(rules_for("pairs", fragments=2), {3: vector})
    keep.execute(TakeOuterStep(3, 1, 0, False, 0))
    assert vector.state["exp_avg"][:first].eq(1.0).all()
