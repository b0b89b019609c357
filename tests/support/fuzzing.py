"""Machinery of the fuzz tests: damage for valid bytes, and what must hold whatever a parser is given.

A parser gets 10,000 byte strings, 3,000 in the fast suite: random ones, and valid ones that were damaged (bits, cuts,
splices; for JSON also changes of the tree that keep it JSON). It must return, or raise one of the errors
that its docstring names.
"""

from __future__ import annotations

import functools
import gc
import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INPUTS = 10_000
MEASURED_INPUTS = 200


@dataclass(frozen=True)
class Parser:
    """A parser, what it may raise, and valid inputs to damage."""

    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    samples: tuple[bytes, ...]
    json: bool = False
    # Inputs made by hand that chance would not find.
    hostile: tuple[bytes, ...] = ()
    inputs: int = INPUTS


Builders = dict[str, Callable[[], Parser]]


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
    float("inf"), float("-inf"), float("nan"), "", "x", "x" * 600, "\ud800", "\x00", "../../etc", "int8:7",
    "F32", [],
    {}, [[]], [{}], {"": None}, [1] * 300, {"a": {"b": {"c": []}}},
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


# Too deep for every recursive parser, and just deep enough for most.
NESTED_JSON = (
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"[" * 500 + b"]" * 500,
    b'{"format":1,"blocks":' + b"[" * 9_000,
)


@functools.lru_cache(maxsize=64)
def _tree(sample: bytes) -> Any:
    """Shared: `odd_tree` copies whatever it changes."""
    return json.loads(sample)


def any_input(rng: random.Random, target: Parser) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        return rng.randbytes(rng.choice((0, 1, 2, 5, 16, 64, 64, 500)))
    sample = rng.choice(target.samples)
    if target.json and kind < 0.8:
        tree = _tree(sample)
        for _ in range(rng.choice((1, 1, 2))):
            tree = odd_tree(rng, tree)
        return json.dumps(tree).encode()
    return damaged(rng, sample)


def check_parser(name: str, target: Parser, share: float = 1.0) -> None:
    """Any bytes give a result or one of the parser's own errors; with the first `share` of its inputs."""
    for sample in target.samples:
        target.parse(sample)
    rng = random.Random(name)
    hostile = target.hostile + (NESTED_JSON if target.json else ())
    refused = 0
    inputs = int(share * target.inputs)
    for number in range(inputs):
        data = hostile[number] if number < len(hostile) else any_input(rng, target)
        try:
            target.parse(data)
        except target.errors:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error} for {data[:400]!r}") from error
    assert refused > inputs // 10


def check_memory(name: str, target: Parser) -> None:
    """Errors can be shown, nothing is kept, and no input makes the parser allocate much."""
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
