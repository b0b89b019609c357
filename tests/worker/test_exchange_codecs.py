"""Every codec through whole exchanges: what is dropped comes later, through restarts and changes of membership."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression.codec import make_codec
from starlings_protos.messages import ExchangeHeader, WorkerId
from starlings_worker.boundary import BoundaryCodecs
from starlings_worker.core.events import Direction, Leg
from starlings_worker.exchange import RefusedPart
from starlings_worker.residuals import Residuals
from support.exchange_swarm import GROUP, Swarm

torch.set_num_threads(1)

SPECS = (
    "bf16",
    "int8:128|zstd:3",
    "int4:64",
    "int4:64/means",
    "int2:64",
    "sign:256",
    "topk:64/4096|int2",
    "topk:8/64",
    "randk:64/4096|int8",
    "dct-topk:64/32|sign",
)


def _filled(swarm: Swarm, seed: int) -> torch.Tensor:
    """Random gradients of unlike scales; their sum in float64."""
    generator = torch.Generator().manual_seed(seed)
    for vector in swarm.vectors:
        vector.gradient.normal_(generator=generator)
        vector.gradient[: vector.size // 4] *= 30.0
    return sum(v.gradient.double() for v in swarm.vectors)


@pytest.mark.parametrize("codec", SPECS)
def test_what_was_decoded_and_what_is_owed_add_up_to_all_inputs(codec: str):
    """On all members alike, with another cut in every round, and a member that has nothing to contribute."""
    swarm = Swarm([9000, 1001], 3, codec)
    given_, got = torch.zeros(10_001, dtype=torch.float64), torch.zeros(10_001, dtype=torch.float64)
    cuts = ([1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.0, 0.0, 1.0], [0.6, 0.3, 0.1])
    for step, shares in enumerate(cuts):
        total = _filled(swarm, step)
        weights = [1.0, 1.0, 1.0]
        if step == 3:
            weights[1] = 0.0
            total -= swarm.vectors[1].gradient.double()
        results = swarm.exchange(weights, shares, step)
        assert len(set(results)) == 1
        given_ += total
        got += swarm.vectors[0].gradient.double()
        for vector in swarm.vectors:
            assert torch.equal(vector.gradient, swarm.vectors[0].gradient)
        swarm.commit(step)
        # An owner's residual of elements that it owns no more is lost; contributions' are not.
        if step == 0:
            torch.testing.assert_close(got + swarm.owed(), given_, rtol=0, atol=1e-3)
    scale = float(given_.abs().max())
    owed = swarm.owed()
    lost = float((got + owed - given_).abs().max())
    # What owners dropped, in int8 or better, of cuts that moved away.
    assert lost < 0.03 * scale, f"{codec}: {lost} of {scale} is lost"


def test_the_union_of_sparse_contributions_comes_back_whole():
    swarm = Swarm([8192], 3, "topk:64/4096")
    total = _filled(swarm, 1)
    swarm.exchange([1.0] * 3, [0.5, 0.5, 0.0])
    # What came back plus what contributors kept is everything: owners dropped nothing.
    swarm.commit(0)
    torch.testing.assert_close(swarm.vectors[0].gradient.double() + swarm.owed(), total, rtol=0, atol=1e-4)
    assert 64 * 2 < int(swarm.vectors[0].gradient.count_nonzero()) <= 3 * 64 * 2


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 100), st.integers(1, 3))
def test_attempts_that_were_given_up_leave_no_trace(codec: str, seed: int, failures: int):
    """Also when the members differ from attempt to attempt."""
    tried, calm = Swarm([3000], 2, codec), Swarm([3000], 2, codec)
    for step in range(3):
        for swarm in (tried, calm):
            _filled(swarm, seed + step)
        if step == 1:
            for attempt in range(failures):
                shares = [0.9, 0.1] if attempt % 2 else [0.3, 0.7]
                tried.open(tried.group([1.0, 1.0], shares), step, attempt)
                for buffers in tried.buffers:
                    buffers.clear(step, attempt + 1)
            group = tried.group([1.0, 1.0], [0.5, 0.5])
            tried.open(group, step, failures)
            tried.contribute(group, step, failures)
            results = tried.aggregate(group, step, failures)
        else:
            results = tried.exchange([1.0, 1.0], [0.5, 0.5], step)
        assert results == calm.exchange([1.0, 1.0], [0.5, 0.5], step)
        for swarm in (tried, calm):
            swarm.commit(step)


def test_a_newcomer_replays_what_travelled_in_the_return_codec():
    swarm = Swarm([6000], 2, "topk:64/4096|int2")
    _filled(swarm, 3)
    swarm.exchange([1.0, 1.0], [0.5, 0.5])
    update = swarm.buffers[0].updates(0)
    assert {part.codec for part in update[GROUP]} == {"topk:128/4096|int8:128"}
    newcomer = Swarm([6000], 1, "topk:64/4096|int2")
    newcomer.buffers[0].replay(update)
    assert torch.equal(newcomer.vectors[0].gradient, swarm.vectors[0].gradient)
    other = Swarm([6000], 1, "int8:128")
    with pytest.raises(RefusedPart, match="is encoded as topk"):
        other.buffers[0].replay(update)


def test_each_leg_takes_its_own_codec():
    buffers = Swarm([100], 1, "topk:64/4096|int2").buffers[0]
    assert buffers.takes(Leg.CONTRIBUTION, "topk:64/4096|int2:64")
    assert not buffers.takes(Leg.AGGREGATE, "topk:64/4096|int2:64")
    assert buffers.takes(Leg.AGGREGATE, "topk:192/4096|int8:128")
    assert not buffers.takes(Leg.CONTRIBUTION, "topk:192/4096|int8:128")
    for leg in Leg:
        assert buffers.takes(leg, "exact")
        assert not buffers.takes(leg, "int4:64")


def test_an_aggregate_in_another_codec_names_its_owner():
    """The codec of a return leg depends on the number of contributors, which a receiver knows only once it is open."""
    swarm = Swarm([4096], 2, "topk:64/4096|int2")
    group = swarm.group([1.0] * 2, [0.5, 0.5])
    _filled(swarm, 1)
    swarm.open(group)
    swarm.contribute(group)
    for buffers in swarm.buffers:
        buffers.reduce(0, 0, GROUP)
    wrong = make_codec("topk:192/4096|int8:128").encode(torch.randn(2048))
    swarm.buffers[0].keep(Leg.AGGREGATE, ExchangeHeader(0, 0, GROUP, 1, 1), WorkerId("w1"), wrong)
    with pytest.raises(RefusedPart, match="expected topk:128/4096") as refused:
        swarm.buffers[0].assemble(0, 0, GROUP)
    assert refused.value.culprit == "w1"


def test_residuals_follow_the_elements_through_a_new_cut():
    codec = make_codec("int8:128")
    residuals = Residuals(GROUP, torch.device("cpu"))
    values = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    residuals.cut(codec, {0: (0, 512), 1: (512, 1000)})
    for part, (begin, end) in {0: (0, 512), 1: (512, 1000)}.items():
        residuals.of(part).encode(values[begin:end])
    residuals.commit()
    before = torch.cat([residuals.of(part).residual for part in (0, 1)])
    assert float(before.abs().max()) > 0
    kept = residuals.of(0)
    residuals.cut(codec, {0: (0, 512), 1: (512, 1000)})
    assert residuals.of(0) is kept
    residuals.cut(codec, {0: (0, 128), 2: (128, 896), 3: (896, 1000)})
    after = torch.cat([residuals.of(part).residual for part in (0, 2, 3)])
    assert torch.equal(before, after)
    # Only the overlap of what is left; as long as that is not committed, nothing is lost.
    residuals.cut(codec, {1: (256, 384)})
    assert torch.equal(residuals.of(1).residual, before[256:384])
    residuals.cut(codec, {0: (0, 512), 1: (512, 1000)})
    assert residuals.of(0) is kept
    residuals.cut(codec, {1: (256, 384)})
    residuals.commit()
    residuals.cut(codec, {0: (0, 512)})
    assert torch.equal(residuals.of(0).residual[256:384], before[256:384])
    assert int(residuals.of(0).residual.count_nonzero()) <= 128
    residuals.reset()
    assert residuals.owed() == []


def test_boundary_codecs_go_by_direction_and_size():
    codecs = BoundaryCodecs("fp8")
    assert codecs.of(Direction.FORWARD, (4, 64, 64)).spec.text == "fp8:128"
    assert codecs.of(Direction.BACKWARD, (4, 64, 64)).spec.text == "fp8-e5m2:128"
    assert codecs.of(Direction.BACKWARD, (1, 8, 64)).spec.text == "exact"
    assert {BoundaryCodecs("int8").of(d, (4, 64, 64)).spec.text for d in Direction} == {"int8:128"}


def test_state_travels_exactly_whatever_the_codec():
    swarm = Swarm([300], 2, "topk:8/64|int2", ("exp_avg",))
    _filled(swarm, 1)
    swarm.open(swarm.group([0.5, 0.5], [0.5, 0.5]), state=True)
    sent = swarm.buffers[0].outgoing(Leg.CONTRIBUTION, ExchangeHeader(0, 0, GROUP, 1, 1))
    assert sent is not None
    assert sent[0] == "exact"
