"""Error feedback: nothing is lost over committed rounds, and rounds that did not commit leave no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError
from starlings_compression.feedback import ErrorFeedback
from starlings_compression.state import CodecState

LIMIT = 1 << 20


def inputs(seed: int, count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10.0 ** (-i % 4) for i in range(count)]


@given(
    st.integers(0, 1000),
    st.lists(st.sampled_from(["commit", "rollback", "again"]), min_size=1, max_size=20),
    st.sampled_from(
        ["int8:128", "fp16", "int4:8/means", "sign:8", "topk:3/16|int2:8", "randk:4/32", "dct-topk:8/5"]
    ),
    st.integers(1, 400),
)
@settings(max_examples=40, deadline=None)
def test_committed_outputs_and_residual_add_up_to_committed_inputs(
    seed: int, outcomes: list[str], spec: str, size: int
) -> None:
    codec = make_codec(spec)
    feedback = ErrorFeedback(codec)
    sum_in = torch.zeros(size, dtype=torch.float64)
    sum_out = torch.zeros(size, dtype=torch.float64)
    # A round adds the residual and subtracts what was sent, each rounded to float32: per element, at most one part in
    # 2^24 of what takes part. Large values of opposite sign may add up to nearly nothing, so the sum is no measure.
    bound = torch.full((size,), 1e-12, dtype=torch.float64)
    for tensor, outcome in zip(inputs(seed, len(outcomes), size), outcomes, strict=True):
        data = feedback.encode(tensor)
        if outcome == "commit":
            feedback.commit()
            decoded = codec.decode(data, limit_bytes=LIMIT).double()
            assert feedback.residual is not None
            sum_in += tensor.double()
            sum_out += decoded
            bound += 2.0**-22 * (tensor.double().abs() + decoded.abs() + feedback.residual.double().abs())
        elif outcome == "rollback":
            feedback.rollback()
    residual = feedback.residual
    total = sum_out + (0.0 if residual is None else residual.double())
    assert bool(((total - sum_in).abs() <= bound).all())


@pytest.mark.parametrize(
    "spec", ["int8:64", "topk:5/64|int2:8", "lowrank:1|int8:8", "randk:4/32", "dct-topk:8/5|sign"]
)
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
def test_the_recurrence_holds_exactly(spec: str, decay: float) -> None:
    """residual' = decay * residual + input - decoded, in float32."""
    codec, state = make_codec(spec), CodecState()
    feedback = ErrorFeedback(codec, decay)
    residual = torch.zeros(20, 10)
    for tensor in inputs(1, 10, 200):
        tensor = tensor.view(20, 10)
        data = feedback.encode(tensor)
        feedback.commit()
        corrected = tensor.clone().add_(residual, alpha=decay)
        assert data == codec.encode(corrected, state)
        state.commit()
        residual = corrected - codec.decode(data, limit_bytes=LIMIT)
        assert feedback.residual is not None
        assert torch.equal(feedback.residual, residual)


@pytest.mark.parametrize("spec", ["int8:128", "lowrank:2", "randk:4/32"])
def test_rollback_restores_and_encoding_again_repeats_the_bytes(spec: str) -> None:
    feedback = ErrorFeedback(make_codec(spec), seed=3)
    first, second = (tensor.view(20, 15) for tensor in inputs(2, 2, 300))
    feedback.encode(first)
    feedback.commit()
    before = feedback.residual
    assert before is not None
    before = before.clone()
    data = feedback.encode(second)
    feedback.rollback()
    assert feedback.residual is not None
    assert torch.equal(feedback.residual, before)
    assert feedback.encode(second) == data
    # A new attempt replaces one that was neither committed nor rolled back.
    assert feedback.encode(second) == data
    feedback.rollback()
    feedback.commit()
    assert torch.equal(feedback.residual, before)


def test_a_refused_input_changes_nothing() -> None:
    feedback = ErrorFeedback(make_codec("int8:128"))
    feedback.encode(inputs(3, 1, 50)[0])
    feedback.commit()
    before = feedback.residual
    with pytest.raises(CodecError, match="stage:1: NaN"):
        feedback.encode(torch.full((50,), float("nan")), name="stage:1")
    feedback.commit()
    assert feedback.residual is before
    with pytest.raises(ValueError, match="shape"):
        feedback.encode(torch.zeros(51))
    feedback.reset()
    feedback.encode(torch.zeros(51))


def test_feedback_beats_none_on_a_small_steady_signal() -> None:
    """A signal below half a step beside a large value is lost for ever without feedback, and arrives with
    it.
    """
    signal = torch.full((128,), 0.001)
    signal[0] = 1.0
    codec = make_codec("int8:128")
    feedback = ErrorFeedback(codec)
    received, plain = torch.zeros(128), torch.zeros(128)
    for _ in range(100):
        received += codec.decode(feedback.encode(signal), limit_bytes=LIMIT)
        feedback.commit()
        plain += codec.decode(codec.encode(signal), limit_bytes=LIMIT)
    assert float(plain[5]) == 0.0
    assert float(received[5]) == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize(
    "spec", ["int2", "sign", "topk:4/64|sign:8", "randk:4/64", "dct-topk:8/6|sign", "lowrank:1"]
)
def test_a_steady_signal_arrives_through_any_codec(spec: str) -> None:
    """What is left of the sum after 100 rounds is a bounded residual, however little each round carries."""
    signal = torch.randn(64, 8, generator=torch.Generator().manual_seed(4))
    codec = make_codec(spec)
    feedback = ErrorFeedback(codec)
    received = torch.zeros_like(signal)
    for _ in range(100):
        received += codec.decode(feedback.encode(signal), limit_bytes=LIMIT)
        feedback.commit()
    assert float((received / 100 - signal).norm() / signal.norm()) < 0.25


def test_lossless_codecs_keep_no_residual() -> None:
    feedback = ErrorFeedback(make_codec("exact"))
    tensor = inputs(4, 1, 10)[0].double()
    data = feedback.encode(tensor)
    feedback.commit()
    assert feedback.residual is None
    assert torch.equal(make_codec("exact").decode(data, limit_bytes=LIMIT), tensor)


def test_low_precision_input_is_corrected_in_float32() -> None:
    feedback = ErrorFeedback(make_codec("int8:128"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        data = feedback.encode(inputs(5, 1, 64)[0].to(dtype))
        feedback.commit()
        assert make_codec("int8:128").decode(data, limit_bytes=LIMIT).dtype == torch.float32
    assert feedback.residual is not None
    assert feedback.residual.dtype == torch.float32


def test_integers_are_refused_as_by_the_codec() -> None:
    with pytest.raises(CodecError, match="ids: int8:128 takes floating-point"):
        ErrorFeedback(make_codec("int8:128")).encode(torch.arange(5), name="ids")


def test_the_input_is_not_changed() -> None:
    feedback = ErrorFeedback(make_codec("int8:128"))
    tensor = inputs(6, 1, 64)[0]
    copy = tensor.clone()
    for _ in range(2):
        feedback.encode(tensor)
        feedback.commit()
    assert torch.equal(tensor, copy)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_decay_is_checked(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        ErrorFeedback(make_codec("fp16"), decay)


def test_after_two_rounds_no_more_memory_is_taken() -> None:
    feedback = ErrorFeedback(make_codec("int8:128"))
    places = set()
    for number, tensor in enumerate(inputs(7, 8, 1000)):
        feedback.encode(tensor)
        if number % 3 == 2:
            feedback.rollback()
        feedback.commit()
        assert feedback.residual is not None
        places.add(feedback.residual.data_ptr())
    assert len(places) == 2
    # A codec that refuses leaves both where they are.
    with pytest.raises(CodecError):
        feedback.encode(torch.full((1000,), float("inf")))
    feedback.encode(inputs(8, 1, 1000)[0])
    feedback.commit()
    assert feedback.residual is not None
    assert feedback.residual.data_ptr() in places
