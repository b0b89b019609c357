"""Codecs that scale blocks of values: `int8:B` and `fp16`. Two sections: scales (bfloat16), then codes.

    code = round(value / scale)          value' = code * scale

Scales are bfloat16, not float16: two bytes as well, with the range of float32. A gradient's block can peak at
1e-6, and a 127th of that is far below what float16 can hold; an outlier of 1e9 is far above. What bfloat16
lacks in precision costs nothing: the code is computed with the *rounded* scale, and rounding by at most 2**-8
keeps |value / scale| below 127.5.

Work goes through chunks that stay in a core's cache, with buffers allocated once per call.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from starlings_compression.codec import Codec, Reader, check_floating
from starlings_compression.errors import CodecError
from starlings_compression.layout import Form
from starlings_compression.sizes import block_size
from starlings_compression.spec import CodecSpec
from starlings_compression.state import CodecState
from starlings_compression.tensors import DATA_TYPES, TORCH_TYPES, chunk_elements, view

# Below the smallest normal number machines disagree (some flush to zero), so scales never go there.
SMALLEST_NORMAL = 2.0**-126
FLOAT32_MAX = torch.finfo(torch.float32).max


class BlockCodec(Codec):
    """`code * scale` by blocks. Subclasses say how a scale follows from a peak, and what a code is."""

    code_type: torch.dtype
    # No code is larger in magnitude.
    largest_code: float

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.block = block_size(spec.values)

    @abstractmethod
    def _scales(self, peaks: torch.Tensor, scales: torch.Tensor, inverses: torch.Tensor) -> None:
        """Fills `scales` (bfloat16) and `inverses` (float32, what values are multiplied by) from the peaks.

        `peaks` (float32) may be overwritten.
        """

    def _round(self, scaled: torch.Tensor) -> None:
        """Rounds scaled values in place where the conversion to codes would not do it rightly."""

    @abstractmethod
    def _check_codes(self, codes: torch.Tensor) -> None:
        """Raises CodecError when a code is not finite."""

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        flat = values.view(-1)
        check_floating(DATA_TYPES[flat.dtype], name, self.spec)
        count, device, on_host = flat.numel(), flat.device, flat.device.type == "cpu"
        host_scales, host_codes = view(sections[0], torch.bfloat16), view(sections[1], self.code_type)
        scales = host_scales if on_host else torch.empty_like(host_scales, device=device)
        codes = host_codes if on_host else torch.empty_like(host_codes, device=device)
        # NaN wins every maximum, so this one number tells at the end whether any value was NaN or infinite.
        worst = torch.zeros((), dtype=torch.float32, device=device)
        whole = count - count % self.block
        work = _Workspace(min(chunk_elements(device, self.block), max(whole, self.block)), self.block, device)
        for start in range(0, whole, work.capacity):
            stop = min(start + work.capacity, whole)
            blocks = slice(start // self.block, stop // self.block)
            worst = self._write_chunk(flat[start:stop], scales[blocks], codes[start:stop], work, worst)
        if whole < count:
            # The last block is filled up with zeros, which neither change its peak nor travel.
            last = torch.zeros(self.block, dtype=flat.dtype, device=device)
            last[: count - whole] = flat[whole:]
            last_codes = torch.empty(self.block, dtype=self.code_type, device=device)
            worst = self._write_chunk(last, scales[-1:], last_codes, work, worst)
            codes[whole:] = last_codes[: count - whole]
        if not math.isfinite(float(worst)):
            raise CodecError(f"{name}: NaN or infinite values")
        if not on_host:
            host_scales.copy_(scales)
            host_codes.copy_(codes)

    def _write_chunk(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        work: _Workspace,
        worst: torch.Tensor,
    ) -> torch.Tensor:
        """Whole blocks only. Returns the larger of `worst` and the chunk's peak."""
        blocks = values.numel() // self.block
        scaled, peaks, inverses = work.scaled[:blocks], work.peaks[:blocks], work.inverses[:blocks]
        source = values.view(blocks, self.block)
        if source.dtype != torch.float32:
            source = work.converted(source)
        torch.abs(source, out=scaled)
        torch.amax(scaled, dim=1, keepdim=True, out=peaks)
        worst = torch.maximum(worst, peaks.amax())
        self._scales(peaks, scales.view(blocks, 1), inverses)
        torch.mul(source, inverses, out=scaled)
        self._round(scaled)
        codes.copy_(scaled.view(-1))
        return worst

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        scales = view(sections[0], torch.bfloat16).to(torch.float32)
        codes = view(sections[1], self.code_type)
        largest_scale = 0.0
        if scales.numel():
            low, high = torch.aminmax(scales)
            largest_scale = float(high)
            # Written so that NaN fails too.
            if not (float(low) >= 0.0 and largest_scale < float("inf")):
                raise CodecError("a scale is negative or not finite")
        self._check_codes(codes)
        # A product beyond the type becomes the largest finite value: a block may peak at the end of its
        # type's range.
        largest = min(torch.finfo(TORCH_TYPES[form.data_type]).max, FLOAT32_MAX)
        bound = largest if largest_scale * self.largest_code > largest else None
        return _BlockReader(scales.to(device), codes.to(device), self.block, bound)


class _Workspace:
    """Buffers for one call."""

    def __init__(self, capacity: int, block: int, device: torch.device) -> None:
        self.capacity = capacity
        blocks = capacity // block
        self.scaled = torch.empty(blocks, block, dtype=torch.float32, device=device)
        self.peaks = torch.empty(blocks, 1, dtype=torch.float32, device=device)
        self.inverses = torch.empty(blocks, 1, dtype=torch.float32, device=device)
        self._converted: torch.Tensor | None = None

    def converted(self, source: torch.Tensor) -> torch.Tensor:
        """`source` as float32. Float64 values beyond float32 become infinite, and are refused as such."""
        if self._converted is None:
            self._converted = torch.empty_like(self.scaled)
        return self._converted[: source.shape[0]].copy_(source)


class _BlockReader:
    def __init__(self, scales: torch.Tensor, codes: torch.Tensor, block: int, bound: float | None) -> None:
        self._scales = scales
        self._codes = codes
        self.granularity = block
        self._bound = bound

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        values = into if into.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
        values.copy_(self._codes[start:stop])
        whole = (stop - start) // self.granularity
        first = start // self.granularity
        split = whole * self.granularity
        values[:split].view(whole, self.granularity).mul_(self._scales[first : first + whole].unsqueeze(1))
        if split < stop - start:
            values[split:].mul_(self._scales[first + whole])
        if self._bound is not None:
            values.clamp_(-self._bound, self._bound)
        if values is not into:
            into.copy_(values)


class Int8Codec(BlockCodec):
    """`int8:B`: scale = peak / 127, codes -127 to 127. Errors are at most half a scale."""

    code_type = torch.int8
    largest_code = 128.0

    def _scales(self, peaks: torch.Tensor, scales: torch.Tensor, inverses: torch.Tensor) -> None:
        scales.copy_(peaks.div_(127.0).clamp_(min=SMALLEST_NORMAL))
        inverses.copy_(scales).reciprocal_()

    def _round(self, scaled: torch.Tensor) -> None:
        scaled.round_()

    def _check_codes(self, codes: torch.Tensor) -> None:
        """Every int8 is a code."""


class Fp16Codec(BlockCodec):
    """`fp16`: half precision, blocks of 1024 values, moved by a power of two to peak in 2**14 .. 2**15.

    So small gradients keep their bits, which plain half precision rounds away below 6e-5 and loses below
    6e-8, and nothing overflows. Relative error 2**-11 for all values within 2**-28 of their block's peak.
    """

    code_type = torch.float16
    largest_code = 65504.0

    def _scales(self, peaks: torch.Tensor, scales: torch.Tensor, inverses: torch.Tensor) -> None:
        # On the bits, as a power function may be off by one. 2**e has the exponent field e + 127. A peak with
        # field E lies in 2**(E - 127) .. 2**(E - 126), so its scale is 2**(E - 141), with field E - 14; the
        # inverse of field f has 254 - f.
        field = peaks.view(torch.int32)
        field.bitwise_right_shift_(23).sub_(14).clamp_(min=1)
        inverses.view(torch.int32).copy_(field).neg_().add_(254).bitwise_left_shift_(23)
        field.bitwise_left_shift_(23)
        scales.copy_(peaks)

    def _check_codes(self, codes: torch.Tensor) -> None:
        bits = codes.view(torch.int16)
        step = chunk_elements(bits.device)
        scratch = torch.empty(min(step, bits.numel()), dtype=torch.int16)
        for start in range(0, bits.numel(), step):
            chunk = scratch[: min(step, bits.numel() - start)]
            torch.bitwise_and(bits[start : start + step], 0x7C00, out=chunk)
            if int(chunk.max()) == 0x7C00:
                raise CodecError("NaN or infinite values")
