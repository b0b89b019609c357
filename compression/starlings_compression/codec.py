"""The interface of every codec, and `make_codec`, which builds one from its spec.

    codec = make_codec("topk:64/4096|int2")
    data = codec.encode(gradient)                                  # bytes, see layout.py
    gradient = codec.decode(data, limit_bytes=64 << 20)            # or CodecError

A codec itself has no state and may be shared by threads. What some remember is in a `state.CodecState` that the
caller owns; what was dropped is kept by `feedback.ErrorFeedback`.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from starlings_compression.errors import CodecError
from starlings_compression.layout import (
    DataType,
    Form,
    Packed,
    PackedHeader,
    read_packed,
    write_header,
)
from starlings_compression.sizes import SizeEstimate, packed_bytes, plain_section_bytes, size_estimate
from starlings_compression.spec import CodecSpec, parse_spec
from starlings_compression.state import CodecState
from starlings_compression.tensors import TORCH_TYPES, chunk_elements, data_type_of
from starlings_compression.terms import Landing, Term

Buffer = Packed


class Reader(Protocol):
    """The values of one Packed. Everything about it was checked before: reading cannot fail."""

    # Reading starts at multiples of this many elements.
    granularity: int

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Writes elements start..stop (flat) into `into`, a flat contiguous tensor; `stop` is a multiple of the
        granularity too, or the end.
        """


class Source(Protocol):
    """A float32 tensor that is computed when it is encoded, such as a sum."""

    shape: tuple[int, ...]
    device: torch.device
    # Reading starts at multiples of this many elements.
    granularity: int

    def read(self, start: int, stop: int, into: torch.Tensor) -> torch.Tensor:
        """Elements start..stop (flat), in `into` or elsewhere; `stop` too is a multiple of it, or the end."""

    def terms(self) -> Sequence[Term]:
        """What it is the weighted sum of, added up in this order, each rounded alone; nothing where that cannot be
        said. Values that are not finite need not be known yet: `read` refuses them.
        """

    @property
    def landing(self) -> Landing | None:
        """Where what the encoded sum decodes to is wanted; an encoder may leave that to others."""


class Codec(ABC):
    """Turns tensors into self-describing bytes and back.

    Same input, same state, same bytes: for every thread count, and on every machine of a numeric class.
    """

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    @property
    def exact_decode(self) -> bool:
        """Whether the decoded bits are the same on every machine."""
        return self.spec.exact_decode

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very tensor."""
        return self.spec.lossless

    # ------------------------------------------------------------------ encoding

    def size_estimate(self, tensor: torch.Tensor) -> SizeEstimate:
        """Length of `encode(tensor)`; see `sizes`."""
        return size_estimate(self.spec, tensor.shape, item_bytes=tensor.element_size())

    def encode(self, tensor: torch.Tensor, state: CodecState | None = None, *, name: str = "tensor") -> bytes:
        """The Packed of `tensor`, of any shape up to 8 dimensions, any strides, on any device.

        Args:
            state: what the codec remembers of earlier tensors; without one it starts anew.
            name: for error messages.

        Raises:
            CodecError: NaN or infinite values, or a type that this codec does not take; names the tensor.
        """
        data_type_of(tensor, name)
        return filled(
            self.size_estimate(tensor).most_bytes,
            lambda buffer: self.encode_into(tensor, buffer, state, name=name),
        )

    @torch.no_grad()
    def encode_into(
        self,
        tensor: torch.Tensor,
        out: bytearray | memoryview,
        state: CodecState | None = None,
        *,
        name: str = "tensor",
    ) -> int:
        """As `encode`, into the beginning of a writable buffer; returns the length written.

        The buffer must take `size_estimate(tensor).most_bytes`. After an error it holds rubbish.

        Raises:
            CodecError: as `encode`.
            ValueError: the buffer is too short.
        """
        form = Form(data_type_of(tensor, name), tuple(tensor.shape))
        values = tensor.contiguous()
        return self.fill(form, out, name, lambda sections: self.write(values, sections, name, state))

    @torch.no_grad()
    def encode_with_error(
        self,
        tensor: torch.Tensor | Source,
        out: bytearray | memoryview,
        error: torch.Tensor,
        state: CodecState | None = None,
        *,
        residual: torch.Tensor | None = None,
        decay: float = 1.0,
        name: str = "tensor",
    ) -> int:
        """As `encode_into` of x = tensor + decay * residual in float32; `error` receives x - decode(encode(x)).

        Args:
            error: float32, contiguous, of the tensor's shape and device, other memory than the residual's. After a
                CodecError it holds rubbish.
            residual: as `error`; None: zero.

        Raises:
            CodecError: as `encode`.
            ValueError: the buffer is too short.
        """
        values = tensor if isinstance(tensor, torch.Tensor) else tensor.read(0, error.numel(), error.view(-1))
        correct(values.view(error.shape), residual, decay, error)
        length = self.encode_into(error, out, state, name=name)
        limit_bytes = error.numel() * error.element_size()
        self.add_decoded(memoryview(out)[:length], error, weight=-1.0, limit_bytes=limit_bytes)
        return length

    def fill(
        self,
        form: Form,
        out: bytearray | memoryview,
        name: str,
        write: Callable[[tuple[memoryview, ...]], None],
    ) -> int:
        """Writes the header into `out` and lets `write` fill the sections; returns the length."""
        header = PackedHeader(
            self.spec, form, plain_section_bytes(self.spec, form.shape, form.data_type.item_bytes)
        )
        length = packed_bytes(self.spec, header.section_bytes, len(form.shape))
        window = writable(out, length, name)
        if torch.frombuffer(window, dtype=torch.uint8).data_ptr() % 8:
            # Sections must be aligned in memory to be written as numbers.
            aligned = bytearray(length)
            write(write_header(header, memoryview(aligned)))
            window[:] = aligned
        else:
            write(write_header(header, window))
        return length

    # ------------------------------------------------------------------ decoding

    @torch.no_grad()
    def decode(
        self,
        data: Packed,
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
        form, reader = self.open(data, limit_bytes, where)
        if out is None:
            out = torch.empty(form.shape, dtype=TORCH_TYPES[form.data_type], device=where)
        elif out.shape != form.shape or out.dtype != TORCH_TYPES[form.data_type]:
            raise CodecError(
                f"a {form.data_type.name} tensor of shape {form.shape} where {out.dtype} of shape "
                f"{tuple(out.shape)} is expected"
            )
        elif not out.is_contiguous():
            raise ValueError("`out` must be contiguous")
        flat = out.view(-1)
        step = chunk_elements(where, reader.granularity)
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            reader.read(start, stop, flat[start:stop])
        return out

    @torch.no_grad()
    def add_decoded(
        self, data: Packed, target: torch.Tensor, *, weight: float = 1.0, limit_bytes: int
    ) -> None:
        """`target += weight * decode(data)`, chunk by chunk: no second tensor of that size is made.

        `target` is contiguous and has the encoded shape; its type may be another floating one.

        Raises:
            CodecError: as `decode`; `target` is untouched then.
        """
        form, reader = self.open(data, limit_bytes, target.device)
        if target.shape != form.shape:
            raise CodecError(f"a tensor of shape {form.shape} where {tuple(target.shape)} is expected")
        flat = target.view(-1)
        step = chunk_elements(target.device, reader.granularity)
        scratch = torch.empty(min(step, flat.numel()), dtype=TORCH_TYPES[form.data_type], device=flat.device)
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            chunk = scratch[: stop - start]
            reader.read(start, stop, chunk)
            flat[start:stop].add_(chunk, alpha=weight)

    def open(self, data: Packed, limit_bytes: int, device: torch.device) -> tuple[Form, Reader]:
        """Checks all of `data`; what it describes, and its reader. Raises CodecError."""
        header, sections = read_packed(memoryview(data).cast("B"), limit_bytes=limit_bytes)
        if header.spec != self.spec:
            raise CodecError(f"encoded as {header.spec}, expected {self.spec}")
        return header.form, self.open_sections(header, sections, device)

    def open_sections(
        self, header: PackedHeader, sections: tuple[memoryview, ...], device: torch.device
    ) -> Reader:
        """Checks sections against the header's form before their values. Raises CodecError."""
        form = header.form
        expected = plain_section_bytes(self.spec, form.shape, form.data_type.item_bytes)
        if header.section_bytes != expected:
            raise CodecError(f"sections of {header.section_bytes} bytes where the shape asks for {expected}")
        return self.reader(form, sections, device)

    # ------------------------------------------------------------------ what a codec implements

    @abstractmethod
    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        """Fills the sections from a contiguous tensor; raises CodecError for values it does not take."""

    @abstractmethod
    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        """Checks all values of the sections (their lengths are right); returns their reader or raises
        CodecError.
        """


def filled(most_bytes: int, write: Callable[[memoryview], int]) -> bytes:
    """Bytes that `write` puts into a buffer of `most_bytes`; it returns how many they are."""
    # A BytesIO hands out its own buffer as bytes without a copy: the page faults of a second buffer would
    # cost more than encoding does.
    stream = io.BytesIO()
    stream.seek(most_bytes - 1)
    stream.write(b"\0")
    with stream.getbuffer() as buffer:
        length = write(buffer)
    stream.truncate(length)
    return stream.getvalue()


def correct(
    values: torch.Tensor, residual: torch.Tensor | None, decay: float, out: torch.Tensor
) -> torch.Tensor:
    """`values + decay * residual`, in float32, into `out`."""
    if residual is None:
        return out.copy_(values)
    return torch.add(values.to(torch.float32), residual, alpha=decay, out=out)


def writable(out: bytearray | memoryview, length: int, name: str) -> memoryview:
    """The first `length` bytes of `out`. Raises ValueError when it is shorter."""
    if len(out) < length:
        raise ValueError(f"{name} needs {length} bytes, the buffer has {len(out)}")
    return memoryview(out).cast("B")[:length]


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
    from starlings_compression.registry import build

    return build(parse_spec(spec) if isinstance(spec, str) else spec)


def decode_any(
    data: Packed, *, limit_bytes: int, device: str | torch.device = "cpu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `Codec.decode`, by whatever codec the bytes name. For tools: protocols insist on one codec."""
    header, _ = read_packed(memoryview(data).cast("B"), limit_bytes=limit_bytes)
    return make_codec(header.spec).decode(data, limit_bytes=limit_bytes, device=device, out=out)
