"""The safetensors format without torch: 8 bytes little-endian header length, a JSON header, then the bytes.

Written by hand because the keeper has no torch and numpy has no bfloat16; readers are bounded and check
every range.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, BinaryIO

from starlings_job.errors import CheckpointError
from starlings_job.state import ITEM_BYTES, RawTensor, Tensorlike

HEADER_LIMIT_BYTES = 100 << 20
CHUNK_BYTES = 4 << 20
_LENGTH = struct.Struct("<Q")

# Name -> (type, shape, first byte, end byte), offsets within the data part.
Header = dict[str, tuple[str, tuple[int, ...], int, int]]


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and header for (name, type, shape) in the order in which their bytes will follow."""
    record: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, data_type, shape in tensors:
        size = prod(shape) * ITEM_BYTES[data_type]
        record[name] = {"dtype": data_type, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(record, separators=(",", ":")).encode()
    # The data part begins at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


class HashingWriter:
    """Counts and hashes what passes through to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.byte_count = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        for begin in range(0, len(view), CHUNK_BYTES):
            piece = view[begin : begin + CHUNK_BYTES]
            self._file.write(piece)
            self._digest.update(piece)
        self.byte_count += len(view)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def write_file(
    file: BinaryIO, tensors: Mapping[str, Tensorlike], metadata: Mapping[str, str] | None = None
) -> HashingWriter:
    """Writes the tensors sorted by name; the result knows byte count and SHA-256."""
    writer = HashingWriter(file)
    names = sorted(tensors)
    described = ((name, tensors[name].data_type, tensors[name].shape) for name in names)
    writer.write(header_bytes(described, metadata or {}))
    for name in names:
        data = tensors[name].data
        if data.nbytes:
            writer.write(data)
    return writer


def parse_header(data: bytes | memoryview, total_bytes: int) -> tuple[Header, int]:
    """The header at the beginning of a file of `total_bytes`, and where the data part begins.

    Args:
        data: at least the length and the header.

    Raises:
        CheckpointError: malformed, or ranges that do not fit the file.
    """
    if len(data) < _LENGTH.size:
        raise CheckpointError("the file is too short for safetensors")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    begin = _LENGTH.size + length
    if length > HEADER_LIMIT_BYTES or begin > total_bytes or begin > len(data):
        raise CheckpointError(f"the safetensors header of {length} bytes does not fit the file")
    try:
        record = json.loads(bytes(data[_LENGTH.size : begin]))
        if not isinstance(record, dict):
            raise TypeError
        header = {name: _entry(entry) for name, entry in record.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError("the safetensors header is malformed") from None
    for name, (data_type, shape, first, end) in header.items():
        size = prod(shape) * ITEM_BYTES[data_type]
        if not 0 <= first <= end <= total_bytes - begin or end - first != size:
            raise CheckpointError(f"tensor {name[:80]!r} does not fit its file")
    return header, begin


def _entry(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    data_type, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, first, end]
    if (
        data_type not in ITEM_BYTES
        or not all(type(n) is int and 0 <= n < 2**62 for n in numbers)
        or len(shape) > 8
    ):
        raise ValueError
    return data_type, tuple(shape), first, end


def read_buffer(data: bytes | memoryview) -> dict[str, RawTensor]:
    """The tensors of a whole file in memory; they share its bytes.

    Raises:
        CheckpointError: malformed.
    """
    view = memoryview(data)
    header, begin = parse_header(view, len(view))
    return {
        name: RawTensor(data_type, shape, view[begin + first : begin + end])
        for name, (data_type, shape, first, end) in header.items()
    }


def read_header(file: BinaryIO, total_bytes: int) -> tuple[Header, int]:
    """As `parse_header`, from the beginning of a file of `total_bytes`."""
    start = file.read(_LENGTH.size)
    if len(start) == _LENGTH.size:
        (length,) = _LENGTH.unpack(start)
        if length <= min(HEADER_LIMIT_BYTES, total_bytes):
            start += file.read(length)
    return parse_header(start, total_bytes)
