"""The base of codecs that scale blocks of values. Sections: scales (bfloat16), the means of the bins where asked
for (float32), then codes.

    code = round(value / scale)          value' = code * scale

Scales are bfloat16, not float16: two bytes as well, with the range of float32. A gradient's block can peak at
1e-6, and a 127th of that is far below what float16 can hold; an outlier of 1e9 is far above. What bfloat16
lacks in precision costs nothing: the code is computed with the *rounded* scale, and rounding by at most 2**-8
keeps |value / scale| below half a step above the largest code.

Work goes through chunks that stay in a core's cache, with buffers allocated once per call.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from starlings_compression.codec import Codec, Reader, Source, check_floating, correct
from starlings_compression.errors import CodecError
from starlings_compression.layout import DataType, Form
from starlings_compression.means import BinMeans, check_means
from starlings_compression.packing import check_rest, clear_rest, pack
from starlings_compression.sizes import block_size
from starlings_compression.spec import CodecSpec
from starlings_compression.state import CodecState
from starlings_compression.tensors import DATA_TYPES, TORCH_TYPES, chunk_elements, data_type_of, view
from starlings_compression.terms import Term

# Below the smallest normal number machines disagree (some flush to zero), so scales never go there.
SMALLEST_NORMAL = 2.0**-126
# That, and infinity, as the bits of bfloat16.
SMALLEST_NORMAL_BITS, INFINITY_BITS = 0x0080, 0x7F80
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
FLOAT32_MAX = torch.finfo(torch.float32).max


class BlockCodec(Codec):
    """`code * scale` by blocks. Subclasses say how scales follow from a block, and what a code is."""

    bits: int
    # No code stands for a larger magnitude, in units of the scale.
    largest_code: float

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.block = block_size(spec.values)
        self.with_means = spec.values.flag == "means"

    # ------------------------------------------------------------------ what a subclass implements

    @abstractmethod
    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        """Fills `scales` (bfloat16, blocks x 1) and `work.inverses` (float32, what values are multiplied by).

        `work.scaled` holds the magnitudes of `source` (float32, blocks x B) and `work.peaks` their largest; both
        may be overwritten.
        """

    @abstractmethod
    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        """Writes the codes of scaled values (flat, a multiple of 8, may be overwritten) into `out` (uint8)."""

    @abstractmethod
    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        """Writes what the codes in `packed` (uint8) stand for, in units of the scale, into `into` (float32).

        The last byte may hold more codes than `into` takes.
        """

    def codes_of(self, packed: torch.Tensor) -> torch.Tensor:
        """The codes as numbers from 0, for codecs with means."""
        raise NotImplementedError

    def check_codes(self, packed: torch.Tensor) -> None:
        """Raises CodecError when a code is not finite. Every integer is a code."""

    def write_compiled(
        self, flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, correction: Correction | None
    ) -> float | None:
        """Writes whole blocks by compiled code, if there is any; returns a number that is finite exactly when all
        values are. With a correction `flat` is still to be filled, and receives the errors.
        """
        return None

    def term(self, weight: float, scales: torch.Tensor, packed: torch.Tensor) -> Term | None:
        """Codes on the host as a summand, where compiled code can add them up."""
        return None

    def read_compiled(self, scales: torch.Tensor, packed: torch.Tensor, into: torch.Tensor) -> bool:
        """Decodes whole blocks (scales in bfloat16) by compiled code, if there is any."""
        return False

    # ------------------------------------------------------------------ encoding

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        check_floating(DATA_TYPES[values.dtype], name, self.spec)
        self._write(values.view(-1), sections, name, None)

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
        fits = isinstance(tensor, torch.Tensor) or self.block % tensor.granularity == 0
        if self.with_means or error.device.type != "cpu" or not fits:
            return super().encode_with_error(
                tensor, out, error, state, residual=residual, decay=decay, name=name
            )
        if isinstance(tensor, torch.Tensor):
            check_floating(data_type_of(tensor, name), name, self.spec)
            tensor = tensor.reshape(-1)
        # Chunk by chunk: corrected, encoded and compared with what it decodes to while a cache has it.
        flat = error.view(-1)
        old = None if residual is None else residual.reshape(-1)
        correction = Correction(tensor, old, decay, flat, self)
        form = Form(DataType.FLOAT32, tuple(error.shape))
        return self.fill(form, out, name, lambda sections: self._write(flat, sections, name, correction))

    def _write(
        self,
        flat: torch.Tensor,
        sections: tuple[memoryview, ...],
        name: str,
        correction: Correction | None,
    ) -> None:
        count, device, on_host = flat.numel(), flat.device, flat.device.type == "cpu"
        host_scales, host_codes = view(sections[0], torch.bfloat16), view(sections[-1], torch.uint8)
        scales = host_scales if on_host else torch.empty_like(host_scales, device=device)
        codes = host_codes if on_host else torch.empty_like(host_codes, device=device)
        # NaN wins every maximum, so this one number tells at the end whether any value was NaN or infinite.
        worst = torch.zeros((), dtype=torch.float32, device=device)
        whole = count - count % self.block
        peak = self.write_compiled(flat[:whole], scales, codes, correction) if whole else None
        done = 0 if peak is None else whole
        if peak is not None:
            worst.fill_(peak)
        capacity = min(chunk_elements(device, self.block), max(whole - done, self.block))
        means = BinMeans(self.bits, self.codes_of, device) if self.with_means else None
        work = Workspace(capacity, self.block, device, means)
        for start in range(done, whole, capacity):
            stop = min(start + capacity, whole)
            blocks = slice(start // self.block, stop // self.block)
            chunk_codes = codes[start * self.bits // 8 : stop * self.bits // 8]
            if correction is not None:
                correction.apply(start, stop)
            self._write_chunk(flat[start:stop], scales[blocks], chunk_codes, work)
            if correction is not None:
                correction.settle(start, stop, scales[blocks], chunk_codes)
        worst = torch.maximum(worst, work.worst.amax())
        if whole < count:
            # The last block is shorter; its codes are filled up to whole bytes.
            rest = codes[whole * self.bits // 8 :]
            filled = -(-(count - whole) // 8) * self.bits
            last_codes = torch.empty(filled, dtype=torch.uint8, device=device)
            tail = Workspace(count - whole, count - whole, device, means)
            if correction is not None:
                correction.apply(whole, count)
            self._write_chunk(flat[whole:], scales[-1:], last_codes, tail)
            worst = torch.maximum(worst, tail.worst.amax())
            rest.copy_(last_codes[: rest.numel()])
            clear_rest(rest, count - whole, self.bits)
            if correction is not None:
                correction.settle(whole, count, scales[-1:], rest)
        if not math.isfinite(float(worst)):
            raise CodecError(f"{name}: NaN or infinite values")
        if means is not None:
            view(sections[1], torch.float32).copy_(means.finish(self._plain_levels()))
        if not on_host:
            host_scales.copy_(scales)
            host_codes.copy_(codes)

    def _write_chunk(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        work: Workspace,
    ) -> None:
        """Values of `len(scales)` equal blocks."""
        work = work.for_blocks(scales.numel())
        source = values.view(scales.numel(), -1)
        if source.dtype != torch.float32:
            source = work.converted(source)
        torch.abs(source, out=work.scaled)
        torch.amax(work.scaled, dim=1, keepdim=True, out=work.peaks)
        torch.maximum(work.worst, work.peaks, out=work.worst)
        self.fit(source, work, scales.view(-1, 1))
        scaled = torch.mul(source, work.inverses, out=work.scaled).view(-1)
        if scaled.numel() % 8:
            scaled = torch.nn.functional.pad(scaled, (0, -scaled.numel() % 8))
        self.put(scaled, work, codes)
        if work.means is not None:
            work.means.add(source, scales, codes)

    # ------------------------------------------------------------------ decoding

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        scale_bits = view(sections[0], torch.int16)
        _check_scales(scale_bits)
        packed_scales = scale_bits.view(torch.bfloat16)
        scales = packed_scales.to(torch.float32)
        codes = view(sections[-1], torch.uint8)
        largest_scale, largest_code = float(scales.amax()) if scales.numel() else 0.0, self.largest_code
        check_rest(codes, form.element_count, self.bits)
        self.check_codes(codes)
        means = None
        if self.with_means:
            means = view(sections[1], torch.float32).to(device, copy=True)
            largest_code = check_means(means)
        # A product beyond the type becomes the largest finite value: a block may peak at the end of its
        # type's range.
        largest = min(torch.finfo(TORCH_TYPES[form.data_type]).max, FLOAT32_MAX)
        bound = largest if largest_scale * largest_code > largest else None
        return BlockReader(self, packed_scales.to(device), scales.to(device), codes.to(device), means, bound)

    def _plain_levels(self) -> torch.Tensor:
        """What each code stands for without means, in units of the scale."""
        levels = torch.empty(1 << self.bits, dtype=torch.float32)
        packed = torch.empty(levels.numel() * self.bits // 8, dtype=torch.uint8)
        numbers = torch.arange(levels.numel(), dtype=torch.uint8)
        pack(numbers, self.bits, packed)
        self.get(packed, levels)
        return levels


def _check_scales(bits: torch.Tensor) -> None:
    """Raises CodecError unless all are zero, or positive normal numbers of bfloat16 (given as int16).

    No encoder writes others. Machines that flush subnormal numbers would decode them to other values than the rest.
    """
    if bits.numel() == 0:
        return
    low, high = map(int, torch.aminmax(bits))
    # With the sign in front, the bits of positive numbers are in order, and those of negative ones are below zero.
    if low < 0 or high >= INFINITY_BITS:
        raise CodecError("a scale is negative or not finite")
    if low < SMALLEST_NORMAL_BITS and bool(((bits > 0) & (bits < SMALLEST_NORMAL_BITS)).any()):
        raise CodecError("a scale is too small to be a normal number")


class Workspace:
    """Buffers for one call."""

    def __init__(self, capacity: int, block: int, device: torch.device, means: BinMeans | None) -> None:
        blocks = capacity // block
        self.scaled = torch.empty(blocks, block, dtype=torch.float32, device=device)
        self.peaks = torch.empty(blocks, 1, dtype=torch.float32, device=device)
        self.inverses = torch.empty(blocks, 1, dtype=torch.float32, device=device)
        # The largest peak that a block at this place in a chunk ever had.
        self.worst = torch.zeros(blocks, 1, dtype=torch.float32, device=device)
        self.means = means
        # Shared by all cuts of a workspace.
        self._spare: dict[torch.dtype, torch.Tensor] = {}

    @property
    def codes(self) -> torch.Tensor:
        """A flat buffer of bytes, one for each value, rounded up to a multiple of 8."""
        return self._buffer(torch.uint8)[: -(-self.scaled.numel() // 8) * 8]

    def for_blocks(self, blocks: int) -> Workspace:
        """The same buffers, cut to a number of blocks."""
        if self.scaled.shape[0] == blocks:
            return self
        cut = Workspace.__new__(Workspace)
        cut.scaled, cut.peaks, cut.inverses = (
            self.scaled[:blocks],
            self.peaks[:blocks],
            self.inverses[:blocks],
        )
        cut.worst = self.worst[:blocks]
        cut.means, cut._spare = self.means, self._spare
        return cut

    def converted(self, source: torch.Tensor) -> torch.Tensor:
        """`source` as float32. Float64 values beyond float32 become infinite, and are refused as such."""
        return self._buffer(torch.float32)[: source.numel()].view(source.shape).copy_(source)

    def _buffer(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._spare:
            self._spare[dtype] = torch.empty(self.scaled.numel() + 7, dtype=dtype, device=self.scaled.device)
        return self._spare[dtype]


class Correction:
    """Error feedback of one call: what is added before a chunk is written, and what writing it dropped."""

    def __init__(
        self,
        values: torch.Tensor | Source,
        residual: torch.Tensor | None,
        decay: float,
        error: torch.Tensor,
        codec: BlockCodec,
    ) -> None:
        self.values = values
        self.residual = residual
        self.decay = decay
        self.error = error
        self._codec = codec
        self._scratch: torch.Tensor | None = None

    def apply(self, start: int, stop: int) -> None:
        residual = None if self.residual is None else self.residual[start:stop]
        error = self.error[start:stop]
        if isinstance(self.values, torch.Tensor):
            values = self.values[start:stop]
        else:
            values = self.values.read(start, stop, error)
        correct(values, residual, self.decay, error)

    def settle(self, start: int, stop: int, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """`error[start:stop]` was encoded so: subtract what that decodes to."""
        if self._scratch is None or self._scratch.numel() < stop - start:
            self._scratch = torch.empty(stop - start, dtype=torch.float32, device=self.error.device)
        decoded = self._scratch[: stop - start]
        bound = FLOAT32_MAX if float(scales.max()) * self._codec.largest_code > FLOAT32_MAX else None
        reader = BlockReader(self._codec, scales, scales.to(torch.float32), codes, None, bound)
        reader.read(0, stop - start, decoded)
        self.error[start:stop].sub_(decoded)


class BlockReader:
    """What blocks of codes stand for."""

    def __init__(
        self,
        codec: BlockCodec,
        packed_scales: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        means: torch.Tensor | None,
        bound: float | None,
    ) -> None:
        self._codec = codec
        self._packed_scales = packed_scales
        self._scales = scales
        self._codes = codes
        self._means = means
        self._bound = bound
        self.granularity = codec.block

    def term(self, weight: float) -> Term | None:
        """All of it as a summand, where compiled code can add it up."""
        if self._means is not None or self._codes.device.type != "cpu":
            return None
        return self._codec.term(weight, self._packed_scales, self._codes)

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        values = into if into.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
        bits, block = self._codec.bits, self._codec.block
        packed = self._codes[start * bits // 8 : -(-stop * bits // 8)]
        if self._means is None and values is into and (stop - start) % block == 0 and stop > start:
            scales = self._packed_scales[start // block : stop // block]
            if self._codec.read_compiled(scales, packed, into):
                return
        if self._means is None:
            self._codec.get(packed, values)
        else:
            codes = self._codec.codes_of(packed)[: stop - start]
            torch.index_select(self._means, 0, codes.to(torch.int32), out=values)
        whole = (stop - start) // block
        first = start // block
        split = whole * block
        values[:split].view(whole, block).mul_(self._scales[first : first + whole].unsqueeze(1))
        if split < stop - start:
            values[split:].mul_(self._scales[first + whole])
        if self._bound is not None:
            values.clamp_(-self._bound, self._bound)
        if values is not into:
            into.copy_(values)
