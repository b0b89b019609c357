"""`exact`: the tensor's own bytes, little-endian, as one section."""

from __future__ import annotations

import torch

from starlings_compression.codec import Codec, Reader
from starlings_compression.errors import CodecError
from starlings_compression.layout import DataType, Form
from starlings_compression.state import CodecState
from starlings_compression.tensors import TORCH_TYPES, is_finite, view


class ExactCodec(Codec):
    """Any type that the layout knows. Values must be finite here too: a NaN poisons every sum."""

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        flat = values.view(-1)
        if not is_finite(flat):
            raise CodecError(f"{name}: NaN or infinite values")
        view(sections[0], flat.dtype).copy_(flat)

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        return _ExactReader(checked_values(sections[0], form.data_type))


def checked_values(raw: memoryview, data_type: DataType) -> torch.Tensor:
    """The flat tensor over `raw`. Raises CodecError for NaN, infinities, and booleans other than 0 and 1."""
    if data_type == DataType.BOOL:
        numbers = view(raw, torch.uint8)
        if len(raw) and int(numbers.max()) > 1:
            raise CodecError("a boolean that is neither 0 nor 1")
        return numbers.view(torch.bool)
    values = view(raw, TORCH_TYPES[data_type])
    if not is_finite(values):
        raise CodecError("NaN or infinite values")
    return values


class _ExactReader:
    granularity = 1

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        into.copy_(self._values[start:stop])
