"""Everything that parses bytes from outside: any bytes give a valid result or the parser's own error, nothing else.

Each parser below gets 10,000 byte strings: random ones, and valid ones that were damaged (bits, cuts,
splices; for
JSON also changes of the tree that keep it JSON). A parser's errors are the coded ones that its docstring
names; a
protobuf message that does not parse at all is refused by gRPC itself, which is DecodeError here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
import json
import random
import struct
import tracemalloc
import typing
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from starlings_protos import common_pb2, control_pb2, convert, data_pb2, frames, messages, pipes, process_pb2
from starlings_protos.messages import Span, Stage, WorkerId

INPUTS = 10_000
MEASURED_INPUTS = 1_000


@dataclasses.dataclass(frozen=True)
class Parser:
    """A parser, what it may raise, and valid inputs to damage."""

    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    samples: tuple[bytes, ...]
    json: bool = False


BUILDERS: dict[str, Callable[[], Parser]] = {}


def parser(builder: Callable[[], Parser]) -> Callable[[], Parser]:
    """Built on demand, so that one part's import error fails that part's test only."""
    BUILDERS[builder.__name__] = builder
    return builder


# ---------------------------------------------------------------------- damage


def damaged(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 40))
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del changed[at : at + size]
            case 3:
                changed[at:at] = rng.randbytes(size)
            case 4:
                other = rng.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + size]
            case _:
                changed[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\xff" * 4, b"\x80" * 9 + b"\x01"))
    return bytes(changed if rng.random() < 0.9 else changed[: rng.randrange(len(changed) + 1)])


ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "x" * 3000, "\ud800", "\x00", "../../etc", "int8:7",
    "F32", [],
    {}, [[]], [{}], {"": None}, [1] * 3000, {"a": {"b": {"c": []}}},
)  # fmt: skip


def odd_tree(rng: random.Random, tree: Any) -> Any:
    """`tree` with one place changed: replaced, removed, doubled, or a stranger added."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(sorted(tree))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in tree.items() if k != key}
            case 1:
                return {**tree, rng.choice(("", "stranger", key + "x", "\udfff")): rng.choice(ODD_VALUES)}
            case _:
                return {**tree, key: odd_tree(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        match rng.randrange(6):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return tree + tree[at : at + 1]
            case _:
                return [*tree[:at], odd_tree(rng, tree[at]), *tree[at + 1 :]]
    return rng.choice(ODD_VALUES)


NESTED = (b"[" * 100_000, b'{"a":' * 50_000, b"[" * 500 + b"]" * 500, b'{"format":1,"blocks":' + b"[" * 9_000)


def any_input(rng: random.Random, target: Parser) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        return rng.randbytes(rng.choice((0, 1, 2, 5, 16, 64, 64, 500)))
    sample = rng.choice(target.samples)
    if target.json and kind < 0.8:
        tree = json.loads(sample)
        for _ in range(rng.choice((1, 1, 2))):
            tree = odd_tree(rng, tree)
        return json.dumps(tree).encode()
    if target.json and kind < 0.801:
        return rng.choice(NESTED)
    return damaged(rng, sample)


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
    messages.Heartbeat(3, 2, {"forward": 10}, {"compute": 0.5}),
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


@parser
def pipe_async() -> Parser:
    loop = asyncio.new_event_loop()

    async def read(data: bytes) -> object:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        found = []
        while (message := await pipes.read(stream, process_pb2.FromEngine)) is not None:
            found.append(message)
        return found

    samples = (pipes.pack(PIPE_MESSAGES[1]), pipes.pack(PIPE_MESSAGES[1]) * 3)
    return Parser(lambda data: loop.run_until_complete(read(data)), (pipes.PipeError,), samples)


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
    loop = asyncio.new_event_loop()
    subjects: tuple[Any, ...] = (
        messages.MicrobatchHeader(KEY, 1, (HOP, HOP), 512.0, 3),
        messages.ExchangeHeader(5, 1, "stage:0", 2, 3),
        data_pb2.StateHeader(version=3, block="layers.0"),
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
        for limits in (frames.MICROBATCH, frames.EXCHANGE, frames.STATE):
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

    return Parser(lambda data: loop.run_until_complete(read(data)), (frames.FrameError, DecodeError), samples)


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


# ---------------------------------------------------------------------- identity


@parser
def invite() -> Parser:
    from starlings_protos.invite import Address, Invite, InviteError, format_invite, parse_invite

    sample = Invite((Address("host.example", 7701),), "job", "p" * 43, "i" * 10, "s" * 32, 1_900_000_000)
    text = format_invite(sample).encode()
    return Parser(lambda data: parse_invite(data.decode("utf-8", "surrogateescape")), (InviteError,), (text,))


@parser
def certificate_request() -> Parser:
    from starlings_protos.errors import PeerFault
    from starlings_protos.identity import make_csr, new_key, read_csr

    return Parser(read_csr, (PeerFault,), (make_csr(new_key()),))


@parser
def public_key() -> Parser:
    from starlings_protos.errors import PeerFault
    from starlings_protos.identity import new_key, public_key_from_der, spki_der

    return Parser(public_key_from_der, (PeerFault,), (spki_der(new_key().public_key()),))


@parser
def private_key() -> Parser:
    from starlings_protos.errors import UsageError
    from starlings_protos.identity import key_from_pem, key_to_pem, new_key

    return Parser(key_from_pem, (UsageError,), (key_to_pem(new_key()),))


# ---------------------------------------------------------------------- the job's files


@parser
def job_json() -> Parser:
    from starlings_job.errors import JobFileError
    from starlings_job.spec import JobSpec, parse_job

    job = parse_job('[job]\nname = "demo"\ntokens = 1000\n[model]\npreset = "tiny"\n')
    return Parser(JobSpec.from_json, (JobFileError,), (job.to_json(),), json=True)


@parser
def job_toml() -> Parser:
    from starlings_job.errors import JobFileError
    from starlings_job.spec import parse_job

    text = b'[job]\nname = "demo"\ntokens = 1000\n[model]\npreset = "tiny"\n[train]\nlr = 1e-3\nbatch = 16\n'
    return Parser(lambda data: parse_job(data.decode("latin-1")), (JobFileError,), (text,))


@parser
def profile_json() -> Parser:
    from starlings_job.profile import BlockProfile, Profile, ProfileError

    def filled(cls: Any, **given: Any) -> Any:
        hints = typing.get_type_hints(cls)
        values = {f.name: 7 if hints[f.name] is int else "layer" for f in dataclasses.fields(cls)}
        return cls(**{**values, **given})

    profile = filled(Profile, blocks=(filled(BlockProfile), filled(BlockProfile, name="head")))
    return Parser(Profile.from_json, (ProfileError,), (profile.to_json(),), json=True)


@parser
def dataset_json() -> Parser:
    from starlings_job.errors import JobFileError
    from starlings_job.records import DatasetMeta

    meta = DatasetMeta("tokens", 100, 10, 128, 256, stride_tokens=128, unigram_entropy=3.0)
    return Parser(DatasetMeta.from_json, (JobFileError,), (meta.to_json().encode(),), json=True)


@parser
def model_json() -> Parser:
    from starlings_job.description import ModelDescription, describe
    from starlings_job.errors import JobFileError
    from starlings_job.presets import PRESETS

    samples = tuple(
        describe(PRESETS[name].family, PRESETS[name].config, name).to_json().encode()
        for name in ("tiny", "shapes")
    )
    return Parser(ModelDescription.from_json, (JobFileError,), samples, json=True)


@parser
def checkpoint_manifest() -> Parser:
    from starlings_job.checkpoint import BlockEntry, FileEntry, Manifest
    from starlings_job.errors import CheckpointError

    file = FileEntry("layers.0.safetensors", 100, "ab" * 32)
    manifest = Manifest(3, {"layers.0": BlockEntry("cd" * 32, file, None)}, {"tokens": 5})
    return Parser(Manifest.from_json, (CheckpointError,), (manifest.to_json(),), json=True)


@parser
def safetensors_file() -> Parser:
    from starlings_job.errors import CheckpointError
    from starlings_job.safetensors_io import read_buffer, write_file
    from starlings_job.state import RawTensor

    buffer = io.BytesIO()
    write_file(buffer, {"weight": RawTensor("F32", (2, 3), memoryview(bytes(24)))})
    return Parser(read_buffer, (CheckpointError,), (buffer.getvalue(),))


# ---------------------------------------------------------------------- the coordinator's log


@parser
def log_record() -> Parser:
    from starlings_coordinator.core.records import PlanAdopted, RecordError, record_from_json, record_to_json

    record = PlanAdopted(1, (Stage(0, 1),), ((WorkerId("w1"), SPAN),), 2, 0, "enough workers")
    return Parser(record_from_json, (RecordError,), (record_to_json(record),), json=True)


@parser
def state_snapshot() -> Parser:
    from starlings_coordinator.core.records import RecordError
    from starlings_coordinator.core.state import Durable, snapshot_from_json, snapshot_to_json

    return Parser(snapshot_from_json, (RecordError,), (snapshot_to_json(Durable()),), json=True)


# ---------------------------------------------------------------------- the tests


@pytest.fixture(params=sorted(BUILDERS))
def built(request: pytest.FixtureRequest) -> tuple[str, Parser]:
    return request.param, BUILDERS[request.param]()


def test_any_bytes_give_a_result_or_a_coded_error(built: tuple[str, Parser]) -> None:
    name, target = built
    for sample in target.samples:
        target.parse(sample)
    rng = random.Random(name)
    refused = 0
    for _ in range(INPUTS):
        data = any_input(rng, target)
        try:
            target.parse(data)
        except target.errors:
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error} for {data[:400]!r}")
    assert refused > INPUTS // 10


def test_errors_can_be_shown_and_memory_stays_flat(built: tuple[str, Parser]) -> None:
    name, target = built
    rng = random.Random(f"{name} again")

    def run(count: int) -> None:
        for _ in range(count):
            try:
                target.parse(any_input(rng, target))
            except target.errors as error:
                str(error).encode("utf-8", "backslashreplace")

    # Caches that are bounded by design fill first.
    run(MEASURED_INPUTS)
    gc.collect()
    tracemalloc.start()
    try:
        run(MEASURED_INPUTS)
        gc.collect()
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1 << 20
    assert peak_bytes < 32 << 20
