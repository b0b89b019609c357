"""How many bytes a codec makes, before anything is encoded. Standard library only: the planner calls this."""

from __future__ import annotations

from collections.abc import Callable

from starlings_compression.layout import header_bytes, padded
from starlings_compression.spec import FP16_BLOCK, CodecSpec, Element, parse_spec

SCALE_BYTES = 2


def wire_bytes(spec: str | CodecSpec, element_count: int, *, item_bytes: int = 4, dimensions: int = 1) -> int:
    """Exactly `len(codec.encode(tensor))`; `item_bytes` and `dimensions` are those of the tensor.

    Raises:
        SpecError: there is no such codec.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    sections = section_bytes(spec, element_count, item_bytes)
    return packed_bytes(spec, sections, dimensions)


def packed_bytes(spec: CodecSpec, sections: tuple[int, ...], dimensions: int) -> int:
    """Length of a Packed with sections of these lengths; all but the last are padded to the alignment."""
    body = sum(map(padded, sections[:-1])) + sections[-1]
    return header_bytes(len(spec.text), dimensions, len(sections)) + body


def section_bytes(spec: CodecSpec, element_count: int, item_bytes: int) -> tuple[int, ...]:
    """Length of each section of the Packed."""
    (element,) = spec.elements
    return _SECTIONS[element.name](element, element_count, item_bytes)


def block_count(element_count: int, block: int) -> int:
    return -(-element_count // block)


def block_size(element: Element) -> int:
    """Values per scale."""
    return element.arguments[0] if element.arguments else FP16_BLOCK


def _exact(element: Element, count: int, item_bytes: int) -> tuple[int, ...]:
    return (count * item_bytes,)


def _fp16(element: Element, count: int, item_bytes: int) -> tuple[int, ...]:
    return (SCALE_BYTES * block_count(count, block_size(element)), 2 * count)


def _int8(element: Element, count: int, item_bytes: int) -> tuple[int, ...]:
    return (SCALE_BYTES * block_count(count, block_size(element)), count)


_SECTIONS: dict[str, Callable[[Element, int, int], tuple[int, ...]]] = {
    "exact": _exact,
    "fp16": _fp16,
    "int8": _int8,
}
