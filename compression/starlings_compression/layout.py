"""Packed: the byte layout that every codec writes. Self-describing, bounded, canonical; no torch.

All numbers are little-endian.

    offset  bytes  field
    0       4      magic, "SLPK"
    4       1      version of this layout, 1
    5       1      data type of the decoded tensor (see DataType)
    6       1      d, number of dimensions, 0 to 8
    7       1      s, number of sections, 1 to 16
    8       1      c, length of the codec spec, 1 to 64
    9       7      zero
    16      8 d    shape
            8 s    length of each section in bytes
            c      codec spec, ASCII, canonical form
            ...    zero up to a multiple of 8
            ...    the sections; each begins at a multiple of 8 (zeros between), the last one ends the Packed

What a section holds is up to the codec (see the classes' docstrings); a reducer's sections come before those of
its values, and Zstandard makes one section of all others. Two different byte strings never describe the same
Packed: padding must be zero, the spec canonical, the length exact.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from starlings_compression.errors import CodecError, SpecError
from starlings_compression.spec import CodecSpec, parse_spec

MAGIC = b"SLPK"
VERSION = 1
ALIGNMENT = 8
DIMENSION_LIMIT = 8
SECTION_LIMIT = 16
# No tensor has a petabyte; below this, products of dimensions stay far from 64-bit overflow in torch, also
# with a zero among them.
ELEMENT_LIMIT = 1 << 48

_FIXED = struct.Struct("<4sBBBBB7s")

# What `encode` makes and `decode` takes.
Packed = bytes | bytearray | memoryview


class DataType(enum.IntEnum):
    """Type of the decoded tensor. Other numbers are refused."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT64 = 4
    INT32 = 5
    UINT8 = 6
    BOOL = 7
    FLOAT64 = 8

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self]


_ITEM_BYTES = {
    DataType.FLOAT32: 4,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.INT64: 8,
    DataType.INT32: 4,
    DataType.UINT8: 1,
    DataType.BOOL: 1,
    DataType.FLOAT64: 8,
}


@dataclass(frozen=True, slots=True)
class Form:
    """Type and shape of a tensor."""

    data_type: DataType
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def decoded_bytes(self) -> int:
        return self.element_count * self.data_type.item_bytes


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What a Packed says about itself."""

    spec: CodecSpec
    form: Form
    section_bytes: tuple[int, ...]


def padded(length: int) -> int:
    """`length` rounded up to the alignment."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def header_bytes(spec_length: int, dimensions: int, sections: int) -> int:
    """Where the first section begins."""
    return padded(_FIXED.size + 8 * (dimensions + sections) + spec_length)


def section_ranges(section_bytes: Sequence[int], start: int = 0) -> tuple[tuple[int, int], ...]:
    """Where each section begins and ends when the first may begin at `start`; the last end is the length."""
    ranges = []
    end = start
    for length in section_bytes:
        start = padded(end)
        end = start + length
        ranges.append((start, end))
    return tuple(ranges)


def write_header(header: PackedHeader, out: memoryview) -> tuple[memoryview, ...]:
    """Writes `header` and all padding into `out`, of the Packed's length; returns the sections to fill."""
    text = header.spec.text.encode("ascii")
    form = header.form
    fixed = _FIXED.pack(
        MAGIC, VERSION, form.data_type, len(form.shape), len(header.section_bytes), len(text), bytes(7)
    )
    numbers = (*form.shape, *header.section_bytes)
    head = fixed + struct.pack(f"<{len(numbers)}Q", *numbers) + text
    out[: len(head)] = head
    return split_sections(header.section_bytes, out, len(head))


def split_sections(section_bytes: Sequence[int], out: memoryview, start: int = 0) -> tuple[memoryview, ...]:
    """The sections of `out` behind `start`; writes the padding between them."""
    ranges = section_ranges(section_bytes, start)
    end = start
    for begin, stop in ranges:
        out[end:begin] = bytes(begin - end)
        end = stop
    return tuple(out[begin:stop] for begin, stop in ranges)


def checked_sections(
    section_bytes: Sequence[int], data: memoryview, start: int = 0
) -> tuple[memoryview, ...]:
    """The sections of `data` behind `start`. Raises CodecError for another length, or padding that is not zero."""
    ranges = section_ranges(section_bytes, start)
    if ranges[-1][1] != len(data):
        raise CodecError(f"{len(data)} bytes where the header says {ranges[-1][1]}")
    end = start
    for begin, stop in ranges:
        if any(data[end:begin]):
            raise CodecError("padding is not zero")
        end = stop
    return tuple(data[begin:stop] for begin, stop in ranges)


def read_packed(data: memoryview, *, limit_bytes: int) -> tuple[PackedHeader, tuple[memoryview, ...]]:
    """The header and the sections (views into `data`, nothing is copied).

    Whether the section lengths fit the shape is for the codec to check: only it knows.

    Raises:
        CodecError: no Packed of this version, or one whose tensor would take more than `limit_bytes`.
    """
    if len(data) < _FIXED.size:
        raise CodecError(f"{len(data)} bytes are too few for a packed tensor")
    magic, version, type_code, dimensions, sections, spec_length, zero = _FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION or any(zero):
        raise CodecError("not a packed tensor of this version")
    if dimensions > DIMENSION_LIMIT or not 1 <= sections <= SECTION_LIMIT or not spec_length:
        raise CodecError(
            f"{dimensions} dimensions, {sections} sections, {spec_length} characters of spec: out of bounds"
        )
    text_start = _FIXED.size + 8 * (dimensions + sections)
    if len(data) < header_bytes(spec_length, dimensions, sections):
        raise CodecError("the header is cut short")
    numbers = struct.unpack_from(f"<{dimensions + sections}Q", data, _FIXED.size)
    header = PackedHeader(
        spec=_canonical_spec(bytes(data[text_start : text_start + spec_length])),
        form=Form(_data_type(type_code), numbers[:dimensions]),
        section_bytes=numbers[dimensions:],
    )
    check_size(header.form, limit_bytes)
    return header, checked_sections(header.section_bytes, data, text_start + spec_length)


def _canonical_spec(text: bytes) -> CodecSpec:
    try:
        spec = parse_spec(text.decode("ascii"))
    except (SpecError, UnicodeDecodeError) as error:
        raise CodecError(f"bad codec spec: {error}") from None
    if spec.text.encode("ascii") != text:
        raise CodecError(f"the codec spec is not in its canonical form {spec.text!r}")
    return spec


def _data_type(code: int) -> DataType:
    try:
        return DataType(code)
    except ValueError:
        raise CodecError(f"unknown data type {code}") from None


def check_size(form: Form, limit_bytes: int) -> None:
    """Raises CodecError for a tensor of more than `limit_bytes`, or with a shape that overflows."""
    # Zeros count as one here: a shape of (0, 2**63) holds nothing and still overflows strides.
    if math.prod(max(length, 1) for length in form.shape) > ELEMENT_LIMIT:
        raise CodecError("the shape is beyond any tensor")
    if form.decoded_bytes > limit_bytes:
        raise CodecError(f"a tensor of {form.decoded_bytes} bytes is above the limit of {limit_bytes}")
