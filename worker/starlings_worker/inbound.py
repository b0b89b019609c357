"""The data plane's servicer: who calls, may they, is there room; then the body, decoded and kept; then the
core is told.

A transfer's header is judged by the core (`WorkerCore.admit`) before its body is read. From an admission on,
exactly one of "arrived" and "aborted" reaches the core, whatever happens to the call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from math import prod
from typing import Any, NoReturn

import grpc.aio
import torch

from starlings_compression.errors import CodecError
from starlings_protos import convert, data_pb2, data_pb2_grpc, frames
from starlings_protos.assignments import CoordinatorClock
from starlings_protos.errors import RefusedError, abort
from starlings_protos.frames import FrameError
from starlings_protos.group_messages import GroupHeader
from starlings_protos.messages import (
    ExchangeHeader,
    MicrobatchHeader,
    Receipt,
    Refusal,
    WorkerId,
)
from starlings_protos.pace import Pace
from starlings_protos.pair_messages import PairHeader
from starlings_worker import wire
from starlings_worker.callers import Callers
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.events import (
    ArrivalAborted,
    Direction,
    Event,
    Leg,
    MicrobatchArrived,
    PartAborted,
    PartArrived,
)
from starlings_worker.core.groups.work import GroupAborted, GroupArrived
from starlings_worker.core.pairing.work import PairAborted, PairArrived, PairKey, PairMoved, WordTold
from starlings_worker.engine_life import Life
from starlings_worker.group_device import GroupDevice
from starlings_worker.group_transfers import check_group_payload
from starlings_worker.kept import Kept
from starlings_worker.links import ADMITTED_METADATA_KEY, STALL_S
from starlings_worker.meters import Meters
from starlings_worker.pair_device import PairDevice
from starlings_worker.pair_inbound import check_bytes, check_payload, word_of
from starlings_worker.pair_transfers import Moved
from starlings_worker.serving import STALLED_AFTER_S, StateServer
from starlings_worker.uplink import Uplink

Context = grpc.aio.ServicerContext[Any, Any]
_Frames = AsyncIterator[data_pb2.Frame]
# Bodies above this are decoded on another thread, so that the loop goes on meanwhile.
_DECODE_INLINE_BYTES = 512 << 10
PACE = Pace(STALL_S)
# What one peer may have under way at once, as a multiple of the job's largest transfer.
_IN_FLIGHT_TRANSFERS = 8
# The same for all peers together.
_IN_FLIGHT_TRANSFERS_IN_ALL = 64


class DataService(data_pb2_grpc.DataServicer):
    """One per engine process; serves whatever life there is."""

    def __init__(
        self,
        meters: Meters,
        pace: Pace = PACE,
        unread_s: float = STALLED_AFTER_S,
        uplink: Uplink | None = None,
    ) -> None:
        """
        Args:
            pace: what senders must keep to.
            unread_s: after this long without reading a reader of state is given up.
        """
        self._meters = meters
        self._pace = pace
        self._state = StateServer(lambda count: meters.sent("state", count), self._pushing, unread_s, uplink)
        self._life: Life | None = None
        self._clock = CoordinatorClock(0.0)
        self._in_flight: Counter[WorkerId] = Counter()
        self._callers = Callers()

    def serve(self, life: Life, clock: CoordinatorClock) -> None:
        """A new life: what was known of peers is forgotten."""
        self._life = life
        self._clock = clock
        self._callers = Callers()

    def _pushing(self) -> bool:
        return self._life is not None and self._life.links.pushes > 0

    def set_clock(self, clock: CoordinatorClock) -> None:
        self._clock = clock

    # ---------------------------------------------------------------- the rpcs

    async def Forward(self, request_iterator: _Frames, context: Context) -> data_pb2.Receipt:
        return await self._microbatch(Direction.FORWARD, request_iterator, context)

    async def Backward(self, request_iterator: _Frames, context: Context) -> data_pb2.Receipt:
        return await self._microbatch(Direction.BACKWARD, request_iterator, context)

    async def Contribute(self, request_iterator: _Frames, context: Context) -> data_pb2.Receipt:
        return await self._part(Leg.CONTRIBUTION, request_iterator, context)

    async def Aggregate(self, request_iterator: _Frames, context: Context) -> data_pb2.Receipt:
        return await self._part(Leg.AGGREGATE, request_iterator, context)

    async def Pair(self, request_iterator: _Frames, context: Context) -> data_pb2.Receipt:
        return await self._payload(request_iterator, context)

    async def Group(self, request_iterator: _Frames, context: Context) -> data_pb2.Receipt:
        return await self._group_payload(request_iterator, context)

    async def TellPair(self, request: data_pb2.PairWord, context: Context) -> data_pb2.Receipt:
        try:
            life, sender = self._caller(context)
            word = word_of(request)
            rejection = life.core.meeting.judge_word(word, sender, life.now_s)
            if rejection is not None:
                raise RefusedError(rejection.refusal, rejection.message)
        except RefusedError as error:
            await abort(context, error.refusal, str(error))
        life.deliver(WordTold(word, sender))
        return data_pb2.Receipt()

    async def FetchState(  # type: ignore[override]
        self, request: data_pb2.StateRequest, context: Context
    ) -> None:
        """Answered from snapshots and applied steps only, never from weights that a step may change meanwhile."""
        try:
            life, _ = self._caller(context)
            await self._state.serve(request, life.computer, context)
        except RefusedError as error:
            await abort(context, error.refusal, str(error))

    # ---------------------------------------------------------------- microbatches

    async def _microbatch(
        self, direction: Direction, incoming: _Frames, context: Context
    ) -> data_pb2.Receipt:
        try:
            life, sender = self._caller(context)
            source = _Timed(incoming, self._pace)
            header = await frames.read_header(
                source, limit_bytes=2 * self._limit_bytes(life), subject_limits=frames.MICROBATCH
            )
            subject = frames.subject_of(header)
            assert isinstance(subject, MicrobatchHeader)
            _check_microbatch(direction, header, life)
            answer = self._with_room(
                sender, header, life, lambda: life.core.admit(direction, subject, sender, life.now_s)
            )
        except (RefusedError, FrameError, TimeoutError) as error:
            await _refuse(context, error)
        if not isinstance(answer, Receipt):
            return await _settled(answer, context)

        def aborted(reason: str) -> Event:
            return ArrivalAborted(direction, subject, sender, reason)

        def keep(tensors: dict[str, _Body]) -> None:
            kept = life.computer.microbatches.entry(subject.key)
            _keep_microbatch(direction, kept, tensors)

        await self._take(life, sender, header, source, context, keep, aborted)
        life.deliver(MicrobatchArrived(direction, subject, sender))
        return convert.to_proto(answer, data_pb2.Receipt())  # type: ignore[return-value]

    # ---------------------------------------------------------------- exchange

    async def _part(self, leg: Leg, incoming: _Frames, context: Context) -> data_pb2.Receipt:
        try:
            life, sender = self._caller(context)
            source = _Timed(incoming, self._pace)
            exchange = life.computer.exchange
            if exchange is None:
                raise RefusedError(Refusal.NOT_HELD, "no span is loaded here yet")
            header = await frames.read_header(
                source,
                limit_bytes=max(4 * exchange.largest_vector, self._limit_bytes(life)),
                subject_limits=frames.EXCHANGE,
            )
            subject = frames.subject_of(header)
            assert isinstance(subject, ExchangeHeader)
            check_part(leg, header, subject, life)
            answer = self._with_room(
                sender, header, life, lambda: life.core.admit_part(leg, subject, sender, life.now_s)
            )
        except (RefusedError, FrameError, TimeoutError) as error:
            await _refuse(context, error)
        if not isinstance(answer, Receipt):
            return await _settled(answer, context)

        def aborted(reason: str) -> Event:
            return PartAborted(leg, subject, sender, reason)

        def keep(tensors: dict[str, _Body]) -> None:
            held = life.computer.exchange
            if held is not None:
                held.keep(leg, subject, sender, tensors["part"].data)

        await self._take(life, sender, header, source, context, keep, aborted)
        life.deliver(PartArrived(leg, subject, sender))
        return convert.to_proto(answer, data_pb2.Receipt())  # type: ignore[return-value]

    # ---------------------------------------------------------------- exchange in pairs

    async def _payload(self, incoming: _Frames, context: Context) -> data_pb2.Receipt:
        try:
            life, sender = self._caller(context)
            source = _Timed(incoming, self._pace)
            # Of the span that the swap is about, whatever is loaded before its bytes are here.
            device = _pair_device(life)
            header = await frames.read_header(
                source, limit_bytes=device.largest_bytes, subject_limits=frames.PAIR
            )
            subject = frames.subject_of(header)
            assert isinstance(subject, PairHeader)
            check_payload(header, subject, device)
            answer = self._with_room(
                sender, header, life, lambda: life.core.meeting.admit(subject, sender, life.now_s)
            )
        except (RefusedError, FrameError, TimeoutError) as error:
            await _refuse(context, error)
        if not isinstance(answer, Receipt):
            return await _settled(answer, context)
        key = PairKey.of(subject)
        source.moved = Moved(lambda: life.deliver(PairMoved(key)))

        def aborted(reason: str) -> Event:
            return PairAborted(subject, sender, reason)

        def keep(tensors: dict[str, _Body]) -> None:
            if not device.keep(key, {name: body.data for name, body in tensors.items()}):
                raise FrameError("the swap is over here", Refusal.STALE)

        await self._take(life, sender, header, source, context, keep, aborted)
        life.deliver(PairArrived(subject, sender))
        return convert.to_proto(answer, data_pb2.Receipt())  # type: ignore[return-value]

    # ---------------------------------------------------------------- exchange in groups

    async def _group_payload(self, incoming: _Frames, context: Context) -> data_pb2.Receipt:
        try:
            life, sender = self._caller(context)
            source = _Timed(incoming, self._pace)
            device = _group_device(life)
            header = await frames.read_header(
                source, limit_bytes=device.largest_bytes, subject_limits=frames.GROUP
            )
            subject = frames.subject_of(header)
            assert isinstance(subject, GroupHeader)
            check_group_payload(header, subject, device)
            answer = self._with_room(
                sender, header, life, lambda: life.core.meeting.admit(subject, sender, life.now_s)
            )
        except (RefusedError, FrameError, TimeoutError) as error:
            await _refuse(context, error)
        if not isinstance(answer, Receipt):
            return await _settled(answer, context)
        codecs = {tensor.name: tensor.codec for tensor in header.tensors}

        def aborted(reason: str) -> Event:
            return GroupAborted(subject, sender, reason)

        def keep(tensors: dict[str, _Body]) -> None:
            kept = {name: (body.data, codecs[name]) for name, body in tensors.items()}
            if not device.keep(subject, sender, kept):
                raise FrameError("the round is over here", Refusal.STALE)

        await self._take(life, sender, header, source, context, keep, aborted)
        life.deliver(GroupArrived(subject, sender))
        return convert.to_proto(answer, data_pb2.Receipt())  # type: ignore[return-value]

    # ---------------------------------------------------------------- shared steps

    def _caller(self, context: Context) -> tuple[Life, WorkerId]:
        """The life that serves, and who calls, with a valid assignment.

        Raises:
            RefusedError: nobody is served yet, or not this caller.
        """
        life = self._life
        if life is None or life.closed:
            raise RefusedError(Refusal.NOT_HELD, "this worker has not been welcomed by the coordinator yet")
        worker_id = self._callers.check(
            context,
            assignment_key_der=life.welcome.assignment_key_der,
            job=life.job.job.name,
            now_wall_s=self._clock.wall_s(life.now_s),
            named_by_plan=life.links.incarnation_of,
        )
        return life, worker_id

    def _limit_bytes(self, life: Life) -> int:
        assignment = life.core.assignment
        if assignment is None:
            raise RefusedError(Refusal.NOT_HELD, "this worker holds nothing at present")
        return assignment.tensor_limit_bytes

    def _with_room(
        self, sender: WorkerId, header: data_pb2.Header, life: Life, admit: Callable[[], Admission]
    ) -> Admission:
        """The core's answer, unless the sender has too much under way already."""
        largest = max(2 * self._limit_bytes(life), header.total_bytes)
        if self._in_flight.total() + header.total_bytes > _IN_FLIGHT_TRANSFERS_IN_ALL * largest:
            raise RefusedError(Refusal.BUSY, f"{self._in_flight.total()} bytes are under way here already")
        limit = _IN_FLIGHT_TRANSFERS * largest
        if self._in_flight[sender] + header.total_bytes > limit:
            raise RefusedError(Refusal.BUSY, f"{sender} has {self._in_flight[sender]} bytes under way here")
        return admit()

    async def _take(
        self,
        life: Life,
        sender: WorkerId,
        header: data_pb2.Header,
        source: _Timed,
        context: Context,
        keep: Callable[[dict[str, _Body]], None],
        aborted: Callable[[str], Event],
    ) -> None:
        """Reads, decodes and keeps an admitted transfer's body; tells the core when that fails."""
        self._in_flight[sender] += header.total_bytes
        try:
            await context.send_initial_metadata(((ADMITTED_METADATA_KEY, "1"),))
            buffers = await frames.read_body(header, source)
            if header.total_bytes > _DECODE_INLINE_BYTES:
                tensors = await asyncio.to_thread(_decode_all, header, buffers, life)
            else:
                tensors = _decode_all(header, buffers, life)
            keep(tensors)
        except (FrameError, CodecError, TimeoutError) as error:
            life.deliver(aborted(str(error) or "nothing came for too long"))
            await _refuse(context, error)
        except BaseException as error:
            # A cancelled call: the sender gave up, or died.
            life.deliver(aborted(f"the transfer broke off ({type(error).__name__})"))
            raise
        finally:
            self._in_flight[sender] -= header.total_bytes
            if self._in_flight[sender] <= 0:
                del self._in_flight[sender]


class _Timed:
    """Frames that keep a pace: neither a frozen sender nor one that drips bytes may keep a reserved slot."""

    def __init__(self, source: _Frames, pace: Pace) -> None:
        self._source = source.__aiter__()
        self._pace = pace
        self._begun_s = time.monotonic()
        self._received_bytes = 0
        # Told of every frame.
        self.moved: Callable[[], None] = lambda: None

    def __aiter__(self) -> _Timed:
        return self

    async def __anext__(self) -> data_pb2.Frame:
        async with asyncio.timeout(self._pace.wait_s(time.monotonic() - self._begun_s, self._received_bytes)):
            frame = await self._source.__anext__()
        self._received_bytes += frame.ByteSize()
        self.moved()
        return frame


class _Body:
    """One tensor of a transfer: its bytes, and what they decode to where that is wanted at once."""

    def __init__(self, data: memoryview, tensor: torch.Tensor | None) -> None:
        self.data = data
        self.tensor = tensor


# Names of the tensors that each call carries. Boundary tensors travel as `BoundaryCodecs` says.
_CARRIED = {Direction.FORWARD: {"records", "hidden"}, Direction.BACKWARD: {"gradient"}}


def _check_microbatch(direction: Direction, header: data_pb2.Header, life: Life) -> None:
    if {tensor.name for tensor in header.tensors} != _CARRIED[direction]:
        raise FrameError(f"a {direction.value} transfer must carry {sorted(_CARRIED[direction])}")
    for tensor in header.tensors:
        if tensor.name == "records":
            wanted, codec = data_pb2.DATA_TYPE_UINT8, frames.RAW_CODEC
        else:
            wanted = data_pb2.DATA_TYPE_FLOAT32
            codec = life.computer.boundary_codecs.of(direction, tuple(tensor.shape)).spec.text
        if tensor.data_type != wanted or tensor.codec != codec:
            raise FrameError(f"tensor {tensor.name!r} has the wrong type, or another codec than {codec}")


def check_part(leg: Leg, header: data_pb2.Header, subject: ExchangeHeader, life: Life) -> None:
    """What can be told of a part before its body is read, and before its round is open.

    Raises:
        FrameError, RefusedError: no pass of the group's exchange has such a part.
    """
    exchange = life.computer.exchange
    if exchange is None:
        raise RefusedError(Refusal.NOT_HELD, "no span is loaded here yet")
    size = exchange.part_limit(subject.group, subject.pass_number)
    if subject.pass_number and not size:
        raise FrameError(f"the exchange of group {subject.group[:80]} has no pass {subject.pass_number} here")
    if len(header.tensors) != 1 or header.tensors[0].name != "part":
        raise FrameError("an exchange transfer must carry one tensor, 'part'")
    (tensor,) = header.tensors
    if tensor.data_type != data_pb2.DATA_TYPE_FLOAT32 or len(tensor.shape) != 1:
        raise FrameError("a part must be a vector of float32")
    if not exchange.takes(leg, tensor.codec):
        raise FrameError(
            f"the job's codec is {exchange.codec_text}; no {leg.value} travels as {tensor.codec[:40]}"
        )
    if prod(tensor.shape) > size:
        raise FrameError(
            f"a part of {prod(tensor.shape)} elements of pass {subject.pass_number} of group "
            f"{subject.group[:80]}, which has {size} here",
            Refusal.LIMIT,
        )


def _decode_all(header: data_pb2.Header, buffers: list[memoryview], life: Life) -> dict[str, _Body]:
    """Boundary tensors are decoded now, so that a malformed one is the sender's failure, not a later
    computation's. A partner's payload is decoded when it is judged; here it must be what its header says.
    """
    bodies = {}
    subject = header.WhichOneof("subject")
    if subject in ("pair", "group"):
        check_bytes(getattr(header, subject).sha256, buffers)
    for tensor, data in zip(header.tensors, buffers, strict=True):
        decoded = None
        if tensor.name in ("hidden", "gradient"):
            shape = tuple(tensor.shape)
            direction = Direction.FORWARD if tensor.name == "hidden" else Direction.BACKWARD
            codec = life.computer.boundary_codecs.of(direction, shape)
            decoded = wire.decode(codec, data, shape, life.computer.device.torch)
        bodies[tensor.name] = _Body(data, decoded)
    return bodies


def _pair_device(life: Life) -> PairDevice:
    device = life.computer.pairs
    if device is None:
        raise RefusedError(Refusal.NOT_HELD, "no exchange in pairs runs here")
    return device


def _group_device(life: Life) -> GroupDevice:
    device = life.computer.groups
    if device is None:
        raise RefusedError(Refusal.NOT_HELD, "no exchange in groups runs here")
    return device


def _keep_microbatch(direction: Direction, kept: Kept, tensors: dict[str, _Body]) -> None:
    if direction is Direction.FORWARD:
        kept.records = tensors["records"].data
        kept.boundary = tensors["hidden"].tensor
    else:
        kept.output_gradient = tensors["gradient"].tensor


async def _settled(answer: Duplicate | Rejection, context: Context) -> data_pb2.Receipt:
    if isinstance(answer, Rejection):
        await abort(context, answer.refusal, answer.message)
    return convert.to_proto(answer.receipt, data_pb2.Receipt())  # type: ignore[return-value]


async def _refuse(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, RefusedError | FrameError):
        await abort(context, error.refusal, str(error))
    if isinstance(error, TimeoutError):
        await abort(context, Refusal.LIMIT, "the transfer stood still for too long")
    await abort(context, Refusal.MALFORMED, str(error))
