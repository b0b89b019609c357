"""Transfers: what is written is read back; whatever lies, drips, stops short or runs on is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_compression.sizes import size_estimate
from starlings_protos import data_pb2, frames
from starlings_protos.frames import (
    CHUNK_BYTES,
    EXCHANGE,
    MICROBATCH,
    PAIR,
    SMALLEST_CHUNK_BYTES,
    STATE,
    Body,
    FrameError,
    check_header,
    make_header,
    read_body,
    read_header,
    read_transfer,
    subject_of,
    tensor_header,
    write_transfer,
)
from starlings_protos.messages import (
    ExchangeHeader,
    Hop,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Refusal,
    WorkerId,
)
from starlings_protos.pair_messages import PairHeader

LIMIT = 64 << 20
SUBJECT = MicrobatchHeader(
    key=MicrobatchKey(LeaseKind.TRAIN, 3, 1, 7),
    stage=2,
    route=(Hop(WorkerId("w0123456789abcdef"), 0, 1),),
    loss_denominator=512.0,
    plan_version=4,
)
EXCHANGE_SUBJECT = ExchangeHeader(step=1, attempt=0, group="stage:3", part=1, plan_version=2)
PAIR_SUBJECT = PairHeader(stage=1, fragment=2, slot=6, swap=0, round_id=2**63, sha256="0f" * 32)
FLOAT32, UINT8 = data_pb2.DATA_TYPE_FLOAT32, data_pb2.DATA_TYPE_UINT8


async def stream(items: Iterable[data_pb2.Frame]) -> AsyncIterator[data_pb2.Frame]:
    for item in items:
        # As over a wire: parsed from bytes, so that nothing is shared with the sender.
        yield data_pb2.Frame.FromString(item.SerializeToString())


def raw_header(*sizes: int) -> data_pb2.Header:
    return make_header(SUBJECT, [tensor_header(f"t{i}", UINT8, (n,), n) for i, n in enumerate(sizes)])


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes with a period that no chunk size shares, so that a misplaced piece shows."""
    period = bytes((i * 7 + seed) & 0xFF for i in range(257))
    return (period * (size // 257 + 1))[:size]


async def read_all(items: Iterable[data_pb2.Frame], limit_bytes: int = LIMIT) -> list[bytes]:
    _, buffers = await read_transfer(stream(items), limit_bytes=limit_bytes, subject_limits=MICROBATCH)
    return [bytes(buffer) for buffer in buffers]


# ---------------------------------------------------------------------- what is written is read back


@given(
    st.lists(
        st.sampled_from(
            [0, 1, 5, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2_500_000]
        ),
        max_size=6,
    ),
    st.sampled_from([SMALLEST_CHUNK_BYTES, 100_000, CHUNK_BYTES]),
)
@settings(max_examples=40, deadline=None)
def test_round_trip(sizes: list[int], chunk_bytes: int) -> None:
    data = [pattern(size, seed) for seed, size in enumerate(sizes)]
    header = raw_header(*sizes)
    written = list(write_transfer(header, data, chunk_bytes=chunk_bytes))
    assert written[0].header == header
    chunks = [len(frame.chunk) for frame in written[1:]]
    assert sum(chunks) == sum(sizes)
    # Small tensors share chunks: all are full but the last.
    assert all(size == chunk_bytes for size in chunks[:-1])
    assert all(0 < size <= chunk_bytes for size in chunks)
    assert asyncio.run(read_all(written)) == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_any_buffer_can_be_written(kind: Callable[[bytes], frames.Buffer]) -> None:
    data = pattern(10_000)
    assert await read_all(write_transfer(raw_header(10_000), [kind(data)])) == [data]


async def test_wider_buffers_are_written_as_bytes() -> None:
    values = memoryview(pattern(8_000)).cast("d")
    header = make_header(SUBJECT, [tensor_header("x", data_pb2.DATA_TYPE_FLOAT64, (1000,), 8_000)])
    assert await read_all(write_transfer(header, [values])) == [pattern(8_000)]


def test_writing_what_the_header_does_not_say_is_our_mistake() -> None:
    for buffers in ([b"abc"], [b"abcd", b""], []):
        with pytest.raises(ValueError, match="byte counts"):
            write_transfer(raw_header(4), buffers)
    for chunk_bytes in (SMALLEST_CHUNK_BYTES - 1, CHUNK_BYTES + 1):
        with pytest.raises(ValueError, match="chunks must"):
            write_transfer(raw_header(4), [b"abcd"], chunk_bytes=chunk_bytes)


async def test_the_subject_comes_back_as_a_record() -> None:
    header = await read_header(
        stream(write_transfer(raw_header(4), [b"abcd"])), limit_bytes=4, subject_limits=MICROBATCH
    )
    assert subject_of(header) == SUBJECT
    exchange = make_header(EXCHANGE_SUBJECT, [])
    check_header(exchange, limit_bytes=0, subject_limits=EXCHANGE)
    assert subject_of(exchange) == EXCHANGE_SUBJECT
    pair = make_header(PAIR_SUBJECT, [])
    check_header(pair, limit_bytes=0, subject_limits=PAIR)
    assert subject_of(pair) == PAIR_SUBJECT
    state = make_header(data_pb2.StateHeader(version=3, block="layers.0"), [])
    check_header(state, limit_bytes=0, subject_limits=STATE)
    for unfit in (state, data_pb2.Header(microbatch=data_pb2.MicrobatchHeader(stage=1))):
        with pytest.raises(FrameError):
            subject_of(unfit)
    unknown_kind = data_pb2.Header()
    unknown_kind.CopyFrom(header)
    unknown_kind.microbatch.key.kind = 77  # type: ignore[assignment]
    with pytest.raises(FrameError, match="77"):
        subject_of(unknown_kind)


async def test_the_header_is_judged_before_the_body_is_read() -> None:
    drawn = 0

    async def counted() -> AsyncIterator[data_pb2.Frame]:
        nonlocal drawn
        async for frame in stream(write_transfer(raw_header(3 * CHUNK_BYTES), [pattern(3 * CHUNK_BYTES)])):
            drawn += 1
            yield frame

    source = counted()
    header = await read_header(source, limit_bytes=LIMIT, subject_limits=MICROBATCH)
    assert drawn == 1
    assert [bytes(b) for b in await read_body(header, source)] == [pattern(3 * CHUNK_BYTES)]
    assert drawn == 4


async def test_codecs_size_is_checked_against_shape() -> None:
    size = size_estimate("int8:128", (10, 100)).most_bytes
    good = tensor_header("hidden", FLOAT32, (10, 100), size, codec="int8:128")
    check_header(make_header(SUBJECT, [good]), limit_bytes=4000, subject_limits=MICROBATCH)
    for wrong in (size - 1, size + 1, 4000, 0):
        header = tensor_header("hidden", FLOAT32, (10, 100), wrong, codec="int8:128")
        with pytest.raises(FrameError, match="ask for"):
            check_header(make_header(SUBJECT, [header]), limit_bytes=LIMIT, subject_limits=MICROBATCH)


# ---------------------------------------------------------------------- lying headers


def lies() -> dict[str, tuple[data_pb2.Header, Refusal]]:
    def changed(change: Callable[[data_pb2.Header], None]) -> data_pb2.Header:
        header = make_header(
            SUBJECT,
            [tensor_header("a", FLOAT32, (3, 5), 60), tensor_header("b", UINT8, (7,), 7, sha256="0" * 64)],
        )
        change(header)
        return header

    def tensor(**fields: object) -> data_pb2.Header:
        def change(header: data_pb2.Header) -> None:
            for name, value in fields.items():
                if name == "shape":
                    header.tensors[0].shape[:] = value  # type: ignore[index, call-overload]
                else:
                    setattr(header.tensors[0], name, value)
            header.total_bytes = sum(t.byte_count for t in header.tensors) & (2**64 - 1)

        return changed(change)

    bad, limit = Refusal.MALFORMED, Refusal.LIMIT
    huge = 1 << 63
    return {
        "no subject": (changed(lambda h: h.ClearField("microbatch")), bad),
        "other subject": (changed(lambda h: h.state.SetInParent()), bad),
        "total too small": (changed(lambda h: setattr(h, "total_bytes", 66)), bad),
        "total too large": (changed(lambda h: setattr(h, "total_bytes", 2**64 - 1)), bad),
        "sum overflows": (tensor(byte_count=2**64 - 7), bad),
        "byte count too small": (tensor(byte_count=59), bad),
        "byte count too large": (tensor(byte_count=61), bad),
        "byte count zero": (tensor(byte_count=0), bad),
        "shape too large": (tensor(shape=(3, 6)), bad),
        "shape beyond memory": (tensor(shape=(huge, huge)), limit),
        "shape wraps around": (tensor(shape=(1 << 32, 1 << 32, 1)), limit),
        "zero beside a giant": (tensor(shape=(0, huge, huge), byte_count=0), limit),
        "no shape": (tensor(shape=()), bad),
        "nine dimensions": (tensor(shape=(15, *(1,) * 8)), bad),
        "unspecified type": (tensor(data_type=0), bad),
        "unknown type": (tensor(data_type=99), bad),
        "other type": (tensor(data_type=data_pb2.DATA_TYPE_FLOAT64), bad),
        "unknown codec": (tensor(codec="pickle"), bad),
        "no codec": (tensor(codec=""), bad),
        "codec of a thousand characters": (tensor(codec="int8:" + "1" * 1000), bad),
        "codec whose size differs": (tensor(codec="int8:128"), bad),
        "no name": (tensor(name=""), bad),
        "long name": (tensor(name="x" * 513), bad),
        "name twice": (tensor(name="b"), bad),
        "short hash": (tensor(sha256="0" * 63), bad),
        "hash of other characters": (tensor(sha256="G" * 64), bad),
        "too many tensors": (raw_header(*[1] * 17), limit),
        "above the limit": (raw_header(LIMIT, 1), limit),
        "long route": (changed(lambda h: h.microbatch.route.extend([*h.microbatch.route] * 1025)), limit),
        "long worker id": (changed(lambda h: setattr(h.microbatch.route[0], "worker_id", "w" * 129)), limit),
        "infinite loss": (changed(lambda h: setattr(h.microbatch, "loss_sum", math.inf)), bad),
        "a wait for ever": (changed(lambda h: setattr(h.microbatch, "waited_s", math.inf)), bad),
        "a wait of no number": (changed(lambda h: setattr(h.microbatch, "waited_s", math.nan)), bad),
        "a negative wait": (changed(lambda h: setattr(h.microbatch, "waited_s", -1.0)), bad),
        "no denominator": (changed(lambda h: setattr(h.microbatch, "loss_denominator", math.nan)), bad),
    }


@pytest.mark.parametrize("name", lies())
async def test_lying_headers_are_refused_before_anything_is_allocated(name: str) -> None:
    header, refusal = lies()[name]

    async def never_read() -> AsyncIterator[data_pb2.Frame]:
        yield data_pb2.Frame(header=header)
        raise AssertionError("the body was asked for")

    with pytest.raises(FrameError) as caught:
        await read_transfer(never_read(), limit_bytes=LIMIT, subject_limits=MICROBATCH)
    assert caught.value.refusal == refusal
    assert len(str(caught.value)) < 400


async def test_exchange_and_state_subjects_are_bounded_too() -> None:
    group = make_header(ExchangeHeader(1, 0, "g" * 129, 0, 0), [])
    block = make_header(data_pb2.StateHeader(block="b" * 129), [])
    for header, limits in ((group, EXCHANGE), (block, STATE)):
        with pytest.raises(FrameError, match="too long"):
            check_header(header, limit_bytes=1, subject_limits=limits)


@pytest.mark.parametrize("sha256", ["", "0" * 63, "G" * 64, "0" * 65])
def test_a_pairs_payload_names_a_digest_and_has_two_tensors_at_most(sha256: str) -> None:
    with pytest.raises(FrameError, match="malformed SHA-256"):
        check_header(
            make_header(dataclasses.replace(PAIR_SUBJECT, sha256=sha256), []),
            limit_bytes=1,
            subject_limits=PAIR,
        )
    tensors = [tensor_header(name, FLOAT32, (1,), 4) for name in ("z", "m", "n")]
    with pytest.raises(FrameError, match="at most 2"):
        check_header(make_header(PAIR_SUBJECT, tensors), limit_bytes=12, subject_limits=PAIR)


def test_the_limit_counts_decoded_bytes() -> None:
    """A hundred small codes must not become a tensor beyond the limit."""
    size = size_estimate("int8:128", (1000,)).most_bytes
    header = make_header(SUBJECT, [tensor_header("x", FLOAT32, (1000,), size, codec="int8:128")])
    check_header(header, limit_bytes=4000, subject_limits=MICROBATCH)
    with pytest.raises(FrameError, match="limit 3999") as caught:
        check_header(header, limit_bytes=3999, subject_limits=MICROBATCH)
    assert caught.value.refusal == Refusal.LIMIT


def test_a_promise_allocates_nothing() -> None:
    header = raw_header(1 << 40)
    tracemalloc.start()
    try:
        body = Body(header)
        body.feed(data_pb2.Frame(chunk=bytes(CHUNK_BYTES)))
        assert tracemalloc.get_traced_memory()[1] < 4 * CHUNK_BYTES
    finally:
        tracemalloc.stop()
    assert body.missing_bytes == (1 << 40) - CHUNK_BYTES


# ---------------------------------------------------------------------- broken streams


def chunk(size: int) -> data_pb2.Frame:
    return data_pb2.Frame(chunk=bytes(size))


def start(*sizes: int) -> data_pb2.Frame:
    return data_pb2.Frame(header=raw_header(*sizes))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "empty"),
        ([data_pb2.Frame()], "begin with a header"),
        ([chunk(5)], "begin with a header"),
        ([start(5)], "5 bytes early"),
        ([start(5), chunk(4)], "before the end"),
        ([start(9000), chunk(8999)], "1 bytes early"),
        ([start(5), chunk(6)], "more bytes"),
        ([start(5), chunk(5), chunk(1)], "more bytes"),
        ([start(0), chunk(1)], "more bytes"),
        ([start(5), chunk(5), chunk(0)], "before the end"),
        ([start(0), chunk(0)], "before the end"),
        ([start(5), start(5), chunk(5)], "without a chunk"),
        ([start(5), data_pb2.Frame(), chunk(5)], "without a chunk"),
        ([start(2 * CHUNK_BYTES), chunk(CHUNK_BYTES + 1)], "at most"),
        ([start(10_000), *[chunk(1)] * 10_000], "before the end"),
        ([start(10_000), chunk(0)], "before the end"),
    ],
)
async def test_broken_streams_are_refused(broken: list[data_pb2.Frame], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        await read_all(broken)


async def test_an_endless_stream_is_cut_off() -> None:
    drawn = 0

    async def endless() -> AsyncIterator[data_pb2.Frame]:
        nonlocal drawn
        yield start(2 * CHUNK_BYTES)
        while True:
            drawn += 1
            yield chunk(CHUNK_BYTES)

    with pytest.raises(FrameError, match="more bytes"):
        await read_transfer(endless(), limit_bytes=LIMIT, subject_limits=MICROBATCH)
    assert drawn == 3


def test_frames_needs_no_torch() -> None:
    code = (
        "import sys, starlings_protos.frames;"
        "sys.exit(any(m.split('.')[0] in ('torch', 'numpy', 'grpc') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
