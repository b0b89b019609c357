"""`fp16`, `bf16`, `fp8:B` and `fp8-e5m2:B`: shorter floating-point numbers."""

from __future__ import annotations

import torch

from starlings_compression.blocks import BFLOAT16_MAX, FLOAT32_MAX, SMALLEST_NORMAL, BlockCodec, Workspace
from starlings_compression.codec import Codec, Reader, check_floating
from starlings_compression.errors import CodecError
from starlings_compression.layout import Form
from starlings_compression.state import CodecState
from starlings_compression.tensors import DATA_TYPES, TORCH_TYPES, chunk_elements, is_finite, view


def _check_exponents(codes: torch.Tensor, mask: int) -> None:
    """Raises CodecError when all bits of `mask` are set in a code: NaN or infinity."""
    step = chunk_elements(codes.device)
    scratch = torch.empty(min(step, codes.numel()), dtype=codes.dtype, device=codes.device)
    for start in range(0, codes.numel(), step):
        chunk = scratch[: min(step, codes.numel() - start)]
        torch.bitwise_and(codes[start : start + step], mask, out=chunk)
        if int(chunk.max()) == mask:
            raise CodecError("NaN or infinite values")


class Fp16Codec(BlockCodec):
    """`fp16`: half precision, blocks of 1024 values, moved by a power of two to peak in 2**14 .. 2**15.

    So small gradients keep their bits, which plain half precision rounds away below 6e-5 and loses below
    6e-8, and nothing overflows. Relative error 2**-11 for all values within 2**-28 of their block's peak.
    """

    bits = 16
    largest_code = 65504.0

    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        # On the bits, as a power function may be off by one. 2**e has the exponent field e + 127. A peak with
        # field E lies in 2**(E - 127) .. 2**(E - 126), so its scale is 2**(E - 141), with field E - 14; the
        # inverse of field f has 254 - f.
        field = work.peaks.view(torch.int32)
        field.bitwise_right_shift_(23).sub_(14).clamp_(min=1)
        work.inverses.view(torch.int32).copy_(field).neg_().add_(254).bitwise_left_shift_(23)
        field.bitwise_left_shift_(23)
        scales.copy_(work.peaks)

    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        out.view(torch.float16).copy_(scaled)

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(packed.view(torch.float16))

    def check_codes(self, packed: torch.Tensor) -> None:
        _check_exponents(packed.view(torch.int16), 0x7C00)


class _Fp8Codec(BlockCodec):
    """Eight-bit floating point (Micikevicius 2022): scale = peak / the format's largest number."""

    bits = 8
    code_type: torch.dtype

    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        # Rounding a scale down by 2**-8 keeps values below where the format would round to infinity.
        scales.copy_(work.peaks.div_(self.largest_code).clamp_(min=SMALLEST_NORMAL))
        work.inverses.copy_(scales).reciprocal_()

    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        out.view(self.code_type).copy_(scaled)


class Fp8Codec(_Fp8Codec):
    """`fp8:B`: e4m3 without infinities; three bits of precision over five decimal orders of magnitude."""

    code_type = torch.float8_e4m3fn
    largest_code = 448.0

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        # Shifted by three places the bits are those of a half-precision number that is 2**8 times smaller, below
        # the normal numbers too: ten times as fast as torch's own conversion.
        bits = packed.to(torch.int16)
        signs = (bits & 0x80) << 8
        bits.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(signs)
        into.copy_(bits.view(torch.float16)).mul_(256.0)

    def check_codes(self, packed: torch.Tensor) -> None:
        _check_exponents(packed, 0x7F)


class Fp8E5m2Codec(_Fp8Codec):
    """`fp8-e5m2:B`: two bits of precision over nine decimal orders of magnitude."""

    code_type = torch.float8_e5m2
    largest_code = 57344.0

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        # e5m2 is the upper byte of half precision.
        into.copy_(packed.to(torch.int16).bitwise_left_shift_(8).view(torch.float16))

    def check_codes(self, packed: torch.Tensor) -> None:
        _check_exponents(packed, 0x7C)


class Bf16Codec(Codec):
    """`bf16`: float32 rounded to its upper 16 bits, as one section. No scale: it has the range of float32."""

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        flat = values.view(-1)
        check_floating(DATA_TYPES[flat.dtype], name, self.spec)
        codes = view(sections[0], torch.bfloat16)
        step = chunk_elements(flat.device)
        for start in range(0, flat.numel(), step):
            source, target = flat[start : start + step], codes[start : start + step]
            # Float64 beyond float32 becomes infinite here, and is refused as such.
            chunk = source if source.dtype.itemsize <= 4 else source.to(torch.float32)
            if not is_finite(chunk):
                raise CodecError(f"{name}: NaN or infinite values")
            target.copy_(chunk)
            if not is_finite(target):
                # Values at the very end of float32 round to infinity.
                target.copy_(chunk.clamp(-BFLOAT16_MAX, BFLOAT16_MAX))

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        codes = view(sections[0], torch.bfloat16)
        if not is_finite(codes):
            raise CodecError("NaN or infinite values")
        largest = min(torch.finfo(TORCH_TYPES[form.data_type]).max, FLOAT32_MAX)
        return _Bf16Reader(codes.to(device), largest if largest < BFLOAT16_MAX else None)


class _Bf16Reader:
    granularity = 1

    def __init__(self, codes: torch.Tensor, bound: float | None) -> None:
        self._codes = codes
        self._bound = bound

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        codes = self._codes[start:stop]
        into.copy_(codes if self._bound is None else codes.float().clamp_(-self._bound, self._bound))
