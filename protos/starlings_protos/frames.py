"""Tensor transfers on the data plane: a Header frame, then the tensors' bytes in order, in chunks to 1 MiB.

Reading has two phases, so that a header can be judged (is there room, is it stale) before its bytes are
taken:

    header = await read_header(frames, limit_bytes=..., subject_limits=MICROBATCH)
    subject = subject_of(header)                    # a record of messages.py; admission decides on it
    buffers = await read_body(header, frames)

A header that lies is refused before anything is allocated, and buffers grow only with the bytes that arrive.
Bytes only:
torch is not imported here. Committed state has rules of its own on top (order, hashes, resuming): see
state_transfer.py.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from starlings_compression.errors import SpecError
from starlings_compression.sizes import size_estimate
from starlings_protos import convert, data_pb2
from starlings_protos.buffers import Arriving
from starlings_protos.errors import RefusedError
from starlings_protos.group_messages import GroupHeader
from starlings_protos.messages import ExchangeHeader, MicrobatchHeader, Refusal
from starlings_protos.pair_messages import PairHeader

CHUNK_BYTES = 1 << 20
# Chunks below this are allowed at a transfer's end only: a peer that drips bytes must not keep us busy.
SMALLEST_CHUNK_BYTES = 4 << 10
DIMENSION_LIMIT = 8
NAME_LIMIT_CHARACTERS = 512
ID_LIMIT_CHARACTERS = 128
ROUTE_LIMIT_HOPS = 1024
# What a microbatch may claim to have waited: far more than anybody waits, and sums of it stay finite.
WAIT_MOST_S = 1e6
# Header and shape of a Packed come on top of the tensor itself (see starlings_compression.layout).
ALLOWANCE_BYTES_PER_TENSOR = 1 << 10
# Products of dimensions stay below this, also with a zero among them.
ELEMENT_LIMIT = 1 << 48
RAW_CODEC = "exact"

ITEM_BYTES: dict[int, int] = {
    data_pb2.DATA_TYPE_FLOAT32: 4,
    data_pb2.DATA_TYPE_FLOAT16: 2,
    data_pb2.DATA_TYPE_BFLOAT16: 2,
    data_pb2.DATA_TYPE_INT64: 8,
    data_pb2.DATA_TYPE_INT32: 4,
    data_pb2.DATA_TYPE_UINT8: 1,
    data_pb2.DATA_TYPE_BOOL: 1,
    data_pb2.DATA_TYPE_FLOAT64: 8,
}

Buffer = bytes | bytearray | memoryview


class FrameError(RefusedError):
    """The other side sent a transfer that is malformed (lying header, short, long) or beyond a limit.

    `refusal` is what to answer: MALFORMED or LIMIT.
    """

    def __init__(self, message: str, refusal: Refusal = Refusal.MALFORMED) -> None:
        super().__init__(refusal, message)


@dataclass(frozen=True, slots=True)
class SubjectLimits:
    """What a call expects: the name of the header's subject, and how many tensors it may have at most."""

    subject: str
    tensors: int


MICROBATCH = SubjectLimits("microbatch", tensors=16)
EXCHANGE = SubjectLimits("exchange", tensors=16)
# A block of a large mixture of experts has some hundreds of tensors, and three times that with its optimizer.
STATE = SubjectLimits("state", tensors=16384)
# Weights, and the outer momentum where it travels.
PAIR = SubjectLimits("pair", tensors=2)
# A part; of an anchor weights and momentum.
GROUP = SubjectLimits("group", tensors=2)
Subject = MicrobatchHeader | ExchangeHeader | PairHeader | GroupHeader


# ---------------------------------------------------------------------- writing


def tensor_header(
    name: str,
    data_type: int,
    shape: Sequence[int],
    byte_count: int,
    *,
    codec: str = RAW_CODEC,
    sha256: str = "",
) -> data_pb2.TensorHeader:
    """Describes one tensor; `data_type` is a number of data_pb2.DataType, `byte_count` the bytes on the
    wire.
    """
    return data_pb2.TensorHeader(
        name=name,
        data_type=data_pb2.DataType.ValueType(data_type),
        shape=shape,
        byte_count=byte_count,
        codec=codec,
        sha256=sha256,
    )


def make_header(
    subject: Subject | data_pb2.StateHeader,
    tensors: Sequence[data_pb2.TensorHeader],
) -> data_pb2.Header:
    """The header of a transfer of `tensors`, in this order."""
    header = data_pb2.Header(tensors=tensors, total_bytes=sum(t.byte_count for t in tensors))
    match subject:
        case MicrobatchHeader():
            convert.to_proto(subject, header.microbatch)
        case ExchangeHeader():
            convert.to_proto(subject, header.exchange)
        case PairHeader():
            convert.to_proto(subject, header.pair)
        case GroupHeader():
            convert.to_proto(subject, header.group)
        case _:
            header.state.CopyFrom(subject)
    return header


def write_transfer(
    header: data_pb2.Header, buffers: Sequence[Buffer], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[data_pb2.Frame]:
    """The frames of a transfer. Each byte is copied once, into its chunk; small tensors share chunks.

    Buffers are read while the frames are drawn: they must not change before the last one.

    Raises:
        ValueError: the buffers are not what the header says (our own mistake).
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if [len(view) for view in views] != [tensor.byte_count for tensor in header.tensors]:
        raise ValueError("the buffers' lengths differ from the header's byte counts")
    if not SMALLEST_CHUNK_BYTES <= chunk_bytes <= CHUNK_BYTES:
        raise ValueError(f"chunks must have {SMALLEST_CHUNK_BYTES} to {CHUNK_BYTES} bytes")
    return _frames(header, views, chunk_bytes)


def _frames(header: data_pb2.Header, views: list[memoryview], chunk_bytes: int) -> Iterator[data_pb2.Frame]:
    yield data_pb2.Frame(header=header)
    pieces: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0:
                yield data_pb2.Frame(chunk=b"".join(pieces))
                pieces, room = [], chunk_bytes
    if pieces:
        yield data_pb2.Frame(chunk=b"".join(pieces))


# ---------------------------------------------------------------------- reading


async def read_header(
    frames: AsyncIterable[data_pb2.Frame], *, limit_bytes: int, subject_limits: SubjectLimits
) -> data_pb2.Header:
    """The checked header of a transfer: its first frame. Nothing of the body is read.

    Args:
        limit_bytes: what all tensors together may take, decoded.
        subject_limits: what the call expects.

    Raises:
        FrameError: no header, or one that `check_header` refuses.
    """
    try:
        frame = await anext(aiter(frames))
    except StopAsyncIteration:
        raise FrameError("the transfer is empty") from None
    if frame.WhichOneof("body") != "header":
        raise FrameError("the transfer does not begin with a header")
    check_header(frame.header, limit_bytes=limit_bytes, subject_limits=subject_limits)
    return frame.header


async def read_body(header: data_pb2.Header, frames: AsyncIterable[data_pb2.Frame]) -> list[memoryview]:
    """The bytes of each tensor of a checked header, up to the end of the stream.

    Raises:
        FrameError: too few bytes, too many, or frames that are no chunks.
    """
    body = Body(header)
    async for frame in frames:
        body.feed(frame)
    return body.finish()


async def read_transfer(
    frames: AsyncIterable[data_pb2.Frame], *, limit_bytes: int, subject_limits: SubjectLimits
) -> tuple[data_pb2.Header, list[memoryview]]:
    """Both phases at once, where nothing has to be decided between them.

    Raises:
        FrameError: as `read_header` and `read_body`.
    """
    header = await read_header(frames, limit_bytes=limit_bytes, subject_limits=subject_limits)
    return header, await read_body(header, frames)


class Body:
    """Collects the chunks of one transfer whose header was checked."""

    def __init__(self, header: data_pb2.Header) -> None:
        self._sizes = [tensor.byte_count for tensor in header.tensors]
        self._missing = sum(self._sizes)
        # They grow with what arrives: a header alone costs nothing, whatever it promises.
        self._buffers = [Arriving(size) for size in self._sizes]
        self._current = 0
        self._ended = False

    @property
    def missing_bytes(self) -> int:
        return self._missing

    def feed(self, frame: data_pb2.Frame) -> None:
        """Takes the next frame. Raises FrameError."""
        if frame.WhichOneof("body") != "chunk":
            raise FrameError("a frame without a chunk within a transfer")
        # Reading the field copies it, so once only.
        chunk = frame.chunk
        if len(chunk) > CHUNK_BYTES:
            raise FrameError(
                f"a chunk of {len(chunk)} bytes; at most {CHUNK_BYTES} are allowed", Refusal.LIMIT
            )
        if len(chunk) > self._missing:
            raise FrameError("more bytes than the header says")
        if len(chunk) < min(SMALLEST_CHUNK_BYTES, self._missing) or not chunk:
            raise FrameError(f"a chunk of {len(chunk)} bytes before the end of the transfer")
        self._missing -= len(chunk)
        view = memoryview(chunk)
        while view:
            buffer = self._buffers[self._current]
            view = view[buffer.add(view) :]
            if not buffer.missing_bytes:
                self._current += 1

    def finish(self) -> list[memoryview]:
        """The tensors' bytes, at the end of the stream. Raises FrameError when some are missing."""
        if self._missing:
            raise FrameError(f"the transfer ended {self._missing} bytes early")
        return [buffer.view() for buffer in self._buffers]


def subject_of(header: data_pb2.Header) -> Subject:
    """The subject of a microbatch's, an exchange's, a pair's or a group's transfer as a record.

    Raises:
        FrameError: another subject, a missing part, or an unknown enum number.
    """
    try:
        match header.WhichOneof("subject"):
            case "microbatch":
                return convert.from_proto(header.microbatch, MicrobatchHeader)
            case "exchange":
                return convert.from_proto(header.exchange, ExchangeHeader)
            case "pair":
                return convert.from_proto(header.pair, PairHeader)
            case "group":
                return convert.from_proto(header.group, GroupHeader)
    except ValueError as error:
        raise FrameError(str(error)) from None
    raise FrameError("the transfer is about no microbatch, exchange, pair or group")


# ---------------------------------------------------------------------- checks


def check_header(header: data_pb2.Header, *, limit_bytes: int, subject_limits: SubjectLimits) -> None:
    """Everything that can be known to be wrong from the header alone.

    Raises:
        FrameError: MALFORMED when the header contradicts itself, LIMIT when it asks for too much.
    """
    subject = header.WhichOneof("subject")
    if subject != subject_limits.subject:
        raise FrameError(f"a transfer about {subject or 'nothing'}, expected {subject_limits.subject}")
    _check_subject(getattr(header, subject))
    if len(header.tensors) > subject_limits.tensors:
        raise FrameError(
            f"{len(header.tensors)} tensors; at most {subject_limits.tensors} are allowed", Refusal.LIMIT
        )
    decoded_bytes = sum(_check_tensor(tensor) for tensor in header.tensors)
    if len({tensor.name for tensor in header.tensors}) < len(header.tensors):
        raise FrameError("two tensors have the same name")
    if header.total_bytes != sum(tensor.byte_count for tensor in header.tensors):
        raise FrameError("the tensors' byte counts do not add up to the total")
    allowance_bytes = ALLOWANCE_BYTES_PER_TENSOR * len(header.tensors)
    if decoded_bytes > limit_bytes or header.total_bytes > limit_bytes + allowance_bytes:
        raise FrameError(
            f"{decoded_bytes} bytes of tensors ({header.total_bytes} on the wire), limit {limit_bytes}",
            Refusal.LIMIT,
        )


def _check_tensor(tensor: data_pb2.TensorHeader) -> int:
    """Bytes that the decoded tensor takes."""
    name = tensor.name[:80]
    item_bytes = ITEM_BYTES.get(tensor.data_type)
    if item_bytes is None:
        raise FrameError(f"tensor {name!r}: unknown data type {tensor.data_type}")
    if not 0 < len(tensor.name) <= NAME_LIMIT_CHARACTERS:
        raise FrameError(f"a tensor name of {len(tensor.name)} characters")
    if len(tensor.shape) > DIMENSION_LIMIT:
        raise FrameError(
            f"tensor {name!r}: {len(tensor.shape)} dimensions; at most {DIMENSION_LIMIT} are allowed"
        )
    # Zeros count as one here: a shape of (0, 2**63) holds nothing and still overflows strides.
    if math.prod(max(length, 1) for length in tensor.shape) > ELEMENT_LIMIT:
        raise FrameError(f"tensor {name!r}: the shape is beyond any tensor", Refusal.LIMIT)
    if tensor.sha256 and not is_sha256(tensor.sha256):
        raise FrameError(f"tensor {name!r}: a malformed SHA-256")
    elements = math.prod(tensor.shape)
    least = most = elements * item_bytes
    if tensor.codec != RAW_CODEC:
        try:
            size = size_estimate(tensor.codec, tensor.shape, item_bytes=item_bytes)
        except SpecError as error:
            raise FrameError(f"tensor {name!r}: {error}") from None
        least, most = size.least_bytes, size.most_bytes
    if not least <= tensor.byte_count <= most:
        expected = most if least == most else f"{least} to {most}"
        raise FrameError(
            f"tensor {name!r}: {tensor.byte_count} bytes where shape, type and codec ask for {expected}"
        )
    return elements * item_bytes


def _check_subject(subject: Message) -> None:
    """Lengths of texts and lists, and numbers that must be numbers. What they mean is for admission to
    judge.
    """
    match subject:
        case data_pb2.MicrobatchHeader():
            if len(subject.route) > ROUTE_LIMIT_HOPS:
                raise FrameError(f"a route of {len(subject.route)} hops", Refusal.LIMIT)
            texts = [hop.worker_id for hop in subject.route]
            if not (math.isfinite(subject.loss_denominator) and math.isfinite(subject.loss_sum)):
                raise FrameError("a loss that is not finite")
            if not 0 <= subject.waited_s <= WAIT_MOST_S:
                raise FrameError(f"a wait of {subject.waited_s} s")
        case data_pb2.ExchangeHeader():
            texts = [subject.group]
        case data_pb2.StateHeader():
            texts = [subject.block]
        case data_pb2.PairHeader() | data_pb2.GroupHeader():
            texts = []
            if not is_sha256(subject.sha256):
                raise FrameError("a payload with a malformed SHA-256")
        case _:
            raise FrameError("an unknown subject")
    if any(len(text) > ID_LIMIT_CHARACTERS for text in texts):
        raise FrameError("an id is too long", Refusal.LIMIT)


def is_sha256(text: str) -> bool:
    """Whether `text` is one in hex, as we write it."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
