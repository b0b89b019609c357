"""Codec spec strings: `NAME[:ARGUMENT[/ARGUMENT...]]`, composed left to right with `|`.

| spec | meaning | bytes per value |
| --- | --- | --- |
| `exact` | the tensor's own bytes | item size |
| `fp16` | half precision with one power-of-two scale per 1024 values | 2.002 |
| `int8:B` | symmetric 8 bit with one scale per block of B values (B = 128 when left out) | 1 + 2/B |

This module needs nothing but the standard library: the coordinator validates specs and the planner sizes
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from starlings_compression.errors import SpecError

# A spec travels inside every Packed and in every tensor header.
SPEC_LENGTH_LIMIT = 64
FP16_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Element:
    """One codec of a chain, with every argument filled in."""

    name: str
    arguments: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return self.name + (":" + "/".join(map(str, self.arguments)) if self.arguments else "")


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A chain of codecs. `text` is canonical: equal specs have equal texts, whatever the user left out."""

    elements: tuple[Element, ...]

    @property
    def text(self) -> str:
        return "|".join(element.text for element in self.elements)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Family:
    """All specs of one name. `resolve` checks arguments and adds defaults; `usage` is for error messages."""

    name: str
    usage: str
    resolve: Callable[[tuple[int, ...]], tuple[int, ...]]


def _no_arguments(arguments: tuple[int, ...]) -> tuple[int, ...]:
    if arguments:
        raise SpecError("takes no arguments")
    return ()


def _block(arguments: tuple[int, ...]) -> tuple[int, ...]:
    if len(arguments) > 1:
        raise SpecError("takes one argument, the block size")
    block = arguments[0] if arguments else 128
    if block % 8 or not 8 <= block <= 65536:
        raise SpecError("the block size must be a multiple of 8 from 8 to 65536")
    return (block,)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("exact", "exact", _no_arguments),
        Family("fp16", "fp16", _no_arguments),
        Family("int8", "int8:BLOCK", _block),
    )
}


@lru_cache(maxsize=256)
def parse_spec(text: str) -> CodecSpec:
    """The spec that `text` names.

    Raises:
        SpecError: unknown codec, wrong arguments, no such composition; the message says what is allowed.
    """
    if not isinstance(text, str) or not text or len(text) > SPEC_LENGTH_LIMIT:
        raise SpecError(
            f"a codec spec is a string of 1 to {SPEC_LENGTH_LIMIT} characters, such as 'int8:128'"
        )
    elements = tuple(_parse_element(part, text) for part in text.split("|"))
    if len(elements) > 1:
        raise SpecError(f"codec {text!r}: {elements[0].name} cannot be followed by {elements[1].name}")
    spec = CodecSpec(elements)
    if len(spec.text) > SPEC_LENGTH_LIMIT:
        raise SpecError(
            f"codec {text!r} is longer than {SPEC_LENGTH_LIMIT} characters once its defaults are filled in"
        )
    return spec


def _parse_element(part: str, whole: str) -> Element:
    name, colon, rest = part.partition(":")
    family = FAMILIES.get(name)
    if family is None:
        allowed = ", ".join(f.usage for f in FAMILIES.values())
        raise SpecError(f"codec {whole!r}: unknown name {name!r}; allowed: {allowed}")
    words = rest.split("/") if colon else []
    # Nine digits are more than any argument needs; int() of thousands of digits is slow on purpose-built
    # input.
    if not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in words):
        raise SpecError(f"codec {whole!r}: arguments must be whole numbers, as in {family.usage}")
    try:
        return Element(name, family.resolve(tuple(map(int, words))))
    except SpecError as error:
        raise SpecError(f"codec {whole!r}: {error} (usage: {family.usage})") from None
