"""`decode` of any bytes gives a tensor within the limit, or CodecError: never anything else, never a large
allocation.
"""

from __future__ import annotations

import math
import random
import struct
import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_cases import EVERY, FLOATS, FUZZ_LIMIT_BYTES, check
from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError
from starlings_compression.layout import DataType, Form, PackedHeader, header_bytes, read_packed, write_header
from starlings_compression.spec import parse_spec
from starlings_compression.wire import from_wire, to_wire

SPECS = ("exact", "fp16", "int8:8", "topk:5/64|int2:8", "lowrank:1|int8:64", "exact|zstd:3")
LIMIT = FUZZ_LIMIT_BYTES


def valid_samples() -> list[bytes]:
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number, spec in enumerate(EVERY):
        for shape in ((), (0,), (130,), (2, 0, 3), (17, 12), (1, 2, 3, 4, 1, 2)):
            dtype = FLOATS[(number + len(samples)) % len(FLOATS)]
            samples.append(make_codec(spec).encode(torch.randn(shape, generator=generator).to(dtype)))
    samples.append(make_codec("exact").encode(torch.tensor([True, False, True])))
    samples.append(make_codec("exact").encode(torch.arange(9)))
    return samples


SAMPLES = valid_samples()


def mutate(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.randrange(6)
        at = (
            rng.randrange(len(changed) + 1)
            if rng.random() < 0.3
            else rng.randrange(min(len(changed), 96) + 1)
        )
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del changed[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 4 and len(changed) >= 24:
            # A whole number of the header: where sizes are.
            word = 16 + 8 * rng.randrange(min(8, (len(changed) - 16) // 8))
            value = rng.choice(
                (0, 1, 2, 255, 1 << 31, 1 << 32, 1 << 48, 1 << 62, (1 << 64) - 1, rng.getrandbits(64))
            )
            struct.pack_into("<Q", changed, word, value)
        else:
            changed = changed[:at]
    return bytes(changed)


def test_ten_thousand_random_strings_are_refused() -> None:
    rng = random.Random(1)
    accepted = 0
    for _ in range(10_000):
        body = rng.randbytes(rng.choice((0, 1, 8, 16, 24, 40, 64, 200, 1000)))
        accepted += check(body if rng.random() < 0.5 else b"SLPK\x01" + body)
    assert accepted == 0


def test_ten_thousand_mutated_packets() -> None:
    rng = random.Random(2)
    accepted = sum(check(mutate(rng, rng.choice(SAMPLES))) for _ in range(10_000))
    # Many mutations hit values only, so the test reaches behind the header.
    assert 100 < accepted < 9_000


def test_memory_stays_flat_under_lies() -> None:
    rng = random.Random(3)
    tracemalloc.start()
    try:
        for _ in range(1_000):
            check(mutate(rng, rng.choice(SAMPLES)))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.sampled_from(range(len(SAMPLES))), st.integers(0, 400))
@settings(max_examples=250, deadline=None)
def test_spliced_packets(junk: bytes, which: int, at: int) -> None:
    sample = SAMPLES[which]
    check(junk)
    check(sample[:at] + junk + sample[at + len(junk) :])
    check(sample[:at] + junk)


def test_every_truncation_and_extension_is_refused() -> None:
    for data in SAMPLES:
        # All of the header, then some.
        for length in (*range(min(len(data), 120)), *range(120, len(data), 37), len(data) - 1):
            assert not check(data[:length])
        assert not check(data + b"\0")
        assert check(data)


def lie(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def test_lying_headers() -> None:
    codec = make_codec("int8:128")
    data = codec.encode(torch.ones(256))
    first_section = header_bytes(len("int8:128"), 1, 2)
    lies = {
        "magic": lie(data, 0, b"SLPJ"),
        "version": lie(data, 4, b"\x02"),
        "type 0": lie(data, 5, b"\x00"),
        "type 9": lie(data, 5, b"\x09"),
        "integer type": lie(data, 5, bytes([DataType.INT64])),
        "nine dimensions": lie(data, 6, b"\x09"),
        "no sections": lie(data, 7, b"\x00"),
        "seventeen sections": lie(data, 7, b"\x11"),
        "no spec": lie(data, 8, b"\x00"),
        "reserved": lie(data, 9, b"\x01"),
        "shape too large": lie(data, 16, struct.pack("<Q", 1 << 40)),
        "shape overflows": lie(data, 16, struct.pack("<Q", (1 << 64) - 1)),
        "shape too small": lie(data, 16, struct.pack("<Q", 255)),
        "section length": lie(data, 24, struct.pack("<Q", 2)),
        "sections swapped": lie(data, 24, struct.pack("<2Q", 256, 4)),
        "other spec": lie(data, 40, b"int8:064"),
        "unknown spec": lie(data, 40, b"int9:128"),
        "not ascii": lie(data, 40, b"int8:12\xff"),
        "padding": lie(data, first_section + 4, b"\x01"),
        "scale NaN": lie(data, first_section, b"\xc0\x7f"),
        "scale infinite": lie(data, first_section, b"\x80\x7f"),
        "scale negative": lie(data, first_section, b"\x00\xbf"),
        "scale minus zero": lie(data, first_section, b"\x00\x80"),
        "scale subnormal": lie(data, first_section, b"\x7f\x00"),
    }
    for name, lying in lies.items():
        assert lying != data, name
        with pytest.raises(CodecError):
            codec.decode(lying, limit_bytes=1 << 62)
        assert not check(lying), name


def test_non_finite_payloads() -> None:
    for spec, dtype in (("exact", torch.float32), ("exact", torch.bfloat16), ("fp16", torch.float32)):
        data = make_codec(spec).encode(torch.ones(4, dtype=dtype))
        for end in (b"\x80\x7f", b"\xc0\x7f", b"\xc0\xff") if spec == "exact" else (b"\x00\x7c", b"\x01\xfc"):
            with pytest.raises(CodecError, match="NaN or infinite"):
                make_codec(spec).decode(data[:-2] + end, limit_bytes=LIMIT)
    data = make_codec("exact").encode(torch.tensor([True]))
    with pytest.raises(CodecError, match="boolean"):
        make_codec("exact").decode(data[:-1] + b"\x02", limit_bytes=LIMIT)


def test_the_largest_scale_still_decodes_to_finite_values() -> None:
    for spec, dtype in (("int8:8", torch.float32), ("int8:8", torch.float16), ("fp16", torch.bfloat16)):
        data = bytearray(make_codec(spec).encode(torch.ones(8, dtype=dtype)))
        header, sections = read_packed(memoryview(data), limit_bytes=LIMIT)
        sections[0][:] = b"\x7f\x7f"
        decoded = make_codec(spec).decode(data, limit_bytes=LIMIT)
        assert bool(torch.isfinite(decoded).all()), header
        assert float(decoded[0]) == torch.finfo(dtype).max


def test_zero_sized_shapes_do_not_overflow() -> None:
    data = make_codec("exact").encode(torch.empty(0, 2, 3))
    assert not check(lie(data, 24, struct.pack("<2Q", 1 << 62, 1 << 62)))
    assert not check(lie(data, 24, struct.pack("<2Q", 1 << 33, 1 << 33)))
    assert check(lie(data, 24, struct.pack("<2Q", 1 << 20, 7)))


@pytest.mark.parametrize("spec", SPECS)
def test_the_limit_is_exact(spec: str) -> None:
    data = make_codec(spec).encode(torch.ones(10, 3))
    assert make_codec(spec).decode(data, limit_bytes=120).shape == (10, 3)
    with pytest.raises(CodecError, match="120 bytes is above the limit of 119"):
        make_codec(spec).decode(data, limit_bytes=119)


def test_nothing_is_allocated_before_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_codec("exact").encode(torch.ones(2))
    lying = lie(data, 16, struct.pack("<2Q", 1 << 40, 1 << 42))

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CodecError):
        make_codec("exact").decode(lying, limit_bytes=1 << 62)


def test_lying_indices() -> None:
    codec = make_codec("topk:2/16")
    data = codec.encode(torch.arange(20.0))
    start = header_bytes(len("topk:2/16"), 1, 2)
    # One chunk of sixteen and one of four: two indices each.
    assert data[start : start + 4] == bytes([14, 15, 2, 3])
    for indices in (
        [14, 16, 2, 3],
        [14, 15, 2, 4],
        [15, 14, 2, 3],
        [14, 14, 2, 3],
        [14, 15, 3, 3],
        [255, 255, 2, 3],
    ):
        lying = lie(data, start, bytes(indices))
        with pytest.raises(CodecError, match="ind"):
            codec.decode(lying, limit_bytes=LIMIT)
        assert not check(lying)
    # The highest bits of a last, odd 12-bit index stand for nothing.
    codec = make_codec("topk:1/4096")
    data = codec.encode(torch.ones(10))
    with pytest.raises(CodecError, match="bits behind"):
        codec.decode(lie(data, header_bytes(len("topk:1/4096"), 1, 2) + 1, b"\x10"), limit_bytes=LIMIT)


def test_lying_means() -> None:
    codec = make_codec("int4:8/means")
    data = codec.encode(torch.ones(8))
    start = header_bytes(len("int4:8/means"), 1, 3) + 8
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(CodecError, match="mean"):
            codec.decode(lie(data, start + 4 * 3, struct.pack("<f", bad)), limit_bytes=LIMIT)
    huge = lie(lie(data, start + 4 * 15, struct.pack("<f", 3e38)), start - 8, b"\x7f\x7f")
    assert torch.equal(
        codec.decode(huge, limit_bytes=LIMIT), torch.full((8,), torch.finfo(torch.float32).max)
    )


def test_factors_and_coefficients_beyond_every_type_decode_to_finite_values() -> None:
    for spec, dtype in (
        ("lowrank:2", torch.float32),
        ("lowrank:2", torch.bfloat16),
        ("dct-topk:8/9", torch.float16),
    ):
        data = bytearray(make_codec(spec).encode(torch.ones(16, 16).to(dtype)))
        values = 2 * 32 if "lowrank" in spec else 4 * 9
        for numbers in ([3e38] * values, [3e38, -3e38] * (values // 2)):
            data[-4 * values :] = struct.pack(f"<{values}f", *numbers)
            assert check(bytes(data))


def zstd_frame(plain: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(plain)


def squeezed(section: bytes) -> bytes:
    """A Packed of 1,000 float32 zeros whose one section is what is given."""
    form = Form(DataType.FLOAT32, (1000,))
    header = PackedHeader(parse_spec("exact|zstd"), form, (len(section),))
    out = bytearray(header_bytes(len(header.spec.text), 1, 1) + len(section))
    write_header(header, memoryview(out))[0][:] = section
    return bytes(out)


def test_lying_zstandard_frames() -> None:
    codec = make_codec("exact|zstd")
    good = squeezed(zstd_frame(bytes(4000)))
    assert torch.equal(codec.decode(good, limit_bytes=4000), torch.zeros(1000))
    streamed = zstandard.ZstdCompressor().compressobj()
    bomb = zstd_frame(bytes(1 << 27))
    lies = {
        "too much": zstd_frame(bytes(4001)),
        "too little": zstd_frame(bytes(3999)),
        "a bomb": bomb,
        "a bomb that says it is small": bomb[:5] + zstd_frame(bytes(4000))[5:7] + bomb[7:],
        "no size": zstd_frame(bytes(4000), write_content_size=False),
        "streamed without a size": streamed.compress(bytes(1 << 20)) + streamed.flush(),
        "two frames": zstd_frame(bytes(2000)) * 2,
        "something behind": zstd_frame(bytes(4000)) + b"\0",
        "a frame and an empty one": zstd_frame(bytes(4000)) + zstd_frame(b""),
        "nothing": b"",
        "no frame": bytes(100),
        "cut short": zstd_frame(bytes(4000))[:-3],
        "longer than plain": bytes(4001),
    }
    tracemalloc.start()
    for name, section in lies.items():
        lying = squeezed(section[:4001])
        with pytest.raises(CodecError):
            codec.decode(lying, limit_bytes=1 << 40)
        assert not check(lying), name
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    # Plain bytes are allowed where a frame would not be shorter.
    assert torch.equal(codec.decode(squeezed(bytes(4000)), limit_bytes=4000), torch.zeros(1000))


# ---------------------------------------------------------------------- beside an outer header


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 50), (1000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_wire_round_trip(spec: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec = make_codec(spec)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = to_wire(codec, tensor)
    if spec == "exact":
        assert len(data) == tensor.numel() * tensor.element_size()
    number = int(next(t for t in DataType if t.name.lower() == str(dtype).removeprefix("torch.")))
    size = tensor.numel() * tensor.element_size()
    decoded = from_wire(codec, data, data_type=number, shape=shape, limit_bytes=size)
    assert torch.equal(decoded, codec.decode(codec.encode(tensor), limit_bytes=LIMIT))
    out = torch.zeros(shape, dtype=dtype)
    assert from_wire(codec, data, data_type=number, shape=shape, limit_bytes=size, out=out) is out
    assert torch.equal(out, decoded)
    if size == 0:
        # Nothing is anything: raw bytes of an empty tensor fit every announcement of an empty one.
        return
    for announced in ({"data_type": 7}, {"data_type": 99}, {"shape": (*shape, 2)}, {"shape": (1,) * 9}):
        with pytest.raises(CodecError):
            from_wire(
                codec, data, **({"data_type": number, "shape": shape, "limit_bytes": LIMIT} | announced)
            )
    with pytest.raises(CodecError, match="limit"):
        from_wire(codec, data, data_type=number, shape=shape, limit_bytes=size - 1)


def test_wire_refuses_what_codecs_refuse() -> None:
    exact = make_codec("exact")
    with pytest.raises(CodecError, match="hidden: NaN"):
        to_wire(exact, torch.tensor([math.nan]), name="hidden")
    nan = memoryview(struct.pack("<f", math.nan))
    with pytest.raises(CodecError, match="NaN"):
        from_wire(exact, nan, data_type=DataType.FLOAT32, shape=(1,), limit_bytes=4)
    flags = torch.tensor([[True], [False]])
    data = to_wire(exact, flags)
    assert torch.equal(from_wire(exact, data, data_type=DataType.BOOL, shape=(2, 1), limit_bytes=2), flags)
    with pytest.raises(CodecError, match="boolean"):
        from_wire(exact, b"\x01\x02", data_type=DataType.BOOL, shape=(2, 1), limit_bytes=2)


@given(st.binary(max_size=100), st.integers(-1, 12), st.lists(st.integers(0, 1 << 64), max_size=9))
@settings(max_examples=150, deadline=None)
def test_wire_takes_any_bytes_and_announcement(data: bytes, data_type: int, shape: list[int]) -> None:
    for spec in ("exact", "topk:5/64|int4:8|zstd:3"):
        try:
            tensor = from_wire(
                make_codec(spec), data, data_type=data_type, shape=tuple(shape), limit_bytes=1 << 10
            )
        except CodecError:
            continue
        assert tensor.numel() * tensor.element_size() <= 1 << 10


def test_header_properties() -> None:
    header, sections = read_packed(memoryview(SAMPLES[-1]), limit_bytes=LIMIT)
    assert isinstance(header, PackedHeader)
    assert (header.form.element_count, header.form.decoded_bytes, len(sections)) == (9, 72, 1)
