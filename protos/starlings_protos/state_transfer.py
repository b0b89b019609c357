"""How committed state travels in `Data.FetchState`; resumable, hash-checked.

Both sides of the rpc live here, free of torch and grpc, because engines and the keeper speak it alike. The
answer to a `StateRequest`: for each requested block in order one Header frame (StateHeader, every tensor with
its SHA-256), then chunks. `StateRequest.offset` counts bytes of tensor data over all requested blocks; blocks
that lie wholly before it are left out, the block it falls into sends its header and the rest of its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from starlings_protos import data_pb2

CHUNK_BYTES = 1 << 20
# A block of a large mixture-of-experts layer has a few hundred tensors, three times that with its optimizer.
TENSORS_LIMIT = 16384
NAME_LIMIT_CHARACTERS = 512
DIMENSIONS_LIMIT = 8
STEPS_LIMIT = 1 << 48

# safetensors' names of data types, which the rest of Starlings uses for state, and their item sizes in bytes.
_TYPES: dict[str, tuple[data_pb2.DataType.ValueType, int]] = {
    "F32": (data_pb2.DATA_TYPE_FLOAT32, 4),
    "F16": (data_pb2.DATA_TYPE_FLOAT16, 2),
    "BF16": (data_pb2.DATA_TYPE_BFLOAT16, 2),
    "I64": (data_pb2.DATA_TYPE_INT64, 8),
    "I32": (data_pb2.DATA_TYPE_INT32, 4),
    "U8": (data_pb2.DATA_TYPE_UINT8, 1),
    "BOOL": (data_pb2.DATA_TYPE_BOOL, 1),
    "F64": (data_pb2.DATA_TYPE_FLOAT64, 8),
}
_NAMES = {number: name for name, (number, _) in _TYPES.items()}


class StateTransferError(Exception):
    """The donor sent something else than what its header promised, or than what was asked for."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor's bytes, little-endian, C order. `data_type` is safetensors' name, such as "F32"."""

    name: str
    data_type: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A block as it came, by tensor name. `optimizer_steps`: 0 for as many as its version."""

    tensors: dict[str, StateTensor]
    optimizer_steps: int = 0


@dataclass(slots=True)
class ServedBlock:
    """A block of one committed version, ready to be served. Hashes are computed at first use and kept."""

    version: int
    block: str
    tensors: Sequence[StateTensor]
    # Of the optimizer; 0: as many as `version`.
    optimizer_steps: int = 0
    _header: data_pb2.Header | None = field(default=None, repr=False)

    def header(self) -> data_pb2.Header:
        if self._header is None:
            subject = data_pb2.StateHeader(
                version=self.version, block=self.block, optimizer_steps=self.optimizer_steps
            )
            header = data_pb2.Header(state=subject)
            for tensor in self.tensors:
                header.tensors.add(
                    name=tensor.name,
                    data_type=_TYPES[tensor.data_type][0],
                    shape=tensor.shape,
                    byte_count=tensor.data.nbytes,
                    codec="exact",
                    sha256=hashlib.sha256(tensor.data).hexdigest(),
                )
            header.total_bytes = sum(t.data.nbytes for t in self.tensors)
            self._header = header
        return self._header


def state_frames(blocks: Sequence[ServedBlock], offset: int = 0) -> Iterator[data_pb2.Frame]:
    """The frames that answer a request for `blocks`, from byte `offset` of their data on."""
    skip = offset
    for block in blocks:
        header = block.header()
        if skip and skip >= header.total_bytes:
            skip -= header.total_bytes
            continue
        yield data_pb2.Frame(header=header)
        for tensor in block.tensors:
            data = (
                tensor.data.cast("B") if tensor.data.format != "B" or tensor.data.ndim != 1 else tensor.data
            )
            for begin in range(min(skip, data.nbytes), data.nbytes, CHUNK_BYTES):
                yield data_pb2.Frame(chunk=bytes(data[begin : begin + CHUNK_BYTES]))
            skip = max(0, skip - data.nbytes)


# Where a block's tensors shall be written, by its header: one writable view of bytes for each, in order.
# Raises StateTransferError when the header announces something else than what there is room for.
Place = Callable[[data_pb2.Header], Sequence[memoryview]]


class BlockInbox:
    """Assembles one block from one or several transfers.

    A verified tensor is never asked for again: `offset` is where the next transfer should begin. A tensor
    whose hash is wrong is dropped alone.
    """

    def __init__(self, version: int, block: str, limit_bytes: int, place: Place | None = None) -> None:
        """
        Args:
            limit_bytes: no block may be larger; checked before anything is allocated.
            place: writes bytes where they belong, so that no block is held twice; what is there counts only when the
                block is complete. Without it buffers grow with the bytes that arrive.
        """
        self._version = version
        self._block = block
        self._limit_bytes = limit_bytes
        self._place = place
        self._header: data_pb2.Header | None = None
        self._buffers: list[bytearray | memoryview] = []
        # The tensor that is being filled, how many of its bytes are here, and their hash.
        self._position = 0
        self._filled = 0
        self._hash = hashlib.sha256()
        # A transfer begins with a header; chunks without one are refused.
        self._in_transfer = False

    @property
    def offset(self) -> int:
        """Bytes of the block that are here already."""
        if self._header is None:
            return 0
        return sum(t.byte_count for t in self._header.tensors[: self._position]) + self._filled

    @property
    def complete(self) -> bool:
        return self._header is not None and self._position == len(self._header.tensors)

    @property
    def optimizer_steps(self) -> int:
        """As the donor says; 0: as many as the version."""
        return self._header.state.optimizer_steps if self._header is not None else 0

    def begin_transfer(self) -> None:
        """A new call was opened with `offset`; its first frame must be a header."""
        self._in_transfer = False

    def feed(self, frame: data_pb2.Frame) -> None:
        """Takes the next frame.

        Raises:
            StateTransferError: lying header, too many bytes, or a wrong hash; the inbox stays usable for
                another transfer.
        """
        kind = frame.WhichOneof("body")
        if kind == "header":
            if self._in_transfer:
                raise StateTransferError(f"a second header for block {self._block}")
            self._accept_header(frame.header)
            self._in_transfer = True
        elif kind == "chunk" and self._in_transfer:
            self._accept_chunk(frame.chunk)
        else:
            raise StateTransferError(f"the transfer of block {self._block} does not begin with a header")

    def tensors(self) -> dict[str, StateTensor]:
        """The complete block by tensor name."""
        if self._header is None or not self.complete:
            raise StateTransferError(f"block {self._block} is incomplete: {self.offset} bytes")
        return {
            t.name: StateTensor(t.name, _NAMES[t.data_type], tuple(t.shape), memoryview(buffer))
            for t, buffer in zip(self._header.tensors, self._buffers, strict=True)
        }

    def _accept_header(self, header: data_pb2.Header) -> None:
        _check_header(header, self._version, self._block, self._limit_bytes)
        if self._header is not None:
            if self._header == header:
                return
            # Another donor's bytes differ (another numeric class): halves of two donors must never be mixed.
            resumed = self.offset > 0
            self._header, self._buffers, self._position = None, [], 0
            self._begin_tensor()
            if resumed:
                raise StateTransferError(
                    f"this donor's block {self._block} differs from the one begun; starting anew"
                )
        if self._place is None:
            self._buffers = [bytearray() for _ in header.tensors]
        else:
            self._buffers = list(self._place(header))
            assert [b.nbytes for b in self._buffers] == [t.byte_count for t in header.tensors]  # type: ignore[union-attr]
        self._header = data_pb2.Header.FromString(header.SerializeToString())
        self._position = 0
        self._begin_tensor()
        self._close_full_tensors()

    def _accept_chunk(self, chunk: bytes) -> None:
        assert self._header is not None
        if not chunk or len(chunk) > CHUNK_BYTES:
            raise StateTransferError(f"a chunk of {len(chunk)} bytes")
        view = memoryview(chunk)
        while view:
            if self.complete:
                raise StateTransferError(f"more bytes than the header of block {self._block} says")
            piece = view[: self._header.tensors[self._position].byte_count - self._filled]
            buffer = self._buffers[self._position]
            if isinstance(buffer, bytearray):
                buffer += piece
            else:
                buffer[self._filled : self._filled + len(piece)] = piece
            self._hash.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            self._close_full_tensors()

    def _close_full_tensors(self) -> None:
        assert self._header is not None
        while not self.complete:
            tensor = self._header.tensors[self._position]
            if self._filled < tensor.byte_count:
                return
            sound = self._hash.hexdigest() == tensor.sha256
            self._begin_tensor()
            if not sound:
                if self._place is None:
                    self._buffers[self._position] = bytearray()
                raise StateTransferError(f"the bytes of {self._block}/{tensor.name} do not match their hash")
            self._position += 1

    def _begin_tensor(self) -> None:
        self._filled, self._hash = 0, hashlib.sha256()


def announced(header: data_pb2.Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that a checked header promises: name -> (safetensors' type, shape)."""
    return {t.name: (_NAMES[t.data_type], tuple(t.shape)) for t in header.tensors}


def _check_header(header: data_pb2.Header, version: int, block: str, limit_bytes: int) -> None:
    if header.WhichOneof("subject") != "state":
        raise StateTransferError("the transfer is not about state")
    if (header.state.version, header.state.block) != (version, block):
        raise StateTransferError(
            f"asked for block {block} at version {version}, "
            f"got {header.state.block[:80]!r} at version {header.state.version}"
        )
    if header.state.optimizer_steps >= STEPS_LIMIT:
        raise StateTransferError(f"block {block}: no optimizer makes {header.state.optimizer_steps} steps")
    if len(header.tensors) > TENSORS_LIMIT or header.total_bytes > limit_bytes:
        raise StateTransferError(f"block {block}: {header.total_bytes} bytes, the limit is {limit_bytes}")
    if header.total_bytes != sum(t.byte_count for t in header.tensors):
        raise StateTransferError(f"block {block}: the byte counts do not add up")
    names = set()
    for tensor in header.tensors:
        item = _TYPES.get(_NAMES.get(tensor.data_type, ""))
        if (
            item is None
            or tensor.codec != "exact"
            or len(tensor.name) > NAME_LIMIT_CHARACTERS
            or tensor.name in names
        ):
            raise StateTransferError(f"block {block}: tensor {tensor.name[:80]!r} is malformed")
        item_bytes = _TYPES[_NAMES[tensor.data_type]][1]
        if len(tensor.shape) > DIMENSIONS_LIMIT or prod(tensor.shape) * item_bytes != tensor.byte_count:
            raise StateTransferError(f"block {block}: shape and byte count of {tensor.name} disagree")
        names.add(tensor.name)


# Opens one FetchState call at a donor. Ends the iteration, or raises what the transport raises.
OpenTransfer = Callable[[data_pb2.StateRequest], AsyncIterator[data_pb2.Frame]]


async def fetch_block(
    donors: Mapping[str, OpenTransfer],
    *,
    version: int,
    block: str,
    optimizer: bool,
    limit_bytes: int,
    tries_per_donor: int = 2,
    on_failure: Callable[[str, Exception], None] | None = None,
) -> FetchedBlock:
    """Fetches one block from the first donor that can serve it, going on where a broken transfer ended.

    Args:
        donors: how to call each donor, by id, in the order to try.
        limit_bytes: no block of the job is larger.
        on_failure: told of each transfer that broke: donor id and why.

    Raises:
        StateTransferError: no donor could deliver the block; the message names each and why.
    """
    inbox = BlockInbox(version, block, limit_bytes)
    failures: list[str] = []
    for donor, open_transfer in donors.items():
        for _ in range(tries_per_donor):
            request = data_pb2.StateRequest(
                version=version, blocks=[block], optimizer=optimizer, offset=inbox.offset
            )
            inbox.begin_transfer()
            transfer = open_transfer(request)
            try:
                async for frame in transfer:
                    inbox.feed(frame)
                if inbox.complete:
                    return FetchedBlock(inbox.tensors(), inbox.optimizer_steps)
                raise StateTransferError(f"{donor} ended block {block} after {inbox.offset} bytes")
            except Exception as error:
                failures.append(f"{donor}: {error}")
                if on_failure is not None:
                    on_failure(donor, error)
            finally:
                # A call that was given up must not go on in the background.
                if isinstance(transfer, AsyncGenerator):
                    await transfer.aclose()
    raise StateTransferError(
        f"no donor has block {block} at version {version}: " + ("; ".join(failures) or "none was named")
    )
