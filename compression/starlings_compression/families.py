"""The one registry of codec names: what each is, which arguments it takes, and what it promises.

Standard library only. `sizes.py` knows how many bytes each makes, `codec.make_codec` which class does it; a
test holds the three together.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from starlings_compression.errors import SpecError

FP16_BLOCK = 1024
LARGEST_CHUNK = 65536
LARGEST_RANK = 256
LARGEST_TILE = 128


@dataclass(frozen=True, slots=True)
class Element:
    """One codec of a chain, with every argument filled in."""

    name: str
    arguments: tuple[int, ...] = ()
    flag: str = ""

    @property
    def text(self) -> str:
        words = [*map(str, self.arguments), *([self.flag] if self.flag else [])]
        return self.name + (":" + "/".join(words) if words else "")


EXACT = Element("exact")


class Kind(enum.IntEnum):
    """Where in a chain a codec may stand: kinds rise from left to right."""

    REDUCER = 1
    VALUES = 2
    SQUEEZER = 3


@dataclass(frozen=True, slots=True)
class Family:
    """All specs of one name.

    `resolve` checks arguments and adds defaults; `usage` and `meaning` are for people. `flag` is a word that
    may stand behind the numbers.
    """

    name: str
    kind: Kind
    usage: str
    meaning: str
    resolve: Callable[[tuple[int, ...]], tuple[int, ...]]
    flag: str = ""
    # Whether decoding gives the same bits on every machine.
    exact_decode: bool = True
    # Whether encoding reads and writes a `state.CodecState`.
    has_state: bool = False


def _no_arguments(arguments: tuple[int, ...]) -> tuple[int, ...]:
    if arguments:
        raise SpecError("takes no arguments")
    return ()


def _block(default: int, largest: int = 65536) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    def resolve(arguments: tuple[int, ...]) -> tuple[int, ...]:
        if len(arguments) > 1:
            raise SpecError("takes one argument, the block size")
        block = arguments[0] if arguments else default
        if block % 8 or not 8 <= block <= largest:
            raise SpecError(f"the block size must be a multiple of 8 from 8 to {largest}")
        return (block,)

    return resolve


def _number(
    what: str, default: int, smallest: int, largest: int
) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    def resolve(arguments: tuple[int, ...]) -> tuple[int, ...]:
        if len(arguments) > 1:
            raise SpecError(f"takes one argument, the {what}")
        number = arguments[0] if arguments else default
        if not smallest <= number <= largest:
            raise SpecError(f"the {what} must lie between {smallest} and {largest}")
        return (number,)

    return resolve


def _kept_of_chunk(arguments: tuple[int, ...]) -> tuple[int, ...]:
    if len(arguments) not in (0, 2):
        raise SpecError("takes two arguments, how many values to keep of each chunk and the chunk's size")
    kept, chunk = arguments or (64, 4096)
    if chunk % 8 or not 8 <= chunk <= LARGEST_CHUNK:
        raise SpecError(f"the chunk must be a multiple of 8 from 8 to {LARGEST_CHUNK}")
    if not 1 <= kept < chunk:
        raise SpecError("at least one value of a chunk is kept, and not all")
    return kept, chunk


def _drawn_of_chunk(arguments: tuple[int, ...]) -> tuple[int, ...]:
    kept, chunk = _kept_of_chunk(arguments)
    if chunk % kept:
        raise SpecError("the number of kept values must divide the chunk: one is drawn of each equal piece")
    return kept, chunk


def _tile(arguments: tuple[int, ...]) -> tuple[int, ...]:
    if len(arguments) not in (0, 2):
        raise SpecError("takes two arguments, the side of a tile and how many coefficients of it to keep")
    side, kept = arguments or (64, 32)
    if side % 8 or not 8 <= side <= LARGEST_TILE:
        raise SpecError(f"the side of a tile must be a multiple of 8 from 8 to {LARGEST_TILE}")
    if not 1 <= kept < side * side:
        raise SpecError("at least one coefficient of a tile is kept, and not all")
    return side, kept


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "topk", Kind.REDUCER, "topk:K/CHUNK", "the K largest magnitudes of each chunk", _kept_of_chunk
        ),
        Family(
            "randk",
            Kind.REDUCER,
            "randk:K/CHUNK",
            "K values of each chunk at places drawn from a shared seed",
            _drawn_of_chunk,
            has_state=True,
        ),
        Family(
            "lowrank",
            Kind.REDUCER,
            "lowrank:RANK",
            "two factors of low rank (PowerSGD)",
            _number("rank", 4, 1, LARGEST_RANK),
            has_state=True,
        ),
        Family(
            "dct-topk",
            Kind.REDUCER,
            "dct-topk:CHUNK/K",
            "the K largest cosine coefficients of each tile (DeMo)",
            _tile,
            exact_decode=False,
        ),
        Family("exact", Kind.VALUES, "exact", "the tensor's own bytes", _no_arguments),
        Family("fp16", Kind.VALUES, "fp16", "half precision, scaled by blocks", _no_arguments),
        Family("bf16", Kind.VALUES, "bf16", "float32 rounded to its upper half", _no_arguments),
        Family("fp8", Kind.VALUES, "fp8:BLOCK", "8-bit floating point e4m3, scaled by blocks", _block(128)),
        Family(
            "fp8-e5m2",
            Kind.VALUES,
            "fp8-e5m2:BLOCK",
            "8-bit floating point e5m2, scaled by blocks",
            _block(128),
        ),
        Family("int8", Kind.VALUES, "int8:BLOCK", "8-bit integers, scaled by blocks", _block(128)),
        Family(
            "int4",
            Kind.VALUES,
            "int4:BLOCK[/means]",
            "4-bit integers, scaled by blocks",
            _block(64),
            "means",
        ),
        Family(
            "int2",
            Kind.VALUES,
            "int2:BLOCK[/means]",
            "four levels, scaled by blocks",
            _block(64, 16384),
            "means",
        ),
        Family("sign", Kind.VALUES, "sign:BLOCK", "signs and one magnitude per block", _block(256, 16384)),
        Family("zstd", Kind.SQUEEZER, "zstd:LEVEL", "Zstandard, lossless", _number("level", 3, 1, 19)),
    )
}
