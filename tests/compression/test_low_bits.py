"""Packed codes, levels and quality of codecs of few bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_cases import LIMIT, normal, relative_error, round_trip
from starlings_compression import packing
from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError
from starlings_compression.sparse import IndexWriter


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 40), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_codes_are_packed_lowest_bits_first(bits: int, groups: int, seed: int) -> None:
    codes = torch.randint(
        0, 1 << bits, (8 * groups,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = torch.empty(groups * bits, dtype=torch.uint8)
    packing.pack(codes.clone(), bits, packed)
    number = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    assert bytes(packed.tolist()) == number.to_bytes(groups * bits, "little")
    assert torch.equal(packing.unpack(packed, bits), codes)


@given(st.sampled_from([8, 12, 16]), st.integers(0, 50), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_indices_are_packed_lowest_bits_first(bits: int, count: int, seed: int) -> None:
    indices = torch.randint(
        0, 1 << bits, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    packed = torch.empty(-(-count * bits // 8), dtype=torch.uint8)
    packing.pack_indices(indices, bits, packed)
    number = sum(int(index) << (i * bits) for i, index in enumerate(indices))
    assert bytes(packed.tolist()) == number.to_bytes(packed.numel(), "little")
    assert torch.equal(packing.unpack_indices(packed, bits, count), indices)


@given(st.sampled_from([8, 12, 16]), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_indices_written_and_read_in_pieces_are_those_of_one(bits: int, counts: list[int], seed: int) -> None:
    indices = torch.randint(
        0, 1 << bits, (sum(counts),), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    whole = torch.empty(-(-len(indices) * bits // 8), dtype=torch.uint8)
    packing.pack_indices(indices, bits, whole)
    section = bytearray(len(whole))
    writer = IndexWriter(bits, memoryview(section))
    for piece in indices.split(counts):
        writer.add(piece)
    writer.close()
    assert section == bytes(whole.tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PIECE_INDICES", 4)
        assert torch.equal(packing.unpack_indices(whole, bits, len(indices)), indices)


@pytest.mark.parametrize(("bits", "count"), [(4, 3), (2, 5), (1, 9)])
def test_bits_behind_the_last_code_must_be_zero(bits: int, count: int) -> None:
    spec = {4: "int4:8", 2: "int2:8", 1: "sign:8"}[bits]
    data = bytearray(make_codec(spec).encode(torch.full((count,), 2.0)))
    assert data[-1] < 1 << (count * bits % 8)
    data[-1] |= 0x80
    with pytest.raises(CodecError, match="behind the last"):
        make_codec(spec).decode(data, limit_bytes=LIMIT)


# ---------------------------------------------------------------------- levels


def test_int4_error_is_at_most_half_a_step() -> None:
    for scale in (1e-30, 1.0, 1e30):
        tensor = normal(64 * 50, seed=3) * scale
        peaks = tensor.view(-1, 64).abs().amax(1, keepdim=True).double()
        error = (round_trip(make_codec("int4:64"), tensor).double() - tensor.double()).abs().view(-1, 64)
        assert bool((error <= peaks / 14 * (1 + 2**-6)).all())


def test_int2_has_four_levels_with_the_best_scale() -> None:
    tensor = normal(64 * 200, seed=4)
    decoded = round_trip(make_codec("int2:64"), tensor).view(-1, 64)
    scales = decoded.abs().amin(1, keepdim=True)
    assert set((decoded / scales).unique().tolist()) <= {-3.0, -1.0, 1.0, 3.0}
    # No other scale would be better for these levels, up to its rounding to eight bits.
    levels, blocks = decoded / scales, tensor.view(-1, 64)
    best = (levels * blocks).sum(1, keepdim=True) / levels.square().sum(1, keepdim=True)
    assert float((best / scales - 1).abs().max()) < 0.12
    assert float((best / scales - 1).abs().mean()) < 0.01


def test_signs_come_with_the_mean_magnitude() -> None:
    tensor = normal(256 * 10 + 77, seed=5)
    decoded = round_trip(make_codec("sign"), tensor)
    assert torch.equal(decoded.sign(), tensor.sign())
    for block in (slice(0, 256), slice(2560, None)):
        assert float(decoded[block].abs()[0]) == pytest.approx(float(tensor[block].abs().mean()), rel=2**-8)
    assert float(round_trip(make_codec("sign"), torch.tensor([0.0, 2.0]))[0]) == 1.0


@pytest.mark.parametrize(("spec", "plain"), [("int4:64/means", "int4:64"), ("int2:64/means", "int2:64")])
def test_means_never_do_worse_and_leave_what_was_dropped_orthogonal(spec: str, plain: str) -> None:
    for seed in range(3):
        for tensor in (normal(40_001, seed=seed), normal(40_001, seed=seed) ** 3):
            assert relative_error(make_codec(spec), tensor) <= relative_error(make_codec(plain), tensor)
            decoded = round_trip(make_codec(spec), tensor).double()
            product = float(((tensor.double() - decoded) * decoded).sum())
            assert abs(product) < 1e-5 * float(tensor.double().square().sum())


@pytest.mark.parametrize(
    ("spec", "code_type"), [("fp8:8", torch.float8_e4m3fn), ("fp8-e5m2:8", torch.float8_e5m2)]
)
def test_every_fp8_code_decodes_to_its_number(spec: str, code_type: torch.dtype) -> None:
    codec = make_codec(spec)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(code_type).float()
    data = bytearray(codec.encode(torch.ones(256)))
    # Scales of one: then numbers are what the codes stand for.
    ones = torch.ones(32, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    start = len(data) - 256 - 64
    data[start : start + 64] = ones
    good = torch.isfinite(numbers)
    data[-256:] = bytes(torch.where(good, codes, 0).tolist())
    assert torch.equal(codec.decode(data, limit_bytes=LIMIT), torch.where(good, numbers, 0.0))
    for bad in codes[~good].tolist():
        data[-1] = bad
        with pytest.raises(CodecError, match="NaN or infinite"):
            codec.decode(data, limit_bytes=LIMIT)


def test_bf16_is_what_torch_rounds_to() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        tensor = normal(5000, seed=6, dtype=dtype)
        assert torch.equal(round_trip(make_codec("bf16"), tensor), tensor.bfloat16().to(dtype))


@pytest.mark.parametrize(
    ("spec", "normal_limit", "heavy_limit"),
    [
        ("bf16", 0.002, 0.002),
        ("fp8", 0.03, 0.02),
        ("fp8-e5m2", 0.055, 0.03),
        ("int4:64", 0.11, 0.11),
        ("int4:64/means", 0.109, 0.1),
        ("int2:64", 0.345, 0.95),
        ("int2:64/means", 0.34, 0.7),
        ("sign", 0.61, 0.995),
    ],
)
def test_quality_on_normal_and_heavy_tailed_values(
    spec: str, normal_limit: float, heavy_limit: float
) -> None:
    tensor = normal(1 << 16)
    assert relative_error(make_codec(spec), tensor) < normal_limit
    assert relative_error(make_codec(spec), tensor * torch.exp(2 * normal(1 << 16, seed=1))) < heavy_limit


def test_bytes_are_pinned() -> None:
    """The layout is a promise: these bytes may change only together with the layout's version."""
    tensor = torch.tensor([1.0, -0.5, 0.25, 0.0, 3.0])
    bodies = {
        "bf16": "803f00bf803e00004040",
        "fp8:8": "db3b" + "00" * 6 + "71e961007e",
        "fp8-e5m2:8": "5b38" + "00" * 6 + "75f16d007b",
        "int4:8": "db3e" + "00" * 6 + "7a890f",
        "int2:8": "543f" + "00" * 6 + "a603",
        "sign:8": "733f" + "00" * 6 + "1d",
        "topk:2/8": "0004" + "00" * 6 + "0000803f00004040",
        "topk:3/8|int8:8": "000104" + "00" * 5 + "c23c" + "00" * 6 + "2aeb7f",
    }
    found = {}
    for spec, body in bodies.items():
        found[spec] = make_codec(spec).encode(tensor).hex()[-len(body) :]
    assert found == bodies
