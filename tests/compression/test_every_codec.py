"""What holds for every codec and composition: sizes, types, refusals, determinism, buffers, memory."""

from __future__ import annotations

import pytest
import torch

from codec_cases import EVERY, FLOATS, LIMIT, LOSSY, normal, round_trip
from starlings_compression.codec import decode_any, make_codec
from starlings_compression.errors import CodecError
from starlings_compression.families import FAMILIES
from starlings_compression.sizes import size_estimate
from starlings_compression.spec import parse_spec
from starlings_compression.state import CodecState
from starlings_compression.tensors import CHUNK_ELEMENTS

SHAPES = (
    (), (0,), (1,), (2,), (7,), (8,), (9,), (129,), (1023,), (1025,), (4097,), (3, 5, 7), (2, 0, 4), (0, 3), (40, 50),
    (1, 300), (300, 1), (65, 129), (1, 1, 1, 1, 1, 1, 1, 9),
)  # fmt: skip


def test_the_list_has_every_family_and_flag() -> None:
    names = {(element.name, element.flag) for spec in EVERY for element in parse_spec(spec).elements}
    assert names == {(f.name, flag) for f in FAMILIES.values() for flag in {"", f.flag}} - {("", "")}
    assert [parse_spec(spec).text for spec in EVERY] == list(EVERY)


@pytest.mark.parametrize("spec", EVERY)
def test_every_shape_and_type_comes_back_in_the_estimated_size(spec: str) -> None:
    codec = make_codec(spec)
    for shape in SHAPES:
        for dtype in FLOATS:
            tensor = normal(*shape, seed=len(shape), dtype=dtype)
            data = codec.encode(tensor)
            estimate = size_estimate(spec, shape, item_bytes=tensor.element_size())
            assert estimate.least_bytes <= len(data) <= estimate.most_bytes
            assert codec.spec.sized_by_data or len(data) == estimate.likely_bytes
            decoded = codec.decode(data, limit_bytes=tensor.numel() * tensor.element_size())
            assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
            assert bool(torch.isfinite(decoded).all())
            if codec.lossless:
                assert torch.equal(decoded, tensor)


@pytest.mark.parametrize("spec", EVERY)
def test_no_tensor_becomes_larger_by_decoding(spec: str) -> None:
    """What is dropped is at most the tensor itself: without that error feedback would grow without bound."""
    for tensor in (normal(5000), normal(80, 90), normal(5000) ** 5, torch.full((5000,), -0.37)):
        error = round_trip(make_codec(spec), tensor) - tensor
        assert float(error.norm()) <= float(tensor.norm()) * 1.0001


@pytest.mark.parametrize("spec", EVERY)
def test_zero_constant_and_one_hot_tensors(spec: str) -> None:
    codec = make_codec(spec)
    for dtype in FLOATS:
        for shape in ((300,), (70, 90)):
            zeros = torch.zeros(shape, dtype=dtype)
            assert int(torch.count_nonzero(round_trip(codec, zeros))) == 0
            round_trip(codec, torch.full(shape, -0.37, dtype=dtype))
            zeros.view(-1)[70] = 3.0
            round_trip(codec, zeros)


@pytest.mark.parametrize("spec", EVERY)
def test_the_ends_of_every_type_stay_finite(spec: str) -> None:
    codec = make_codec(spec)
    for dtype in FLOATS:
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        for value in (largest, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 4):
            for shape in ((160,), (64, 80)):
                tensor = torch.full(shape, value, dtype=dtype)
                # Rows that are and are not orthogonal to each other, and to the cosines.
                tensor.view(-1)[::3] *= -1
                tensor.view(-1)[1::7] = 0
                decoded = round_trip(codec, tensor).double().abs()
                assert float(decoded.max()) <= 4.0 * value + 2.0**-126
                if value == largest and "randk" not in spec and "|" not in spec:
                    assert float(decoded.max()) >= 0.05 * value


@pytest.mark.parametrize("spec", EVERY)
def test_an_outlier_does_not_overflow(spec: str) -> None:
    for outlier in (1e9, 1e30, -3e38):
        tensor = normal(64, 70)
        tensor[5, 6] = outlier
        decoded = round_trip(make_codec(spec), tensor)
        if "int2" not in spec and spec.startswith(
            ("topk", "int8", "exact", "fp16", "bf16", "int4:64", "fp8")
        ):
            assert float(decoded[5, 6]) == pytest.approx(outlier, rel=0.15)


@pytest.mark.parametrize("spec", EVERY)
def test_non_contiguous_input(spec: str) -> None:
    codec = make_codec(spec)
    base = normal(64, 48)
    for tensor in (base.t(), base[::3, 1::2], base[:, :1].expand(64, 48), base[5], base.t()[3:9]):
        assert codec.encode(tensor) == codec.encode(tensor.contiguous())


@pytest.mark.parametrize("spec", EVERY)
def test_nan_and_infinity_are_refused_with_the_name(spec: str) -> None:
    codec = make_codec(spec)
    for dtype in FLOATS:
        for bad in (float("nan"), float("inf"), -float("inf")):
            for shape in ((300,), (20, 30)):
                for position in (0, 130, 299):
                    tensor = normal(*shape, dtype=dtype)
                    tensor.view(-1)[position] = bad
                    with pytest.raises(CodecError, match=r"layers\.3\.weight: NaN or infinite"):
                        codec.encode(tensor, name="layers.3.weight")


@pytest.mark.parametrize("spec", LOSSY)
def test_float64_beyond_float32_is_refused_or_kept(spec: str) -> None:
    tensor = torch.full((20, 30), 1e300, dtype=torch.float64)
    try:
        decoded = round_trip(make_codec(spec), tensor)
    except CodecError:
        return
    assert set(decoded.unique().tolist()) <= {0.0, 1e300}


@pytest.mark.parametrize("spec", LOSSY)
def test_lossy_codecs_refuse_integers(spec: str) -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(CodecError, match="use exact"):
            make_codec(spec).encode(torch.ones(4).to(dtype))


@pytest.mark.parametrize("spec", EVERY)
def test_tensors_that_no_codec_takes(spec: str) -> None:
    for tensor in (
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        torch.ones((1,) * 9),
    ):
        with pytest.raises(CodecError, match="odd one"):
            make_codec(spec).encode(tensor, name="odd one")


@pytest.mark.parametrize("spec", EVERY)
def test_parameters_that_require_gradients_can_be_encoded(spec: str) -> None:
    parameter = torch.nn.Parameter(normal(10, 12))
    assert not round_trip(make_codec(spec), parameter).requires_grad


# ---------------------------------------------------------------------- determinism


@pytest.mark.parametrize("spec", EVERY)
def test_same_input_same_bytes_for_every_thread_count(spec: str) -> None:
    codec = make_codec(spec)
    tensor = normal(300, 1001, seed=6)
    flat = tensor.view(-1)[:-7]
    # The same values at other places in memory.
    shifted = torch.empty(tensor.numel() + 3)[3:].view_as(tensor).copy_(tensor)
    before = torch.get_num_threads()
    encoded, decoded = set(), set()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            data = codec.encode(tensor.clone())
            encoded.add((data, codec.encode(flat.clone())))
            assert codec.encode(shifted) == data
            decoded.add(codec.decode(data, limit_bytes=LIMIT).numpy().tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(encoded) == len(decoded) == 1


def test_codecs_declare_exact_decoding() -> None:
    for spec in EVERY:
        codec = make_codec(spec)
        assert codec.exact_decode == ("dct" not in spec)
        assert codec.lossless == spec.startswith("exact")


# ---------------------------------------------------------------------- buffers


@pytest.mark.parametrize("spec", EVERY)
def test_decode_into_a_given_tensor(spec: str) -> None:
    codec = make_codec(spec)
    data = codec.encode(normal(3, 700))
    out = torch.full((3, 700), 9.0)
    assert codec.decode(data, limit_bytes=LIMIT, out=out) is out
    assert torch.equal(out, codec.decode(data, limit_bytes=LIMIT))
    untouched = torch.full((700, 3), 9.0)
    for wrong in (untouched, torch.full((3, 700), 9.0, dtype=torch.float64)):
        with pytest.raises(CodecError, match="expected"):
            codec.decode(data, limit_bytes=LIMIT, out=wrong)
        assert bool((wrong == 9.0).all())
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode(data, limit_bytes=LIMIT, out=untouched.t())


@pytest.mark.parametrize("spec", EVERY)
def test_decode_takes_any_buffer_and_alignment(spec: str) -> None:
    codec = make_codec(spec)
    data = codec.encode(normal(7, 111))
    expected = codec.decode(data, limit_bytes=LIMIT)
    for kind in (bytes, bytearray, memoryview):
        assert torch.equal(codec.decode(kind(data), limit_bytes=LIMIT), expected)
    for shift in range(1, 8):
        shifted = memoryview(b"x" * shift + data)[shift:]
        assert torch.equal(codec.decode(shifted, limit_bytes=LIMIT), expected)


@pytest.mark.parametrize("spec", EVERY)
def test_decoded_tensors_do_not_share_the_buffer(spec: str) -> None:
    codec = make_codec(spec)
    buffer = bytearray(codec.encode(normal(10, 10)))
    decoded = codec.decode(buffer, limit_bytes=LIMIT)
    copy = decoded.clone()
    buffer[:] = bytes(len(buffer))
    assert torch.equal(decoded, copy)


@pytest.mark.parametrize("spec", EVERY)
def test_encode_into_a_given_buffer(spec: str) -> None:
    codec = make_codec(spec)
    tensor = normal(11, 91)
    data = codec.encode(tensor)
    room = codec.size_estimate(tensor).most_bytes
    for shift in (0, 1, 3, 8):
        # 0xff everywhere: whatever is not written would show.
        buffer = bytearray(b"\xff" * (room + shift + 5))
        assert codec.encode_into(tensor, memoryview(buffer)[shift:]) == len(data)
        assert buffer[shift : shift + len(data)] == data
        assert buffer[shift + room :] == b"\xff" * 5
    with pytest.raises(ValueError, match="needs"):
        codec.encode_into(tensor, bytearray(room - 1))


@pytest.mark.parametrize("spec", EVERY)
def test_add_decoded(spec: str) -> None:
    codec = make_codec(spec)
    tensor, start = normal(600, 500), normal(600, 500, seed=1)
    assert tensor.numel() > CHUNK_ELEMENTS
    data = codec.encode(tensor)
    target = start.clone()
    codec.add_decoded(data, target, weight=0.25, limit_bytes=LIMIT)
    expected = start + 0.25 * codec.decode(data, limit_bytes=LIMIT)
    assert torch.allclose(target, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(CodecError, match="expected"):
        codec.add_decoded(data, torch.zeros(3), limit_bytes=LIMIT)


def test_a_codec_insists_on_its_own_spec_but_tools_need_not() -> None:
    data = make_codec("int8:64").encode(normal(10))
    with pytest.raises(CodecError, match=r"encoded as int8:64, expected int8:128"):
        make_codec("int8:128").decode(data, limit_bytes=LIMIT)
    for spec in EVERY:
        data = make_codec(spec).encode(normal(10, 20))
        expected = make_codec(spec).decode(data, limit_bytes=LIMIT)
        assert torch.equal(decode_any(data, limit_bytes=LIMIT), expected)


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("spec", EVERY)
def test_state_moves_only_when_it_commits(spec: str) -> None:
    codec, tensor = make_codec(spec), normal(40, 50)
    state = CodecState(seed=5)
    first = codec.encode(tensor, state)
    assert codec.encode(tensor, state) == first
    state.rollback()
    assert codec.encode(tensor, state) == first
    state.commit()
    second = codec.encode(tensor, state)
    family = codec.spec.reducer and FAMILIES[codec.spec.reducer.name]
    assert (second != first) == bool(family and family.has_state)
    state.rollback()
    assert codec.encode(tensor, state) == second
    state.reset()
    assert codec.encode(tensor, state) == first
