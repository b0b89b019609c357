"""A tensor as a protocol carries it beside its own header of type, shape and codec.

`exact` alone travels as raw bytes, everything else as a Packed. Only this module knows that: a sender and a
receiver that use it agree.
"""

from __future__ import annotations

import torch

from starlings_compression.codec import Buffer, Codec
from starlings_compression.errors import CodecError
from starlings_compression.exact import checked_values
from starlings_compression.layout import DIMENSION_LIMIT, DataType, Form, check_size
from starlings_compression.tensors import TORCH_TYPES, data_type_of, is_finite


def to_wire(codec: Codec, tensor: torch.Tensor, *, name: str = "tensor") -> memoryview:
    """The bytes of `tensor`.

    For `exact` and a contiguous host tensor they are its own memory: do not change it before they are sent.

    Raises:
        CodecError: NaN or infinite values, or a type that the codec does not take; names the tensor.
    """
    if not codec.spec.raw:
        return memoryview(codec.encode(tensor, name=name))
    data_type_of(tensor, name)
    host = tensor.detach().to("cpu").contiguous()
    if not is_finite(host):
        raise CodecError(f"{name}: NaN or infinite values")
    return host.view(-1).view(torch.uint8).numpy().data


@torch.no_grad()
def from_wire(
    codec: Codec,
    data: Buffer,
    *,
    data_type: int,
    shape: tuple[int, ...],
    limit_bytes: int,
    device: str | torch.device = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tensor that `data` carries; every value is finite.

    Args:
        data_type: what was announced: a number of `layout.DataType`.
        shape: what was announced.
        limit_bytes: the largest tensor to accept; checked before anything is allocated.
        out: contiguous; receives the result when its shape and type are the announced ones.

    Raises:
        CodecError: the bytes do not hold what was announced, or it is too large. `out` is untouched then.
    """
    shape = tuple(shape)
    try:
        form = Form(DataType(data_type), shape)
    except ValueError:
        raise CodecError(f"unknown data type {data_type}") from None
    if len(shape) > DIMENSION_LIMIT:
        raise CodecError(f"{len(shape)} dimensions; at most {DIMENSION_LIMIT} are allowed")
    check_size(form, limit_bytes)
    dtype, size_bytes = TORCH_TYPES[form.data_type], form.decoded_bytes
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype):
        raise CodecError(f"{dtype} of shape {shape}, expected {out.dtype} of shape {tuple(out.shape)}")
    if not codec.spec.raw:
        tensor = codec.decode(data, limit_bytes=size_bytes, device=device, out=out)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise CodecError(
                f"{tensor.dtype} of shape {tuple(tensor.shape)}, announced as {dtype} of {shape}"
            )
        return tensor
    raw = memoryview(data).cast("B")
    if len(raw) != size_bytes:
        raise CodecError(f"{len(raw)} bytes where the shape asks for {size_bytes}")
    values = checked_values(raw, form.data_type).view(shape)
    return (torch.empty(shape, dtype=dtype, device=device) if out is None else out).copy_(values)
