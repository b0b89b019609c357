"""What encoding and decoding promise: accuracy, edge cases, determinism, buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_cases import FLOATS, normal, round_trip
from starlings_compression.codec import make_codec
from starlings_compression.tensors import CHUNK_ELEMENTS

LOSSY = ("fp16", "int8:128", "int8:8", "int8:64")
ALL = ("exact", *LOSSY)


def block_peaks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude of each value's block, shaped like the tensor (float64)."""
    flat = tensor.double().reshape(-1).abs()
    padding = -flat.numel() % block
    blocks = torch.nn.functional.pad(flat, (0, padding)).view(-1, block)
    return blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: flat.numel()].view(tensor.shape)


# ---------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_exact_gives_back_every_type(dtype: torch.dtype) -> None:
    tensor = (normal(5, 31) * 50).to(dtype)
    assert torch.equal(round_trip(make_codec("exact"), tensor), tensor)


@pytest.mark.parametrize("block", [8, 64, 128])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e12, 1e30])
def test_int8_error_is_at_most_half_a_step_at_any_magnitude(block: int, scale: float) -> None:
    tensor = normal(1000, seed=block) * scale
    error = (round_trip(make_codec(f"int8:{block}"), tensor).double() - tensor.double()).abs()
    # Half of (peak / 127), and a scale rounded up by 2**-8 at most.
    assert bool((error <= block_peaks(tensor, block) / 254 * (1 + 2**-7)).all())


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e12, 1e30])
def test_fp16_keeps_eleven_bits_at_any_magnitude(scale: float) -> None:
    tensor = normal(5000, seed=3) * scale
    error = (round_trip(make_codec("fp16"), tensor).double() - tensor.double()).abs()
    assert bool((error <= tensor.double().abs() * 2**-11 + block_peaks(tensor, 1024) * 2**-39).all())


def test_quality_on_normal_and_heavy_tailed_values() -> None:
    tensor = normal(1 << 16)
    heavy = tensor * torch.exp(2 * normal(1 << 16, seed=1))

    def relative_error(spec: str, values: torch.Tensor) -> float:
        return float((round_trip(make_codec(spec), values) - values).norm() / values.norm())

    assert relative_error("int8:128", tensor) < 0.008
    assert relative_error("int8:64", tensor) < 0.007
    assert relative_error("int8:128", heavy) < 0.02
    assert relative_error("fp16", heavy) < 0.0003


def test_rounding_is_unbiased() -> None:
    tensor = normal(1 << 18, seed=5)
    error = round_trip(make_codec("int8:128"), tensor).double() - tensor.double()
    assert abs(float(error.mean())) < 5e-5


def test_decoding_twice_encoded_values_changes_nothing_more() -> None:
    """A part that is decoded and encoded again (by an owner of one contribution) does not drift."""
    for spec in ("fp16", "int8:128"):
        codec = make_codec(spec)
        once = round_trip(codec, normal(4096, seed=8))
        twice = round_trip(codec, once)
        assert float((once - twice).norm() / once.norm()) < 2e-3


# ---------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("spec", ALL)
def test_small_and_ragged_sizes(spec: str) -> None:
    for dtype in FLOATS:
        for count in (0, 1, 2, 7, 8, 9, 127, 128, 129, 1023, 1025):
            tensor = normal(count, seed=count, dtype=dtype)
            decoded = round_trip(make_codec(spec), tensor)
            assert bool(torch.allclose(decoded.double(), tensor.double(), atol=0.03))


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("extra", [-1, 0, 1, 77, CHUNK_ELEMENTS])
def test_sizes_around_the_chunk(spec: str, extra: int) -> None:
    tensor = normal(CHUNK_ELEMENTS + extra, seed=2)
    decoded = round_trip(make_codec(spec), tensor)
    assert float((decoded - tensor).abs().max()) < 0.03
    # The same values in a smaller tensor get the same bits: chunks leave no seam.
    head = make_codec(spec)
    assert torch.equal(round_trip(head, tensor[:4096]), decoded[:4096])


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_and_constant_blocks(spec: str, dtype: torch.dtype) -> None:
    codec = make_codec(spec)
    zeros = torch.zeros(300, dtype=dtype)
    assert torch.equal(round_trip(codec, zeros), zeros)
    constant = torch.full((300,), -0.37, dtype=dtype)
    assert float((round_trip(codec, constant) - constant).abs().max()) <= 0.37 / 254 * 1.01 + 0.002
    mixed = torch.zeros(1024, dtype=dtype)
    mixed[700] = 3.0
    decoded = round_trip(codec, mixed)
    assert int((decoded != 0).sum()) == 1
    assert float(decoded[700]) == pytest.approx(3.0, rel=0.004)


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_ends_of_every_type_stay_finite(spec: str, dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    tensor = torch.tensor([largest, -largest, 1.0, 0.0] * 40, dtype=dtype)
    decoded = round_trip(make_codec(spec), tensor).double()
    assert float((decoded[0] / largest - 1).abs()) < 0.005
    tiny = torch.tensor([torch.finfo(dtype).tiny, 0.0, -torch.finfo(dtype).tiny] * 40, dtype=dtype)
    assert float(round_trip(make_codec(spec), tiny).double().abs().max()) <= torch.finfo(dtype).tiny * 1.01


@pytest.mark.parametrize("spec", LOSSY)
def test_an_outlier_harms_only_its_block(spec: str) -> None:
    tensor = normal(4096, seed=4)
    plain = round_trip(make_codec(spec), tensor)
    tensor[5] = 1e30
    decoded = round_trip(make_codec(spec), tensor)
    assert float(decoded[5]) == pytest.approx(1e30, rel=0.01)
    assert torch.equal(decoded[1024:], plain[1024:])


# ---------------------------------------------------------------------- determinism


def test_bytes_are_pinned() -> None:
    """The layout is a promise: these bytes may change only together with the layout's version."""
    tensor = torch.tensor([[1.0, -0.5], [0.25, 0.0]])
    head = "534c504b0101020208" + "00" * 7 + "0200000000000000" * 2
    assert make_codec("int8:128").encode(tensor).hex() == (
        head + "0200000000000000" + "0400000000000000" + "696e74383a313238" + "013c" + "00" * 6 + "7fc02000"
    )
    assert make_codec("fp16").encode(tensor).hex() == (
        "534c504b0101020204" + "00" * 7 + "0200000000000000" * 3 + "0800000000000000" + "66703136" + "00" * 4
        + "8038" + "00" * 6 + "007400f0006c0000"
    )  # fmt: skip


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300),
    st.sampled_from(ALL),
)
@settings(max_examples=60, deadline=None)
def test_any_finite_values_round_trip(values: list[float], spec: str) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    codec = make_codec(spec)
    decoded = round_trip(codec, tensor)
    block = {"exact": 1, "fp16": 1024}.get(spec) or codec.spec.values.arguments[0]
    bound = {"exact": 0.0, "fp16": 2.0**-11}.get(spec, (1 + 2**-7) / 254)
    error = (decoded.double() - tensor.double()).abs()
    # Scales end at the smallest normal number: values far below it become zero.
    assert bool((error <= block_peaks(tensor, block) * bound + 2.0**-126).all())
    assert codec.encode(tensor) == codec.encode(tensor.clone())


# ---------------------------------------------------------------------- buffers
