"""`pairs` and `noloco` against references written from their papers, and what a swap promises."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression.codec import make_codec
from starlings_job.exchange_rules import Phase, pair_share, rules_for
from starlings_worker.outer.judging import comeback
from starlings_worker.outer.noloco import NoLoCo
from starlings_worker.outer.outcome import (
    Average,
    Dropped,
    ImplausibleWeight,
    NotFinite,
    OutOfNorm,
    Refetch,
    Refuse,
    Verdict,
    WrongShape,
)
from starlings_worker.outer.pairs import Pairs
from starlings_worker.outer.state import FragmentState, Payload, distance
from support.outer import SIZE, close, seeds, tensor, vector

pytestmark = pytest.mark.usefixtures("small_chunks")

PAIRS, NOLOCO = Pairs(rules_for("pairs")), NoLoCo(rules_for("noloco"))
MAIN = PAIRS.rules.main
shares = st.floats(0.02, 0.98)


def copied(payload: Payload) -> Payload:
    return Payload(payload.z.clone(), None if payload.m is None else payload.m.clone())


def through(spec: str, payload: Payload) -> Payload:
    """As it arrives when both vectors travel in that codec."""

    def decoded(value: torch.Tensor) -> torch.Tensor:
        codec = make_codec(spec)
        return codec.decode(codec.encode(value), limit_bytes=4 * SIZE)

    return Payload(decoded(payload.z), None if payload.m is None else decoded(payload.m))


def average(own: Payload, theirs: Payload) -> Verdict:
    return Average(float((own.z - theirs.z).norm()))


class ReferenceReplica:
    """Design and paper formulas, in float64."""

    def __init__(self, start: np.ndarray) -> None:
        self.theta, self.phi, self.m = start.copy(), start.copy(), np.zeros_like(start)

    def pairs_slot(self, eta: float, mu: float) -> None:
        delta = self.phi - self.theta
        self.m = mu * self.m + delta
        self.theta = self.phi = self.phi - eta * (delta + mu * self.m)

    def noloco_round(self, other: ReferenceReplica, alpha: float, beta: float, gamma: float) -> np.ndarray:
        delta = ((self.phi - self.theta) + (other.phi - other.theta)) / 2
        return alpha * self.m - beta * delta - gamma * (self.phi - (self.phi + other.phi) / 2)


@settings(max_examples=15, deadline=None)
@given(seeds, shares, st.floats(0.1, 1.0), st.floats(0.0, 0.95))
def test_two_replicas_of_pairs_follow_the_reference(seed: int, share: float, eta: float, mu: float) -> None:
    rng, phase = np.random.default_rng(seed), Phase(50, eta, mu)
    starts = [vector(rng), vector(rng)]
    expected = [ReferenceReplica(s) for s in starts]
    thetas = [tensor(s) for s in starts]
    states = [FragmentState.starting_at(t) for t in thetas]
    weights = (share, 1 - share)
    for _ in range(4):
        for replica, theta in zip(expected, thetas, strict=True):
            step = vector(rng, 0.1)
            replica.theta = replica.theta + step
            theta.add_(tensor(step))
        for replica in expected:
            replica.pairs_slot(eta, mu)
        sent = [copied(PAIRS.at_slot(s, t, phase)) for s, t in zip(states, thetas, strict=True)]
        # Training goes on between slot and commit.
        for replica, theta in zip(expected, thetas, strict=True):
            step = vector(rng, 0.1)
            replica.theta = replica.theta + step
            theta.add_(tensor(step))
        z, m = [r.phi.copy() for r in expected], [r.m.copy() for r in expected]
        for i, j in ((0, 1), (1, 0)):
            c = (1 - weights[i]) * (z[j] - z[i])
            expected[i].phi, expected[i].theta = expected[i].phi + c, expected[i].theta + c
            if mu > 0:
                expected[i].m = expected[i].m + (1 - weights[i]) * (m[j] - m[i])
            own, theirs = sent[i], sent[j]
            assert PAIRS.commit(states[i], thetas[i], own, theirs, weights[i], average(own, theirs))
    for replica, state, theta in zip(expected, states, thetas, strict=True):
        assert close(theta, replica.theta)
        assert close(state.phi, replica.phi)
        assert close(state.momentum, replica.m, among=replica.phi)


@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.0, 0.7), st.floats(0.1, 1.0), st.floats(0.1, 1.4))
def test_two_replicas_of_noloco_follow_the_paper(seed: int, alpha: float, beta: float, gamma: float) -> None:
    rng, phase = np.random.default_rng(seed), Phase(50, beta, alpha)
    rule = NoLoCo(rules_for("pairs", swaps=1, gamma=gamma))
    starts = [vector(rng), vector(rng)]
    expected = [ReferenceReplica(s) for s in starts]
    # In float64: the paper's differences of small numbers would lose digits in the reference's order too.
    thetas = [torch.tensor(s) for s in starts]
    states = [FragmentState.starting_at(t) for t in thetas]
    for _ in range(3):
        for replica, theta in zip(expected, thetas, strict=True):
            step = vector(rng, 0.1)
            replica.theta = replica.theta + step
            theta.add_(torch.tensor(step))
        a, b = expected
        deltas = a.noloco_round(b, alpha, beta, gamma), b.noloco_round(a, alpha, beta, gamma)
        for replica, delta in zip(expected, deltas, strict=True):
            replica.m = delta
            replica.phi = replica.theta = replica.phi + delta
        sent = [copied(rule.at_slot(s, t, phase)) for s, t in zip(states, thetas, strict=True)]
        for i, j in ((0, 1), (1, 0)):
            assert rule.commit(states[i], thetas[i], sent[i], sent[j], 0.5, average(sent[i], sent[j]))
    for replica, state, theta in zip(expected, states, thetas, strict=True):
        assert close(theta, replica.theta)
        assert close(state.phi, replica.phi)
        assert close(state.momentum, replica.m, among=replica.phi)


@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.1, 1.0), st.floats(0.0, 0.95))
def test_one_replica_alone_is_lookahead_with_nesterov_momentum(seed: int, eta: float, mu: float) -> None:
    """SNOO, algorithm 1: slow weights take a Nesterov step along the displacement, fast weights start from there."""
    rng, phase = np.random.default_rng(seed), Phase(50, eta, mu)
    start = vector(rng)
    theta = tensor(start)
    state = FragmentState.starting_at(theta)
    slow, fast, buffer = start.copy(), start.copy(), np.zeros(SIZE)
    # Not more rounds than those after which a replica alone gives up its momentum.
    for _ in range(PAIRS.rules.solo_rounds_limit):
        step = vector(rng, 0.1)
        theta.add_(tensor(step))
        fast = fast + step
        PAIRS.at_slot(state, theta, phase)
        state.solo_rounds += 1
        gradient = slow - fast
        buffer = mu * buffer + gradient
        slow = slow - eta * (gradient + mu * buffer)
        fast = slow.copy()
        assert close(theta, fast)
        assert torch.equal(theta, state.phi)


@settings(max_examples=10, deadline=None)
@given(seeds, shares, st.sampled_from(["exact", "int8:128", "int4:64"]))
def test_a_committed_swap_keeps_the_weighted_mean_and_the_steps_taken_meanwhile(
    seed: int, share: float, spec: str
) -> None:
    rng = np.random.default_rng(seed)
    thetas = [tensor(vector(rng)), tensor(vector(rng))]
    states = [FragmentState.starting_at(t) for t in thetas]
    for theta in thetas:
        theta.add_(tensor(vector(rng, 0.1)))
    sent = [through(spec, PAIRS.at_slot(s, t, MAIN)) for s, t in zip(states, thetas, strict=True)]
    steps = [tensor(vector(rng, 0.1)), tensor(vector(rng, 0.1))]
    for theta, step in zip(thetas, steps, strict=True):
        theta.add_(step)
    weights = (share, 1 - share)

    def means() -> tuple[torch.Tensor, ...]:
        rows = [[s.phi for s in states], [s.momentum for s in states], thetas]
        return tuple(weights[0] * a.double() + weights[1] * b.double() for a, b in rows)

    before = means()
    for i, j in ((0, 1), (1, 0)):
        assert PAIRS.commit(states[i], thetas[i], sent[i], sent[j], weights[i], average(sent[i], sent[j]))
    for old, new in zip(before, means(), strict=True):
        assert close(new, old.numpy())
    for theta, state, step in zip(thetas, states, steps, strict=True):
        assert close(theta - state.phi, step.double().numpy(), 1e-5)


def test_two_swaps_with_different_partners_average_four_replicas_exactly() -> None:
    rng = np.random.default_rng(3)
    thetas = [torch.tensor(vector(rng)) for _ in range(4)]
    states = [FragmentState.starting_at(t) for t in thetas]
    for state, theta in zip(states, thetas, strict=True):
        theta.add_(torch.tensor(vector(rng, 0.1)))
        PAIRS.at_slot(state, theta, MAIN)
    mean, momentum = torch.stack(thetas).mean(0), torch.stack([s.momentum for s in states]).mean(0)
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        sent = [copied(PAIRS.payload(state, MAIN)) for state in states]
        for i, j in (pair for two in pairs for pair in (two, two[::-1])):
            PAIRS.commit(states[i], thetas[i], sent[i], sent[j], 0.5, average(sent[i], sent[j]))
    for state, theta in zip(states, thetas, strict=True):
        assert close(theta, mean.numpy(), 1e-12)
        assert close(state.momentum, momentum.numpy(), 1e-12)


@settings(max_examples=15, deadline=None)
@given(seeds, shares)
def test_a_one_sided_commit_moves_the_mean_by_at_most_its_bound(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    thetas = [tensor(vector(rng)), tensor(vector(rng))]
    states = [FragmentState.starting_at(t) for t in thetas]
    sent = [through("int8:128", PAIRS.at_slot(s, t, MAIN)) for s, t in zip(states, thetas, strict=True)]
    mean = share * states[0].phi + (1 - share) * states[1].phi
    assert PAIRS.commit(states[0], thetas[0], sent[0], sent[1], share, average(sent[0], sent[1]))
    moved = (share * states[0].phi + (1 - share) * states[1].phi - mean).norm()
    bound = share * (1 - share) * (sent[1].z - sent[0].z).norm()
    assert moved <= bound * (1 + 1e-4) + 1e-6


def test_after_four_rounds_alone_a_replica_keeps_no_momentum_and_steps_by_one() -> None:
    theta = torch.zeros(SIZE)
    state = FragmentState.starting_at(theta)
    for _ in range(PAIRS.rules.solo_rounds_limit):
        assert PAIRS.numbers(state, MAIN) == (0.7, 0.9)
        theta.add_(1.0)
        PAIRS.at_slot(state, theta, MAIN)
        state.solo_rounds += 1
    assert PAIRS.numbers(state, MAIN) == (1.0, 0.0)
    where = theta.add_(0.25).clone()
    PAIRS.at_slot(state, theta, MAIN)
    assert torch.equal(theta, where)
    assert torch.equal(state.phi, where)
    state.solo_rounds = 0
    assert PAIRS.numbers(state, MAIN) == (0.7, 0.9)


def test_momentum_stays_at_home_while_nobody_uses_it() -> None:
    theta = torch.ones(SIZE)
    state = FragmentState.starting_at(theta)
    assert PAIRS.rules.warmup is not None
    assert PAIRS.at_slot(state, theta, PAIRS.rules.warmup).m is None
    assert PAIRS.at_slot(state, theta, MAIN).m is not None


# ------------------------------------------------------------------ partners that cannot be right


def near_pair() -> tuple[FragmentState, torch.Tensor, Payload, Payload]:
    """A replica after a slot, its decoded payload, and that of an honest partner nearby."""
    rng = np.random.default_rng(7)
    theta = tensor(vector(rng))
    state = FragmentState.starting_at(theta)
    theta.add_(tensor(vector(rng, 0.1)))
    own = copied(PAIRS.at_slot(state, theta, MAIN))
    assert own.m is not None
    state.note_distance(0.5)
    return state, theta, own, Payload(own.z + tensor(vector(rng, 0.05)), own.m + tensor(vector(rng, 0.05)))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, -1e30, 1e38])
@pytest.mark.parametrize("field", ["z", "m"])
def test_values_that_cannot_be_right_change_nothing_and_are_named(value: float, field: str) -> None:
    state, theta, own, theirs = near_pair()
    assert theirs.m is not None
    bad = copied(theirs)
    assert bad.m is not None
    (bad.z if field == "z" else bad.m)[5] = value
    before = [t.clone() for t in (theta, state.phi, state.momentum)]
    verdict = PAIRS.judge(state, own, bad, "mallory")
    assert isinstance(verdict, Refuse)
    assert verdict.dropped.member == "mallory"
    assert isinstance(verdict.dropped.reason, NotFinite | OutOfNorm)
    assert not PAIRS.commit(state, theta, own, bad, 0.5, verdict)
    assert all(torch.equal(a, b) for a, b in zip(before, (theta, state.phi, state.momentum), strict=True))
    assert isinstance(PAIRS.judge(state, own, theirs, "alice"), Average)


def test_scaled_and_sign_flipped_weights_are_refused_even_before_a_distance_is_usual() -> None:
    state, _, own, theirs = near_pair()
    state.usual_distance = None
    for bad in (Payload(-theirs.z, theirs.m), Payload(10 * theirs.z, theirs.m)):
        verdict = PAIRS.judge(state, own, bad, "mallory")
        assert isinstance(verdict, Refuse)
        assert isinstance(verdict.dropped.reason, OutOfNorm)
    assert isinstance(PAIRS.judge(state, own, theirs, "alice"), Average)


@pytest.mark.parametrize("claim", [1e9, math.nan, math.inf, -1.0])
def test_a_weight_that_a_partner_claims_is_never_used_and_an_absurd_one_is_named(claim: float) -> None:
    state, _, own, theirs = near_pair()
    verdict = PAIRS.judge(state, own, theirs, "mallory", claimed_weight=claim, ledger_weight=100.0)
    assert isinstance(verdict, Refuse)
    assert isinstance(verdict.dropped.reason, ImplausibleWeight)
    honest = PAIRS.judge(state, own, theirs, "alice", claimed_weight=130.0, ledger_weight=100.0)
    assert isinstance(honest, Average)


def test_another_length_is_refused() -> None:
    state, _, own, theirs = near_pair()
    verdict = PAIRS.judge(state, own, Payload(theirs.z[:-1], None), "mallory")
    assert isinstance(verdict, Refuse)
    assert isinstance(verdict.dropped.reason, WrongShape)
    assert verdict.dropped == Dropped("mallory", verdict.dropped.reason)


def test_who_comes_back_from_far_away_fetches_state() -> None:
    rules = PAIRS.rules
    assert comeback(3.1, 1.0, rules.solo_rounds_limit, rules) == Refetch(3.1, 1.0, rules.solo_rounds_limit)
    assert comeback(2.9, 1.0, rules.solo_rounds_limit, rules) is None
    assert comeback(3.1, 1.0, rules.solo_rounds_limit - 1, rules) is None
    state, theta, own, theirs = near_pair()
    state.usual_distance, state.solo_rounds = 0.01, 4
    verdict = PAIRS.judge(state, own, theirs, "alice")
    assert isinstance(verdict, Refetch)
    before = theta.clone()
    assert not PAIRS.commit(state, theta, own, theirs, 0.5, verdict)
    assert torch.equal(theta, before)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_measuring_a_distance_changes_nothing(kind: torch.dtype) -> None:
    a, b = torch.full((SIZE,), 3.0, dtype=kind), torch.full((SIZE,), 1.0, dtype=kind)
    assert distance(a, b) == pytest.approx(2 * math.sqrt(SIZE))
    assert bool((a == 3).all() & (b == 1).all())


def test_shares_come_from_the_ledger_and_leave_nobody_out() -> None:
    assert pair_share(30, 10) == 0.75
    assert pair_share(0, 0) == 0.5
    assert pair_share(1, 10**9) == 0.01
    assert pair_share(10**9, 1) == 0.99
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="no token counts"):
            pair_share(wrong, 1.0)


# ------------------------------------------------------------------ drops


def spread_after(rule: Pairs | NoLoCo, phase: Phase, drop_rate: float, seed: int, rounds: int) -> float:
    """How far eight replicas are from their mean after rounds in which swaps fail at random and nobody trains."""
    dice = random.Random(seed)
    thetas = [tensor(vector(np.random.default_rng(seed + k))) for k in range(8)]
    states = [FragmentState.starting_at(t) for t in thetas]
    for state in states:
        state.momentum.normal_(generator=torch.Generator().manual_seed(seed))
    for _ in range(rounds):
        sent = [copied(rule.at_slot(s, t, phase)) for s, t in zip(states, thetas, strict=True)]
        order = list(range(8))
        dice.shuffle(order)
        for i, j in zip(order[::2], order[1::2], strict=True):
            if dice.random() < drop_rate:
                continue
            for a, b in ((i, j), (j, i)):
                rule.commit(states[a], thetas[a], sent[a], sent[b], 0.5, average(sent[a], sent[b]))
    stacked = torch.stack(thetas)
    return float((stacked - stacked.mean(0)).norm())


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.6, 0.9]))
def test_averaging_after_a_local_momentum_step_is_stable_at_any_drop_rate(
    seed: int, drop_rate: float
) -> None:
    late, later = (spread_after(PAIRS, MAIN, drop_rate, seed, rounds) for rounds in (25, 60))
    print(f"seed {seed}: {late:.3g} after 25 rounds, {later:.3g} after 60")
    assert later <= late * 1.001 + 1e-5


def test_the_coupled_form_diverges_where_the_rules_refuse_it_and_converges_at_its_default() -> None:
    # Through `pairs` settings, because `noloco` refuses these.
    refused = NoLoCo(rules_for("pairs", swaps=1, gamma=1.0))
    assert spread_after(refused, Phase(50, 0.7, 0.8), 0.5, 3, 60) > 1e2
    assert spread_after(NOLOCO, NOLOCO.rules.main, 0.5, 3, 60) < 0.1
