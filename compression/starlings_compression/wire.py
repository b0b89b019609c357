"""A tensor as a protocol carries it beside its own header of type, shape and codec.

`exact` alone travels as raw bytes, everything else as a Packed. Only this module knows that: a sender and a
receiver that use it agree.
"""

from __future__ import annotations

import torch

from starlings_compression.blocks import BlockReader
from starlings_compression.codec import Buffer, Codec, Reader
from starlings_compression.errors import CodecError
from starlings_compression.exact import checked_values
from starlings_compression.layout import DIMENSION_LIMIT, DataType, Form, check_size
from starlings_compression.tensors import TORCH_TYPES, data_type_of, is_finite, view
from starlings_compression.terms import Term


def to_wire(codec: Codec, tensor: torch.Tensor, *, name: str = "tensor", finite: bool = False) -> memoryview:
    """The bytes of `tensor`.

    For `exact` and a contiguous host tensor they are its own memory: do not change it before they are sent.

    Args:
        finite: all values are known to be; codecs that read them anyway check it all the same.

    Raises:
        CodecError: NaN or infinite values, or a type that the codec does not take; names the tensor.
    """
    if not codec.spec.raw:
        return memoryview(codec.encode(tensor, name=name))
    data_type_of(tensor, name)
    host = tensor.detach().to("cpu").contiguous()
    if not (finite or is_finite(host)):
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
    form = _announced(data_type, shape, limit_bytes)
    shape, dtype, size_bytes = form.shape, TORCH_TYPES[form.data_type], form.decoded_bytes
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype):
        raise CodecError(f"{dtype} of shape {shape}, expected {out.dtype} of shape {tuple(out.shape)}")
    if not codec.spec.raw:
        tensor = codec.decode(data, limit_bytes=size_bytes, device=device, out=out)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise CodecError(
                f"{tensor.dtype} of shape {tuple(tensor.shape)}, announced as {dtype} of {shape}"
            )
        return tensor
    values = checked_values(_raw(data, form), form.data_type).view(shape)
    return (torch.empty(shape, dtype=dtype, device=device) if out is None else out).copy_(values)


class WireReader:
    """The values of one announced tensor, piece by piece, for work that stays in a processor's cache."""

    def __init__(
        self, reader: Reader | None, values: torch.Tensor | None, data_type: DataType, device: torch.device
    ) -> None:
        self._reader = reader
        self._data_type = data_type
        self._values = values
        self._device = device
        # Pieces begin at multiples of this many elements.
        self.granularity = 1 if reader is None else reader.granularity

    @property
    def checked(self) -> bool:
        """Whether all values are known to be finite. Those of `exact` are not looked at: whoever reads them does."""
        return self._reader is not None

    def term(self, weight: float) -> Term | None:
        """All of it as a summand of float32 values, where code that adds up in one pass can take it."""
        if self._device.type != "cpu" or self._data_type is not DataType.FLOAT32:
            return None
        if isinstance(self._reader, BlockReader):
            return self._reader.term(weight)
        return None if self._values is None else Term(weight, self._values)

    def read(self, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Elements start..stop: in the bytes themselves where they are raw (do not change them), else in `scratch`, a
        flat contiguous tensor of that length. `stop` is a multiple of the granularity too, or the end.
        """
        if self._reader is None:
            assert self._values is not None
            return self._values[start:stop].to(self._device)
        self._reader.read(start, stop, scratch)
        return scratch


@torch.no_grad()
def open_wire(
    codec: Codec,
    data: Buffer,
    *,
    data_type: int,
    shape: tuple[int, ...],
    limit_bytes: int,
    device: torch.device,
) -> WireReader:
    """As `from_wire`, but nothing is decoded yet, and raw values are not checked.

    Raises:
        CodecError: as `from_wire`.
    """
    form = _announced(data_type, shape, limit_bytes)
    if codec.spec.raw:
        values = view(_raw(data, form), TORCH_TYPES[form.data_type])
        return WireReader(None, values, form.data_type, device)
    found, reader = codec.open(data, form.decoded_bytes, device)
    if found != form:
        raise CodecError(
            f"{found.data_type.name} of shape {found.shape}, announced as {form.data_type.name} of {shape}"
        )
    return WireReader(reader, None, form.data_type, device)


def plain_reader(values: torch.Tensor) -> WireReader:
    """As `open_wire`, of values that never travelled: flat, contiguous, not checked."""
    return WireReader(None, values, data_type_of(values, "values"), values.device)


def _announced(data_type: int, shape: tuple[int, ...], limit_bytes: int) -> Form:
    try:
        form = Form(DataType(data_type), tuple(shape))
    except ValueError:
        raise CodecError(f"unknown data type {data_type}") from None
    if len(form.shape) > DIMENSION_LIMIT:
        raise CodecError(f"{len(form.shape)} dimensions; at most {DIMENSION_LIMIT} are allowed")
    check_size(form, limit_bytes)
    return form


def _raw(data: Buffer, form: Form) -> memoryview:
    raw = memoryview(data).cast("B")
    if len(raw) != form.decoded_bytes:
        raise CodecError(f"{len(raw)} bytes where the shape asks for {form.decoded_bytes}")
    return raw
