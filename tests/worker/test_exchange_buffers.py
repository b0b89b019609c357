"""Whole exchanges over an in-memory transport: equal to the plain weighted sum, the same bits everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression.codec import make_codec
from starlings_protos.messages import ExchangeHeader, ExchangePurpose
from starlings_worker.core.events import Leg
from starlings_worker.exchange import RefusedPart
from support.exchange_swarm import GROUP, Swarm

torch.set_num_threads(1)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[int], list[float], list[float], int]:
    # Also tensors far larger and far smaller than a part, and none at all.
    sizes = draw(st.lists(st.sampled_from([0, 1, 7, 127, 128, 129, 1000, 20_000]), max_size=8))
    count = draw(st.integers(1, 5))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, 3.0]), min_size=count, max_size=count))
    weights[draw(st.integers(0, count - 1))] = 1.0
    raw = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=count, max_size=count))
    if not any(raw):
        raw[0] = 1.0
    return sizes, weights, [r / sum(raw) for r in raw], draw(st.integers(0, 1000))


@settings(max_examples=40, deadline=None)
@given(_cases(), st.sampled_from(["exact", "fp16", "int8:128"]))
def test_the_aggregate_is_the_weighted_sum_of_every_element(case, codec: str):
    sizes, weights, shares, seed = case
    swarm = Swarm(sizes, len(weights), codec)
    generator = torch.Generator().manual_seed(seed)
    for vector in swarm.vectors:
        vector.gradient.normal_(generator=generator)
    expected = sum(w * v.gradient.double() for w, v in zip(weights, swarm.vectors, strict=True))
    if len(weights) == 1:
        expected = swarm.vectors[0].gradient.double()
    results = swarm.exchange(weights, shares)
    assert len(set(results)) == 1
    for vector in swarm.vectors:
        assert torch.equal(vector.gradient, swarm.vectors[0].gradient)
    tolerance = {"exact": 1e-5, "fp16": 5e-2, "int8:128": 0.5}[codec]
    torch.testing.assert_close(swarm.vectors[0].gradient.double(), expected, rtol=0, atol=tolerance)
    norm = float(swarm.vectors[0].gradient.double().square().sum())
    assert results[0][1] == pytest.approx(norm, rel=1e-9)


def test_error_feedback_makes_a_lossy_mean_right_over_time():
    swarm = Swarm([4096], 3, "int8:64")
    gradients = [torch.randn(4096, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    total = torch.zeros(4096)
    rounds = 40
    for step in range(rounds):
        for vector, gradient in zip(swarm.vectors, gradients, strict=True):
            vector.gradient.copy_(gradient)
        swarm.exchange([1.0] * 3, [1 / 3] * 3, step)
        total += swarm.vectors[0].gradient
        swarm.commit(step)
    one_round = float(sum(g.abs().max() for g in gradients)) / 127
    assert float((total / rounds - sum(gradients)).abs().max()) < one_round / 5


def test_a_restarted_attempt_sends_the_same_bytes_as_if_the_first_had_never_been():
    """Codec state is transactional: an attempt that was not applied leaves no residual."""
    swarm = Swarm([1000], 2, "int8:128")
    group = swarm.group([1.0, 1.0], [0.5, 0.5])
    header = ExchangeHeader(0, 1, GROUP, 1, 1)
    for vector in swarm.vectors:
        vector.gradient.normal_(generator=torch.Generator().manual_seed(1))
    swarm.open(group)
    swarm.contribute(group)
    for buffers in swarm.buffers:
        buffers.clear(0, 1)
    assert swarm.buffers[0].outgoing(Leg.CONTRIBUTION, ExchangeHeader(0, 0, GROUP, 1, 1)) is None
    swarm.open(group, attempt=1)
    again = swarm.buffers[0].outgoing(Leg.CONTRIBUTION, header)
    fresh = Swarm([1000], 2, "int8:128")
    fresh.vectors[0].gradient.normal_(generator=torch.Generator().manual_seed(1))
    fresh.buffers[0].open(0, 1, group, ExchangePurpose.GRADIENT, 0)
    first = fresh.buffers[0].outgoing(Leg.CONTRIBUTION, header)
    assert again is not None
    assert first is not None
    assert bytes(again[2]) == bytes(first[2])


@pytest.mark.parametrize("codec", ["exact", "int8:128"])
def test_a_contribution_that_is_not_finite_is_refused_and_named(codec: str):
    swarm = Swarm([512], 3, codec)
    swarm.vectors[2].gradient[5] = float("nan")
    group = swarm.group([1.0] * 3, [1 / 3] * 3)
    with pytest.raises(RefusedPart) as refused:
        swarm.open(group)
    assert refused.value.culprit == "w2"
    # A peer that does not check itself is caught by the owner of the part.
    swarm = Swarm([512], 2, codec)
    group = swarm.group([1.0] * 2, [0.5, 0.5])
    swarm.open(group)
    swarm.contribute(group)
    header = ExchangeHeader(0, 0, GROUP, 0, 1)
    swarm.buffers[0].keep(Leg.CONTRIBUTION, header, swarm.ids[1], b"\xff" * 1024)
    with pytest.raises(RefusedPart) as refused:
        swarm.buffers[0].reduce(0, 0, GROUP)
    assert refused.value.culprit == "w1"


def test_a_malformed_aggregate_names_the_parts_owner():
    swarm = Swarm([512], 2, "exact")
    group = swarm.group([1.0] * 2, [0.5, 0.5])
    swarm.open(group)
    swarm.contribute(group)
    swarm.buffers[0].reduce(0, 0, GROUP)
    swarm.buffers[0].keep(Leg.AGGREGATE, ExchangeHeader(0, 0, GROUP, 1, 1), swarm.ids[1], b"short")
    with pytest.raises(RefusedPart) as refused:
        swarm.buffers[0].assemble(0, 0, GROUP)
    assert refused.value.culprit == "w1"


def test_the_state_is_averaged_exactly_with_its_optimizer():
    swarm = Swarm([300, 5], 2, "int8:128", ("exp_avg", "exp_avg_sq"))
    for number, vector in enumerate(swarm.vectors):
        for tensor in (vector.parameters, *vector.state.values()):
            tensor.normal_(generator=torch.Generator().manual_seed(number))
    expected = sum(v.whole_state() * 0.5 for v in swarm.vectors)
    group = swarm.group([0.5, 0.5], [0.5, 0.5])
    swarm.open(group, state=True)
    swarm.contribute(group)
    swarm.aggregate(group)
    for buffers, vector in zip(swarm.buffers, swarm.vectors, strict=True):
        buffers.adopt()
        assert torch.equal(vector.whole_state(), expected)


def test_nothing_is_kept_after_a_step():
    swarm = Swarm([2000], 3, "exact")
    for step in range(5):
        for vector in swarm.vectors:
            vector.gradient.fill_(float(step))
        swarm.exchange([1.0] * 3, [1 / 3] * 3, step)
        for buffers in swarm.buffers:
            buffers.commit(step)
            assert not buffers._open
            assert not buffers._arrived


def test_what_an_owner_adds_to_its_own_part_is_rounded_once_only():
    """As a part of the sum, and not before; and it owes nothing for it."""
    swarm = Swarm([4096], 2, "int8:128")
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    swarm.vectors[0].gradient.copy_(values)
    swarm.exchange([1.0, 1.0], [1.0, 0.0])
    codec = make_codec("int8:128")
    assert torch.equal(
        swarm.vectors[1].gradient, codec.decode(codec.encode(values), limit_bytes=4 * values.numel())
    )
    swarm.commit(0)
    torch.testing.assert_close(
        swarm.vectors[1].gradient.double() + swarm.owed(), values.double(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("codec", ["exact", "int8:128"])
def test_what_late_joiners_are_given_outlives_the_step(codec: str):
    swarm = Swarm([3000], 2, codec)
    for number, vector in enumerate(swarm.vectors):
        vector.gradient.normal_(generator=torch.Generator().manual_seed(number))
    swarm.exchange([1.0, 1.0], [0.5, 0.5])
    gradient = swarm.vectors[0].gradient.clone()
    updates = [buffers.updates(0) for buffers in swarm.buffers]
    for vector in swarm.vectors:
        vector.gradient.zero_()
    swarm.commit(0)
    for update in updates:
        newcomer = Swarm([3000], 1, codec)
        newcomer.buffers[0].replay(update)
        assert torch.equal(newcomer.vectors[0].gradient, gradient)
