"""`...|zstd:LEVEL`: Zstandard over everything that the rest of the chain wrote (RFC 8878).

One section: a single Zstandard frame that states its content's size, or, where that would not be shorter, the plain
bytes. The plain length follows from spec and shape, so a section of exactly that length is plain, a longer one is
refused, and a frame that promises or yields any other length is refused before it costs anything: there is no
decompression bomb beyond what the shape admits.
"""

from __future__ import annotations

from typing import Any

import torch

from starlings_compression.codec import Codec, Reader, writable
from starlings_compression.errors import CodecError, SpecError
from starlings_compression.layout import (
    Form,
    PackedHeader,
    checked_sections,
    split_sections,
    write_header,
)
from starlings_compression.sizes import body_bytes, most_bytes, packed_bytes, plain_section_bytes
from starlings_compression.spec import CodecSpec
from starlings_compression.state import CodecState
from starlings_compression.tensors import data_type_of, is_finite

# No frame of ours has a larger window, so none may make the reader set aside more.
WINDOW_LIMIT_BYTES = 8 << 20
PIECE_BYTES = 1 << 20


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise SpecError(
            "zstd needs the Python package zstandard on every machine of the job: pip install zstandard"
        ) from None
    return zstandard


class ZstdCodec(Codec):
    """Squeezes the sections of `inner`."""

    def __init__(self, spec: CodecSpec, inner: Codec) -> None:
        super().__init__(spec)
        assert spec.squeezer is not None
        self._inner = inner
        self._library = _zstandard()
        self._level = spec.squeezer.arguments[0]

    @torch.no_grad()
    def encode_into(
        self,
        tensor: torch.Tensor,
        out: bytearray | memoryview,
        state: CodecState | None = None,
        *,
        name: str = "tensor",
    ) -> int:
        form = Form(data_type_of(tensor, name), tuple(tensor.shape))
        item_bytes = form.data_type.item_bytes
        window = writable(out, most_bytes(self.spec, form.shape, item_bytes), name)
        plain = self._plain_of(tensor, form, state, name)
        start = packed_bytes(self.spec, (0,), len(form.shape))
        length = self._squeeze(plain, window[start:])
        if length is None:
            length = len(plain)
            window[start : start + length] = plain
        header = PackedHeader(self.spec, form, (length,))
        write_header(header, window[: start + length])
        return start + length

    def _plain_of(self, tensor: torch.Tensor, form: Form, state: CodecState | None, name: str) -> memoryview:
        """What the rest of the chain makes of the tensor; its own memory where that is the same."""
        if self._inner.spec.raw and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            if not is_finite(tensor):
                raise CodecError(f"{name}: NaN or infinite values")
            return tensor.detach().view(-1).view(torch.uint8).numpy().data
        sections = plain_section_bytes(self.spec, form.shape, form.data_type.item_bytes)
        plain = bytearray(body_bytes(sections))
        self._inner.write(tensor.contiguous(), split_sections(sections, memoryview(plain)), name, state)
        return memoryview(plain)

    def _squeeze(self, plain: memoryview, out: memoryview) -> int | None:
        """Writes the frame piece by piece, so that no second buffer is needed; None when it is not shorter."""
        squeezer = self._library.ZstdCompressor(
            level=self._level, write_checksum=False, write_content_size=True
        ).compressobj(size=len(plain))
        written = 0
        for start in range(0, len(plain), PIECE_BYTES):
            piece = plain[start : start + PIECE_BYTES]
            found = squeezer.compress(piece)
            if start + PIECE_BYTES >= len(plain):
                found += squeezer.flush()
            if written + len(found) >= len(plain):
                return None
            out[written : written + len(found)] = found
            written += len(found)
        return written if written else None

    def open_sections(
        self, header: PackedHeader, sections: tuple[memoryview, ...], device: torch.device
    ) -> Reader:
        form = header.form
        plain_sections = plain_section_bytes(self.spec, form.shape, form.data_type.item_bytes)
        length = body_bytes(plain_sections)
        if len(sections) != 1 or len(sections[0]) > length:
            raise CodecError(f"sections of {header.section_bytes} bytes where at most {length} are right")
        plain = sections[0] if len(sections[0]) == length else self._plain(sections[0], length)
        return self._inner.reader(form, checked_sections(plain_sections, plain), device)

    def _plain(self, squeezed: memoryview, length: int) -> memoryview:
        zstd = self._library
        try:
            frame = zstd.get_frame_parameters(squeezed)
            if frame.content_size != length or frame.dict_id:
                raise CodecError(f"a frame of {frame.content_size} bytes where {length} are right")
            plain = zstd.ZstdDecompressor(max_window_size=WINDOW_LIMIT_BYTES).decompress(
                squeezed, max_output_size=length, allow_extra_data=False
            )
        except zstd.ZstdError as error:
            raise CodecError(f"a malformed Zstandard frame: {error}") from None
        if len(plain) != length:
            raise CodecError(f"a frame of {len(plain)} bytes where {length} are right")
        return memoryview(plain)

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        raise NotImplementedError("sized by the data: see encode_into")

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        raise NotImplementedError("sized by the data: see open_sections")
