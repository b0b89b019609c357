"""How many bytes a codec makes, before anything is encoded. Standard library only: the planner calls this.

The lengths of all sections follow from spec, shape and item size, but for what Zstandard makes of them. Readers rely
on it: a Packed whose sections have other lengths is refused before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlings_compression.families import EXACT, FP16_BLOCK, Element
from starlings_compression.layout import header_bytes, padded
from starlings_compression.spec import CodecSpec, parse_spec

SCALE_BYTES = 2
# Factors and coefficients travel as float32 where no value format says otherwise.
FLOAT_BYTES = 4
SEED_BYTES = 8


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """Length of a Packed: exactly `most_bytes`, unless the spec is sized by the data."""

    least_bytes: int
    # For planning. Zstandard is not counted on: gradients of floats hardly shrink.
    likely_bytes: int
    most_bytes: int


def size_estimate(spec: str | CodecSpec, shape: Sequence[int], *, item_bytes: int = 4) -> SizeEstimate:
    """What `codec.encode(tensor)` of a tensor of `shape` and `item_bytes` takes on the wire, header included.

    Raises:
        SpecError: there is no such codec.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    plain = packed_bytes(spec, plain_section_bytes(spec, shape, item_bytes), len(shape))
    if spec.squeezer is None:
        return SizeEstimate(plain, plain, plain)
    # What Zstandard does not shrink travels as it is.
    return SizeEstimate(packed_bytes(spec, (0,), len(shape)), plain, most_bytes(spec, shape, item_bytes))


def most_bytes(spec: CodecSpec, shape: Sequence[int], item_bytes: int) -> int:
    """The largest length that a Packed of this spec and shape may have."""
    sections = plain_section_bytes(spec, shape, item_bytes)
    return packed_bytes(spec, (body_bytes(sections),) if spec.sized_by_data else sections, len(shape))


def packed_bytes(spec: CodecSpec, sections: Sequence[int], dimensions: int) -> int:
    """Length of a Packed with sections of these lengths."""
    return header_bytes(len(spec.text), dimensions, len(sections)) + body_bytes(sections)


def body_bytes(sections: Sequence[int]) -> int:
    """Length of the sections; all but the last are padded to the alignment."""
    return sum(map(padded, sections[:-1])) + sections[-1]


def plain_section_bytes(spec: CodecSpec, shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Length of each section before Zstandard: those of the reducer, then those of the values."""
    count = math.prod(shape)
    if spec.reducer is None:
        return _VALUES[spec.values.name](spec.values, count, item_bytes)
    reduced = reduce_shape(spec.reducer, shape)
    if reduced is None:
        return (count * item_bytes,)
    value_bytes = FLOAT_BYTES if spec.reducer.name in ("lowrank", "dct-topk") else item_bytes
    return (
        *reduced.section_bytes,
        *_VALUES[spec.values.name](spec.values, reduced.value_count, value_bytes),
    )


def linear_counts(rank: int, shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Float32 values that the two rounds of `linear.LinearRounds` sum up, for tensors of these shapes."""
    first = second = 0
    for shape in shapes:
        if reduce_shape(Element("lowrank", (rank,)), shape) is None:
            first += math.prod(shape)
        else:
            rows, columns = matrix_shape(shape)
            first, second = first + rank * rows, second + rank * columns
    return first, second


# ---------------------------------------------------------------------- reducers


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a reducer makes of a shape: its own sections, and how many values go on to the value format."""

    section_bytes: tuple[int, ...]
    value_count: int


def reduce_shape(reducer: Element, shape: Sequence[int]) -> Reduced | None:
    """None where the reducer leaves tensors of this shape alone: they travel exactly."""
    return _REDUCERS[reducer.name](reducer, shape)


def kept_of(count: int, chunk: int, kept: int) -> int:
    """Values kept of `count` in chunks; of the last, shorter one as many, or all that it has."""
    return count // chunk * kept + min(kept, count % chunk)


def drawn_of(count: int, chunk: int, kept: int) -> int:
    """Values drawn of `count`: one of each whole piece of chunk / kept values, and one of the rest."""
    return block_count(count, chunk // kept)


def index_bits(chunk: int) -> int:
    """Bits per packed index: whole bytes, or three bytes for two."""
    return 8 if chunk <= 256 else 12 if chunk <= 4096 else 16


def index_bytes(chunk: int, count: int) -> int:
    return -(-count * index_bits(chunk) // 8)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor of two and more dimensions as a matrix: its first dimension by all others."""
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a tensor is cut into tiles: as a matrix (rows x columns, filled up with zeros), tile by tile."""

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int

    @property
    def down(self) -> int:
        return block_count(self.rows, self.tile_rows)

    @property
    def across(self) -> int:
        return block_count(self.columns, self.tile_columns)

    @property
    def tile_elements(self) -> int:
        return self.tile_rows * self.tile_columns

    @property
    def count(self) -> int:
        return self.down * self.across


def tiling_of(shape: Sequence[int], side: int) -> Tiling:
    """Vectors are laid in rows of `side` values, so that their tiles are consecutive values."""
    if math.prod(shape) == 0:
        return Tiling(0, 0, 1, 1)
    if len(shape) >= 2:
        rows, columns = matrix_shape(shape)
    else:
        count = math.prod(shape)
        rows, columns = (1, count) if count <= side else (block_count(count, side), side)
    return Tiling(rows, columns, min(rows, side), min(columns, side))


def _topk(element: Element, shape: Sequence[int]) -> Reduced:
    kept, chunk = element.arguments
    count = kept_of(math.prod(shape), chunk, kept)
    return Reduced((index_bytes(chunk, count),), count)


def _randk(element: Element, shape: Sequence[int]) -> Reduced:
    kept, chunk = element.arguments
    return Reduced((SEED_BYTES,), drawn_of(math.prod(shape), chunk, kept))


def _lowrank(element: Element, shape: Sequence[int]) -> Reduced | None:
    if len(shape) < 2:
        return None
    rows, columns = matrix_shape(shape)
    values = element.arguments[0] * (rows + columns)
    return Reduced((), values) if values < rows * columns else None


def _dct_topk(element: Element, shape: Sequence[int]) -> Reduced:
    side, kept = element.arguments
    tiling = tiling_of(shape, side)
    count = tiling.count * min(kept, tiling.tile_elements)
    return Reduced((index_bytes(side * side, count),), count)


_REDUCERS: dict[str, Callable[[Element, Sequence[int]], Reduced | None]] = {
    "topk": _topk,
    "randk": _randk,
    "lowrank": _lowrank,
    "dct-topk": _dct_topk,
}


# ---------------------------------------------------------------------- value formats


def block_count(element_count: int, block: int) -> int:
    return -(-element_count // block)


def block_size(element: Element) -> int:
    """Values per scale."""
    return element.arguments[0] if element.arguments else FP16_BLOCK


def _exact(element: Element, count: int, item_bytes: int) -> tuple[int, ...]:
    return (count * item_bytes,)


def _bf16(element: Element, count: int, item_bytes: int) -> tuple[int, ...]:
    return (2 * count,)


def _scaled(bits: int) -> Callable[[Element, int, int], tuple[int, ...]]:
    """Scales, the mean of each bin where the flag asks for it, and codes of `bits` bits."""

    def sections(element: Element, count: int, item_bytes: int) -> tuple[int, ...]:
        means = (FLOAT_BYTES << bits,) if element.flag == "means" else ()
        scales = SCALE_BYTES * block_count(count, block_size(element))
        return (scales, *means, -(-count * bits // 8))

    return sections


_VALUES: dict[str, Callable[[Element, int, int], tuple[int, ...]]] = {
    EXACT.name: _exact,
    "fp16": _scaled(16),
    "bf16": _bf16,
    "fp8": _scaled(8),
    "fp8-e5m2": _scaled(8),
    "int8": _scaled(8),
    "int4": _scaled(4),
    "int2": _scaled(2),
    "sign": _scaled(1),
}
