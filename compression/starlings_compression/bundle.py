"""Bundles: named tensors in messages of bounded size, as many messages as they need.

    for message in pack(gradients, encoder(policy), message_limit_bytes=4 << 20): send(message)
    for name, tensor in unpack(message, limit_bytes=64 << 20, specs={"int8:128", "exact"}): ...

A tensor that is None (a parameter without a gradient) travels as a name alone, so that both sides agree on what was
there. All numbers are little-endian:

    offset  bytes  field
    0       4      magic, "SLPB"
    4       1      version, 1
    5       3      zero
    8       4      number of entries
    12      4      zero
    16      ...    entries, each at a multiple of 8:

    0       8      length of the Packed; 0: no tensor
    8       2      n, length of the name in bytes, 1 to 512
    10      6      zero
    16      n      name, UTF-8
    ...            zero up to a multiple of 8, the Packed, zero up to a multiple of 8
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError
from starlings_compression.layout import Packed, padded, read_packed
from starlings_compression.policy import Policy

MAGIC = b"SLPB"
VERSION = 1
NAME_LIMIT_BYTES = 512
ENTRY_LIMIT = 1 << 16

_HEAD = struct.Struct("<4sB3sI4s")
_ENTRY = struct.Struct("<QH6s")

# From a tensor and its name to its Packed: a codec's encode, or error feedback's with one state per name.
Encode = Callable[[str, torch.Tensor], bytes]


def encoder(policy: Policy, *, backward: bool = False) -> Encode:
    """Encodes by a policy, without state; tensors that are not floating-point travel exactly."""

    def encode(name: str, tensor: torch.Tensor) -> bytes:
        spec = policy.spec_for(tensor.shape, backward=backward) if tensor.is_floating_point() else "exact"
        return make_codec(spec).encode(tensor, name=name)

    return encode


def pack(
    tensors: Iterable[tuple[str, torch.Tensor | None]], encode: Encode, *, message_limit_bytes: int
) -> Iterator[bytes]:
    """Messages that hold all tensors, in order; nothing makes no message.

    Raises:
        CodecError: a name of no or more than 512 bytes, a tensor too large for a message, or what `encode`
            raises; names the tensor.
    """
    entries: list[bytes] = []
    room = message_limit_bytes - _HEAD.size
    for name, tensor in tensors:
        entry = _entry(name, b"" if tensor is None else encode(name, tensor))
        if len(entry) > message_limit_bytes - _HEAD.size:
            raise CodecError(
                f"{name[:80]}: {len(entry)} bytes do not fit into a message of {message_limit_bytes}; "
                "cut the tensor, or allow larger messages"
            )
        if len(entry) > room or len(entries) == ENTRY_LIMIT:
            yield _message(entries)
            entries, room = [], message_limit_bytes - _HEAD.size
        entries.append(entry)
        room -= len(entry)
    if entries:
        yield _message(entries)


def unpack(
    message: Packed, *, limit_bytes: int, specs: Collection[str], device: str | torch.device = "cpu"
) -> list[tuple[str, torch.Tensor | None]]:
    """The tensors of one message, in order.

    Args:
        limit_bytes: what all tensors together may take, decoded; checked before each is allocated.
        specs: the canonical specs that are expected.

    Raises:
        CodecError: the bytes are no bundle, hold a name twice, another codec, or too much.
    """
    data = memoryview(message).cast("B")
    if len(data) < _HEAD.size:
        raise CodecError(f"{len(data)} bytes are too few for a bundle")
    magic, version, zero, count, more_zero = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or any(zero) or any(more_zero) or not 1 <= count <= ENTRY_LIMIT:
        raise CodecError("not a bundle of this version")
    found: dict[str, torch.Tensor | None] = {}
    at, left = _HEAD.size, limit_bytes
    for _ in range(count):
        name, packed, at = _read_entry(data, at)
        if name in found:
            raise CodecError(f"two tensors are named {name[:80]!r}")
        found[name] = None
        if packed:
            header, _sections = read_packed(packed, limit_bytes=left)
            if header.spec.text not in specs:
                raise CodecError(
                    f"{name[:80]}: encoded as {header.spec}, expected {' or '.join(sorted(specs))}"
                )
            found[name] = make_codec(header.spec).decode(packed, limit_bytes=left, device=device)
            left -= header.form.decoded_bytes
    if at != len(data):
        raise CodecError(f"{len(data) - at} bytes behind the last tensor")
    return list(found.items())


def _entry(name: str, packed: bytes) -> bytes:
    text = name.encode("utf-8")
    if not 1 <= len(text) <= NAME_LIMIT_BYTES:
        raise CodecError(f"a tensor name of {len(text)} bytes; 1 to {NAME_LIMIT_BYTES} are allowed")
    head = _ENTRY.pack(len(packed), len(text), bytes(6)) + text
    return b"".join((head, bytes(-len(head) % 8), packed, bytes(-len(packed) % 8)))


def _message(entries: list[bytes]) -> bytes:
    return _HEAD.pack(MAGIC, VERSION, bytes(3), len(entries), bytes(4)) + b"".join(entries)


def _read_entry(data: memoryview, at: int) -> tuple[str, memoryview, int]:
    """(name, Packed or nothing, where the next entry begins)."""
    if len(data) - at < _ENTRY.size:
        raise CodecError("an entry is cut short")
    length, name_bytes, zero = _ENTRY.unpack_from(data, at)
    name_end = at + _ENTRY.size + name_bytes
    start = padded(name_end)
    end = start + length
    if any(zero) or not 1 <= name_bytes <= NAME_LIMIT_BYTES or padded(end) > len(data):
        raise CodecError("an entry is malformed, or longer than its bundle")
    if any(data[name_end:start]) or any(data[end : padded(end)]):
        raise CodecError("padding is not zero")
    try:
        name = bytes(data[at + _ENTRY.size : name_end]).decode("utf-8")
    except UnicodeDecodeError:
        raise CodecError("a tensor's name is not UTF-8") from None
    return name, data[start:end], padded(end)
