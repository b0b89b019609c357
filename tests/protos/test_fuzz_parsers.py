"""What arrives over the network: any bytes give a valid result or a coded error (see tests/support/fuzzing.py).

A protobuf message that does not parse at all is refused by gRPC itself, which is DecodeError here.
"""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from starlings_protos import (
    common_pb2,
    control_pb2,
    convert,
    data_pb2,
    frames,
    messages,
    pair_messages,
    pipes,
    process_pb2,
)
from starlings_protos.messages import Span, Stage, WorkerId
from support.fuzzing import Builders, Parser, check_memory, check_parser

BUILDERS: Builders = {}


def parser(builder: Callable[[], Parser]) -> Callable[[], Parser]:
    """Built on demand, so that one part's import error fails that part's test only."""
    BUILDERS[builder.__name__] = builder
    return builder


# ---------------------------------------------------------------------- protobuf messages and pipes

SPAN = Span(0, 1)
KEY = messages.MicrobatchKey(messages.LeaseKind.TRAIN, 5, 1, 2)
HOP = messages.Hop(WorkerId("w0123456789abcdef"), 0, 1)
PEER = messages.Peer(WorkerId("w0123456789abcdef"), ("127.0.0.1:7710",), SPAN, 3, (0.5,), (1.0,), 4)
MEMBER = messages.ExchangeMember(WorkerId("w0123456789abcdef"), 1.0, 0.5)
TO_COORDINATOR = (
    messages.Hello(
        WorkerId("w0123456789abcdef"), 1, 1, "0.1.0", "ab" * 32, "cpu", "host", "site", "eu", "cpu"
    ),
    messages.Heartbeat(3, 2),
    messages.ProbeReport({"layer": 0.1}, {"layer": 0.2}, 1 << 30, ("127.0.0.1:7710",)),
    messages.Ready(1, 2, {"layers.0": "ab" * 32}),
    messages.MicrobatchDone(KEY, (HOP,), 12.5, 512),
    messages.Prepared(5, 1, (messages.PreparedGroup("stage:0", (0, 1), 77, 0.25),)),
)
TO_WORKER = (
    messages.Welcome(1, 2, b"{}", "ab" * 32, 2.0, b"der", 1.7e9, b"{}", True),
    messages.Assignment(
        1, (Stage(0, 1), Stage(2, 3)), SPAN, 0, (PEER,), (PEER,), 4, False, "all",
        (messages.GossipPeer(WorkerId("w1"), "stage:0", 1.0),), 9, 5, 1, 1 << 20,
    ),
    messages.LeaseGrant((messages.Lease(KEY, (1, 2), 512.0, 60.0, b"text"),)),
    messages.ExchangeOpened(5, 1, (messages.ExchangeGroup("stage:0", (MEMBER,)),), 30.0),
    messages.Refused(messages.Refusal.VERSION, "upgrade"),
)  # fmt: skip


def wire(record: Any, message: Message) -> bytes:
    return convert.to_proto(record, message).SerializeToString()


@parser
def convert_to_coordinator() -> Parser:
    return Parser(
        lambda data: convert.body_from_proto(
            control_pb2.ToCoordinator.FromString(data), messages.ToCoordinator
        ),
        (DecodeError, ValueError),
        tuple(
            convert.body_to_proto(r, control_pb2.ToCoordinator()).SerializeToString() for r in TO_COORDINATOR
        ),
    )


@parser
def convert_to_worker() -> Parser:
    return Parser(
        lambda data: convert.body_from_proto(control_pb2.ToWorker.FromString(data), messages.ToWorker),
        (DecodeError, ValueError),
        tuple(convert.body_to_proto(r, control_pb2.ToWorker()).SerializeToString() for r in TO_WORKER),
    )


@parser
def convert_plan_request() -> Parser:
    worker = messages.PlanWorker(WorkerId("w1"), {"layer": 0.1}, {"layer": 0.2}, 1 << 30)
    request = messages.PlanRequest(1, (worker,), 2, 4, 8, 4.0, (Stage(0, 1),), b"{}")
    return Parser(
        lambda data: convert.from_proto(process_pb2.PlanRequest.FromString(data), messages.PlanRequest),
        (DecodeError, ValueError),
        (wire(request, process_pb2.PlanRequest()),),
    )


@parser
def convert_plan_reply() -> Parser:
    planned = messages.PlannedWorker(WorkerId("w1"), SPAN, 4, True, 1 << 20)
    reply = messages.PlanReply(1, (Stage(0, 1),), (planned,), 2.0, 3.0, "compute")
    return Parser(
        lambda data: convert.from_proto(process_pb2.PlanReply.FromString(data), messages.PlanReply),
        (DecodeError, ValueError),
        (wire(reply, process_pb2.PlanReply()),),
    )


@parser
def convert_common() -> Parser:
    def parse(data: bytes) -> object:
        convert.from_proto(common_pb2.MicrobatchKey.FromString(data), messages.MicrobatchKey)
        return convert.from_proto(common_pb2.Peer.FromString(data), messages.Peer)

    return Parser(parse, (DecodeError, ValueError), (wire(PEER, common_pb2.Peer()),))


PIPE_MESSAGES = (
    process_pb2.ToEngine(link=process_pb2.ControlLink(up=True)),
    process_pb2.FromEngine(log=process_pb2.LogLine(level="info", text="hello")),
    process_pb2.ToPlanner(plan=process_pb2.PlanRequest(request_id=1, profile_json=b"{}")),
    process_pb2.FromPlanner(plan=process_pb2.PlanReply(request_id=1, binding="compute")),
    process_pb2.ToKeeper(save=process_pb2.SaveCheckpoint(version=3, job_json=b"{}")),
    process_pb2.FromKeeper(saved=process_pb2.CheckpointSaved(version=3, path="/tmp/x")),
)


@parser
def pipe_blocking() -> Parser:
    def parse(data: bytes) -> object:
        for message in PIPE_MESSAGES:
            stream = io.BytesIO(data)
            try:
                while pipes.read_blocking(stream, type(message)) is not None:
                    pass
            except pipes.PipeError:
                pass
        return pipes.read_blocking(io.BytesIO(data), process_pb2.FromEngine)

    return Parser(parse, (pipes.PipeError,), tuple(pipes.pack(m) for m in PIPE_MESSAGES[1:2]))


def run(coroutine: Coroutine[Any, Any, object]) -> object:
    """The result of a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


@parser
def pipe_async() -> Parser:
    # The reader wants a loop and never waits for one: all its data is there.
    loop = asyncio.new_event_loop()
    loop.close()

    async def read(data: bytes) -> object:
        stream = asyncio.StreamReader(loop=loop)
        stream.feed_data(data)
        stream.feed_eof()
        found = []
        while (message := await pipes.read(stream, process_pb2.FromEngine)) is not None:
            found.append(message)
        return found

    samples = (pipes.pack(PIPE_MESSAGES[1]), pipes.pack(PIPE_MESSAGES[1]) * 3)
    return Parser(lambda data: run(read(data)), (pipes.PipeError,), samples)


# ---------------------------------------------------------------------- transfers and codecs


def transfer_bytes(header: data_pb2.Header, buffers: list[bytes]) -> bytes:
    """Frames one after another, each behind its length."""
    parts = [frame.SerializeToString() for frame in frames.write_transfer(header, buffers)]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def split_frames(data: bytes) -> list[data_pb2.Frame]:
    found, at = [], 0
    while at + 4 <= len(data) and len(found) < 50:
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data_pb2.Frame.FromString(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


@parser
def transfer_frames() -> Parser:
    subjects: tuple[Any, ...] = (
        messages.MicrobatchHeader(KEY, 1, (HOP, HOP), 512.0, 3),
        messages.ExchangeHeader(5, 1, "stage:0", 2, 3),
        data_pb2.StateHeader(version=3, block="layers.0"),
        pair_messages.PairHeader(1, 0, 7, 1, 2**63, "0" * 64),
    )
    tensors = [
        frames.tensor_header("hidden", data_pb2.DATA_TYPE_FLOAT32, (2, 3), 24),
        frames.tensor_header("records", data_pb2.DATA_TYPE_UINT8, (5,), 5, sha256="0" * 64),
    ]
    samples = tuple(
        transfer_bytes(frames.make_header(subject, tensors), [bytes(24), b"abcde"]) for subject in subjects
    )

    async def read(data: bytes) -> None:
        async def stream() -> Any:
            for frame in split_frames(data):
                yield frame

        last: Exception | None = None
        for limits in (frames.MICROBATCH, frames.EXCHANGE, frames.PAIR, frames.STATE):
            try:
                header, buffers = await frames.read_transfer(
                    stream(), limit_bytes=4096, subject_limits=limits
                )
            except frames.FrameError as error:
                last = error
                continue
            assert sum(map(len, buffers)) == header.total_bytes <= 4096 + 2048
            if limits is not frames.STATE:
                frames.subject_of(header)
            return
        assert last is not None
        raise last

    return Parser(lambda data: run(read(data)), (frames.FrameError, DecodeError), samples)


@parser
def state_inbox() -> Parser:
    from starlings_protos.state_transfer import (
        BlockInbox,
        ServedBlock,
        StateTensor,
        StateTransferError,
        state_frames,
    )

    tensor = StateTensor("param:weight", "F32", (2, 3), memoryview(bytes(24)))
    parts = [f.SerializeToString() for f in state_frames([ServedBlock(3, "layers.0", [tensor])])]
    sample = b"".join(struct.pack("<I", len(part)) + part for part in parts)

    def parse(data: bytes) -> object:
        inbox = BlockInbox(3, "layers.0", 4096)
        inbox.begin_transfer()
        for frame in split_frames(data):
            inbox.feed(frame)
        return inbox.tensors()

    return Parser(parse, (StateTransferError, DecodeError), (sample,))


@parser
def packed_tensor() -> Parser:
    import torch

    from starlings_compression.codec import decode_any, make_codec
    from starlings_compression.errors import CodecError

    tensor = torch.linspace(-1, 1, 150).view(15, 10)
    samples = tuple(make_codec(spec).encode(tensor) for spec in ("exact", "fp16", "int8:128", "int8:8"))

    def parse(data: bytes) -> object:
        decoded = decode_any(data, limit_bytes=4096)
        assert decoded.numel() * decoded.element_size() <= 4096
        return decoded

    return Parser(parse, (CodecError,), samples)


@parser
def codec_spec() -> Parser:
    from starlings_compression.errors import SpecError
    from starlings_compression.spec import parse_spec

    return Parser(
        lambda data: parse_spec(data.decode("latin-1")), (SpecError,), (b"int8:128", b"fp16", b"exact")
    )


# ---------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_any_bytes_give_a_result_or_a_coded_error(name: str) -> None:
    check_parser(name, BUILDERS[name](), share=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_many_more_bytes_do_too(name: str) -> None:
    check_parser(name, BUILDERS[name]())


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_errors_can_be_shown_and_memory_stays_flat(name: str) -> None:
    check_memory(name, BUILDERS[name]())
