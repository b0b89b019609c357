"""Float32 tensors to and from the data plane's bytes, kept apart from the memory they came from."""

from __future__ import annotations

import torch
from torch import Tensor

from starlings_compression.codec import Buffer, Codec
from starlings_compression.layout import DataType
from starlings_compression.wire import WireReader, from_wire, open_wire, to_wire

__all__ = ["Buffer", "decode", "decode_into", "encode", "lend", "reader"]


def encode(codec: Codec, tensor: Tensor, name: str) -> Buffer:
    """What travels of a float32 tensor; a copy, so that the tensor may change before the bytes are sent.

    Raises:
        CodecError: values that are not finite; the message begins with `name`.
    """
    data = to_wire(codec, tensor, name=name)
    return bytes(data) if codec.spec.raw else data


def lend(codec: Codec, tensor: Tensor, name: str, *, finite: bool = False) -> Buffer:
    """As `encode`; raw bytes of a tensor on the host are its own memory, which must keep until nobody needs them.
    `finite`: it is known to be.
    """
    return to_wire(codec, tensor, name=name, finite=finite)


def reader(codec: Codec, data: Buffer, size: int, device: torch.device) -> WireReader:
    """The `size` float32 values that `data` stands for. Only raw ones may be not finite.

    Raises:
        CodecError: malformed, or of another shape.
    """
    return open_wire(
        codec, data, data_type=DataType.FLOAT32, shape=(size,), limit_bytes=size * 4, device=device
    )


def decode(codec: Codec, data: Buffer, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The float32 tensor of `shape` that `data` stands for, on the device; its own memory.

    Raises:
        CodecError: malformed, of another shape, or not finite.
    """
    tensor = torch.empty(shape, dtype=torch.float32, device=device)
    decode_into(codec, data, tensor)
    return tensor


def decode_into(codec: Codec, data: Buffer, out: Tensor) -> None:
    """As `decode`, into a contiguous float32 tensor, which an error leaves as it was."""
    from_wire(
        codec,
        data,
        data_type=DataType.FLOAT32,
        shape=tuple(out.shape),
        limit_bytes=out.numel() * 4,
        out=out,
    )
