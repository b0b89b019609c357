"""The interface of every codec, and `make_codec`, which builds one from its spec.

    codec = make_codec("int8:128")
    data = codec.encode(gradient)                                  # bytes, see layout.py
    gradient = codec.decode(data, limit_bytes=64 << 20)            # or CodecError

A codec has no state: it may be shared by threads. What it dropped is kept by `feedback.ErrorFeedback`.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch

from starlings_compression.errors import CodecError
from starlings_compression.layout import DataType, PackedHeader, read_packed, write_header
from starlings_compression.sizes import packed_bytes, section_bytes, wire_bytes
from starlings_compression.spec import CodecSpec, parse_spec
from starlings_compression.tensors import TORCH_TYPES, chunk_elements, data_type_of

Buffer = bytes | bytearray | memoryview


class Reader(Protocol):
    """The values of one Packed. Everything about it was checked before: reading cannot fail."""

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Writes elements start..stop (flat) into `into`; `start` is a multiple of the `granularity`."""


class Codec(ABC):
    """Turns tensors into self-describing bytes and back.

    Same input, same bytes: for every thread count, and on every machine of a numeric class.
    """

    # Whether the decoded bits are the same on every machine.
    exact_decode: bool = True
    # Whether decoding gives back the very tensor.
    lossless: bool = False
    # Readers start at multiples of this many elements.
    granularity: int = 1

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    # ------------------------------------------------------------------ encoding

    def wire_bytes(self, tensor: torch.Tensor) -> int:
        """Length of `encode(tensor)`."""
        return wire_bytes(
            self.spec, tensor.numel(), item_bytes=tensor.element_size(), dimensions=tensor.dim()
        )

    def encode(self, tensor: torch.Tensor, *, name: str = "tensor") -> bytes:
        """The Packed of `tensor`, of any shape up to 8 dimensions, any strides, on any device.

        Raises:
            CodecError: NaN or infinite values, or a type that this codec does not take; names the tensor.
        """
        data_type_of(tensor, name)
        # A BytesIO hands out its own buffer as bytes without a copy: the page faults of a second buffer would
        # cost more than encoding does.
        stream = io.BytesIO()
        stream.seek(self.wire_bytes(tensor) - 1)
        stream.write(b"\0")
        self.encode_into(tensor, stream.getbuffer(), name=name)
        return stream.getvalue()

    @torch.no_grad()
    def encode_into(self, tensor: torch.Tensor, out: bytearray | memoryview, *, name: str = "tensor") -> int:
        """As `encode`, into the beginning of a writable buffer; returns the length written.

        After an error the buffer holds rubbish.

        Raises:
            CodecError: as `encode`.
            ValueError: the buffer is too short.
        """
        header = PackedHeader(
            spec=self.spec,
            data_type=data_type_of(tensor, name),
            shape=tuple(tensor.shape),
            section_bytes=section_bytes(self.spec, tensor.numel(), tensor.element_size()),
        )
        length = packed_bytes(self.spec, header.section_bytes, len(header.shape))
        if len(out) < length:
            raise ValueError(f"{name} needs {length} bytes, the buffer has {len(out)}")
        window = memoryview(out).cast("B")[:length]
        if torch.frombuffer(window, dtype=torch.uint8).data_ptr() % 8:
            # Sections must be aligned in memory to be written as numbers.
            aligned = bytearray(length)
            self._write(tensor.reshape(-1), write_header(header, memoryview(aligned)), name)
            window[:] = aligned
        else:
            self._write(tensor.reshape(-1), write_header(header, window), name)
        return length

    # ------------------------------------------------------------------ decoding

    @torch.no_grad()
    def decode(
        self,
        data: Buffer,
        *,
        limit_bytes: int,
        device: str | torch.device = "cpu",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor that `data` describes; every value is finite.

        Args:
            limit_bytes: the largest tensor to accept; checked before anything is allocated.
            device: where the result goes, unless `out` says so.
            out: contiguous; receives the result when its shape and type are the encoded ones.

        Raises:
            CodecError: `data` was not written by this codec, is too large, or does not fit `out`. `out` is
                untouched.
        """
        where = out.device if out is not None else torch.device(device)
        header, reader = self._open(data, limit_bytes, where)
        if out is None:
            out = torch.empty(header.shape, dtype=TORCH_TYPES[header.data_type], device=where)
        elif out.shape != header.shape or out.dtype != TORCH_TYPES[header.data_type]:
            raise CodecError(
                f"a {header.data_type.name} tensor of shape {header.shape} where {out.dtype} of shape "
                f"{tuple(out.shape)} is expected"
            )
        elif not out.is_contiguous():
            raise ValueError("`out` must be contiguous")
        flat = out.view(-1)
        step = chunk_elements(where, self.granularity)
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            reader.read(start, stop, flat[start:stop])
        return out

    @torch.no_grad()
    def add_decoded(
        self, data: Buffer, target: torch.Tensor, *, weight: float = 1.0, limit_bytes: int
    ) -> None:
        """`target += weight * decode(data)`, chunk by chunk: no second tensor of that size is made.

        `target` is contiguous and has the encoded shape; its type may be another floating one.

        Raises:
            CodecError: as `decode`; `target` is untouched then.
        """
        header, reader = self._open(data, limit_bytes, target.device)
        if target.shape != header.shape:
            raise CodecError(f"a tensor of shape {header.shape} where {tuple(target.shape)} is expected")
        flat = target.view(-1)
        step = chunk_elements(target.device, self.granularity)
        scratch = torch.empty(
            min(step, flat.numel()), dtype=TORCH_TYPES[header.data_type], device=flat.device
        )
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            chunk = scratch[: stop - start]
            reader.read(start, stop, chunk)
            flat[start:stop].add_(chunk, alpha=weight)

    def _open(self, data: Buffer, limit_bytes: int, device: torch.device) -> tuple[PackedHeader, Reader]:
        header, sections = read_packed(memoryview(data).cast("B"), limit_bytes=limit_bytes)
        if header.spec != self.spec:
            raise CodecError(f"encoded as {header.spec}, expected {self.spec}")
        expected = section_bytes(self.spec, header.element_count, header.data_type.item_bytes)
        if header.section_bytes != expected:
            raise CodecError(f"sections of {header.section_bytes} bytes where the shape asks for {expected}")
        return header, self._reader(header, sections, device)

    # ------------------------------------------------------------------ what a codec implements

    @abstractmethod
    def _write(self, flat: torch.Tensor, sections: tuple[memoryview, ...], name: str) -> None:
        """Fills the sections from a contiguous flat tensor; raises CodecError for values it does not take."""

    @abstractmethod
    def _reader(self, header: PackedHeader, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        """Checks all values of the sections (their lengths are right); returns their reader or raises
        CodecError.
        """


def check_floating(data_type: DataType, name: str, spec: CodecSpec) -> None:
    """Raises CodecError for integers and booleans, which a lossy codec must not touch."""
    if not TORCH_TYPES[data_type].is_floating_point:
        raise CodecError(f"{name}: {spec} takes floating-point tensors, not {data_type.name}; use exact")


def make_codec(spec: str | CodecSpec) -> Codec:
    """The codec that `spec` names.

    Raises:
        SpecError: there is no such codec.
    """
    # Here, because the implementations import the interface above.
    from starlings_compression.blocks import Fp16Codec, Int8Codec
    from starlings_compression.exact import ExactCodec

    registry: dict[str, Callable[[CodecSpec], Codec]] = {
        "exact": ExactCodec,
        "fp16": Fp16Codec,
        "int8": Int8Codec,
    }
    resolved = parse_spec(spec) if isinstance(spec, str) else spec
    return registry[resolved.elements[0].name](resolved)


def decode_any(
    data: Buffer, *, limit_bytes: int, device: str | torch.device = "cpu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `Codec.decode`, by whatever codec the bytes name. For tools: protocols insist on one codec."""
    header, _ = read_packed(memoryview(data).cast("B"), limit_bytes=limit_bytes)
    return make_codec(header.spec).decode(data, limit_bytes=limit_bytes, device=device, out=out)
