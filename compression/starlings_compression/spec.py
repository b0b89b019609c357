"""Codec spec strings: `NAME[:ARGUMENT[/ARGUMENT...]]`, composed left to right with `|`.

A spec has up to three parts, in this order; each may be left out, but not all:

    reducer | values | lossless          topk:64/4096 | int2:64 | zstd:3

A *reducer* turns a tensor into fewer values and says where they belong. A *value format* says how each value
travels; without one they travel exactly. A *lossless* step squeezes the bytes at the end.

| spec | meaning | bits per value |
| --- | --- | --- |
| `exact` | the tensor's own bytes | item size |
| `fp16` | half precision with one power-of-two scale per 1024 values | 16.02 |
| `bf16` | float32 without its last 16 bits, rounded | 16 |
| `fp8:B` | e4m3 with a scale per block of B values, for activations | 8 + 16/B |
| `fp8-e5m2:B` | e5m2 with a scale per block: fewer bits, more range, for gradients of activations | 8 + 16/B |
| `int8:B`, `int4:B` | symmetric integers with a scale per block | 8 + 16/B, 4 + 16/B |
| `int2:B` | four levels -3 -1 1 3 with a scale per block | 2 + 16/B |
| `int4:B/means`, `int2:B/means` | the same bins, decoded as the mean of what fell into them | the same |
| `sign:B` | signs, and the mean magnitude of each block | 1 + 16/B |
| `topk:K/CHUNK` | the K largest magnitudes of each chunk, with packed indices | (value + 12) K/CHUNK |
| `randk:K/CHUNK` | K values of each chunk at places drawn from a shared seed | value K/CHUNK |
| `lowrank:R` | two factors of rank R (PowerSGD); vectors exactly | value R (rows + columns) / (rows columns) |
| `dct-topk:CHUNK/K` | the K largest cosine coefficients of each CHUNK x CHUNK tile (DeMo) | (value + 12) K/CHUNK^2 |
| `zstd:LEVEL` | last: Zstandard over all that comes before | data decides |

This module needs nothing but the standard library: the coordinator validates specs and the planner sizes
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from starlings_compression.errors import SpecError
from starlings_compression.families import EXACT, FAMILIES, Element, Kind

# A spec travels inside every Packed and in every tensor header.
SPEC_LENGTH_LIMIT = 64

__all__ = ["FAMILIES", "SPEC_LENGTH_LIMIT", "CodecSpec", "Element", "parse_spec"]


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A chain of codecs. `text` is canonical: equal specs have equal texts, whatever the user left out."""

    reducer: Element | None = None
    values: Element = EXACT
    squeezer: Element | None = None

    @property
    def elements(self) -> tuple[Element, ...]:
        """Left to right; `exact` after a reducer goes without saying."""
        values = None if self.reducer is not None and self.values == EXACT else self.values
        return tuple(e for e in (self.reducer, values, self.squeezer) if e is not None)

    @property
    def text(self) -> str:
        return "|".join(element.text for element in self.elements)

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very tensor."""
        return self.reducer is None and self.values == EXACT

    @property
    def raw(self) -> bool:
        """Whether the codec is `exact` alone: protocols carry such tensors without a Packed around them."""
        return self.lossless and self.squeezer is None

    @property
    def exact_decode(self) -> bool:
        """Whether the decoded bits are the same on every machine: needed where replicas must not differ."""
        return all(FAMILIES[element.name].exact_decode for element in self.elements)

    @property
    def sized_by_data(self) -> bool:
        """Whether the length of the bytes is known only after encoding."""
        return self.squeezer is not None

    @property
    def without_squeezer(self) -> CodecSpec:
        return CodecSpec(self.reducer, self.values)

    @property
    def of_values(self) -> CodecSpec:
        """The spec by which a reducer's values travel."""
        return CodecSpec(values=self.values)

    def __str__(self) -> str:
        return self.text


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
    parts = [_parse_element(part, text) for part in text.split("|")]
    for before, after in itertools.pairwise(parts):
        if FAMILIES[before.name].kind >= FAMILIES[after.name].kind:
            raise SpecError(
                f"codec {text!r}: {before.name} cannot be followed by {after.name}; the order is "
                f"[{_names(Kind.REDUCER)}] | [{_names(Kind.VALUES)}] | [{_names(Kind.SQUEEZER)}]"
            )
    by_kind = {FAMILIES[part.name].kind: part for part in parts}
    spec = CodecSpec(by_kind.get(Kind.REDUCER), by_kind.get(Kind.VALUES, EXACT), by_kind.get(Kind.SQUEEZER))
    if len(spec.text) > SPEC_LENGTH_LIMIT:
        raise SpecError(
            f"codec {text!r} is longer than {SPEC_LENGTH_LIMIT} characters once its defaults are filled in"
        )
    return spec


def _names(kind: Kind) -> str:
    return " or ".join(family.name for family in FAMILIES.values() if family.kind is kind)


def _usages(families: Iterable[str]) -> str:
    return ", ".join(FAMILIES[name].usage for name in families)


def _parse_element(part: str, whole: str) -> Element:
    name, colon, rest = part.partition(":")
    family = FAMILIES.get(name)
    if family is None:
        raise SpecError(f"codec {whole!r}: unknown name {name!r}; allowed: {_usages(FAMILIES)}")
    words = rest.split("/") if colon else []
    flag = words.pop() if words and words[-1] and words[-1] == family.flag else ""
    # Nine digits are more than any argument needs; int() of thousands of digits is slow on purpose-built
    # input.
    if not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in words):
        raise SpecError(f"codec {whole!r}: arguments must be whole numbers, as in {family.usage}")
    try:
        return Element(name, family.resolve(tuple(map(int, words))), flag)
    except SpecError as error:
        raise SpecError(f"codec {whole!r}: {error} (usage: {family.usage})") from None
