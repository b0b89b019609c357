"""`int8:B`, `int4:B`, `int2:B` and `sign:B`: small integers times the scale of their block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from starlings_compression.blocks import BFLOAT16_MAX, SMALLEST_NORMAL, BlockCodec, Correction, Workspace
from starlings_compression.compiled import FOLDED_ELEMENTS, Kernels, int8_kernels
from starlings_compression.packing import pack, unpack
from starlings_compression.terms import Landing, Term

# Of a computed source at once: small enough for a core's own cache.
_SOURCE_ELEMENTS = 1 << 16


class Int8Codec(BlockCodec):
    """`int8:B`: scale = peak / 127, codes -127 to 127. Errors are at most half a scale."""

    bits = 8
    largest_code = 128.0

    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        scales.copy_(work.peaks.div_(127.0).clamp_(min=SMALLEST_NORMAL))
        work.inverses.copy_(scales).reciprocal_()

    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        out.view(torch.int8).copy_(scaled.round_())

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(packed.view(torch.int8))

    def write_compiled(
        self, flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, correction: Correction | None
    ) -> float | None:
        kernels = int8_kernels(self.block)
        if kernels is None or flat.dtype != torch.float32 or flat.device.type != "cpu":
            return None
        if correction is None:
            return kernels.encode(flat, scales, codes)
        if correction.decay != 1.0:
            return None
        values = correction.values
        if isinstance(values, torch.Tensor):
            if values.dtype != torch.float32:
                return None
            return kernels.encode_with_error(values, correction.residual, scales, codes, flat)
        residual, done = correction.residual, 0
        terms = values.terms()
        if terms and all(term.scales is None or term.block == self.block for term in terms):
            done = self._write_sum(kernels, terms, residual, scales, codes, flat, values.landing)
            # Where it stopped once more, piece by piece: the source may say whose values were not finite.
        # Computed chunk by chunk, in memory apart from the errors'.
        step = min(max(_SOURCE_ELEMENTS // self.block, 1) * self.block, flat.numel())
        scratch, worst = torch.empty(step if done < flat.numel() else 0), 0.0
        for start in range(done, flat.numel(), step):
            stop = min(start + step, flat.numel())
            chunk = values.read(start, stop, scratch[: stop - start])
            old = None if residual is None else residual[start:stop]
            blocks = slice(start // self.block, stop // self.block)
            peak = kernels.encode_with_error(chunk, old, scales[blocks], codes[start:stop], flat[start:stop])
            if not math.isfinite(peak):
                return peak
            worst = max(worst, peak)
        return worst

    def _write_sum(
        self,
        kernels: Kernels,
        terms: Sequence[Term],
        residual: torch.Tensor | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        error: torch.Tensor,
        landing: Landing | None,
    ) -> int:
        """Whole blocks of a sum, in one pass; those of whole chunks also land where they are wanted. Returns how many
        elements are written: fewer than all, where something is not finite there.
        """
        count = error.numel()
        first, last = (
            (0, 0) if landing is None or self.block % FOLDED_ELEMENTS else landing.chunks(count, self.block)
        )
        for start, stop in ((0, first), (first, last), (last, count)):
            if start == stop:
                continue
            blocks = slice(start // self.block, stop // self.block)
            old = None if residual is None else residual[start:stop]
            some = [term.piece(start, stop) for term in terms]
            targets = scales[blocks], codes[start:stop], error[start:stop]
            if landing is None or (start, stop) != (first, last):
                if not math.isfinite(kernels.encode_of_sum(some, old, *targets)):
                    return start
                continue
            done, folds = kernels.encode_of_sum_folded(
                some, old, *targets, landing.out[start:stop], landing.weights
            )
            if done < stop - start:
                return start + done
            landing.last, landing.folds = stop, folds.pairs()
        return count

    def term(self, weight: float, scales: torch.Tensor, packed: torch.Tensor) -> Term | None:
        return Term(weight, packed, scales, self.block)

    def read_compiled(self, scales: torch.Tensor, packed: torch.Tensor, into: torch.Tensor) -> bool:
        kernels = int8_kernels(self.block)
        if kernels is None or into.device.type != "cpu":
            return False
        kernels.decode(scales, packed, into)
        return True


class Int4Codec(BlockCodec):
    """`int4:B`: scale = peak / 7, codes -7 to 7, stored as 1 to 15. Errors are at most half a scale."""

    bits = 4
    largest_code = 8.0

    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        scales.copy_(work.peaks.div_(7.0).clamp_(min=SMALLEST_NORMAL))
        work.inverses.copy_(scales).reciprocal_()

    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        pack(work.codes.copy_(scaled.round_().add_(8.0)), 4, out)

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(unpack(packed, 4)[: into.numel()]).sub_(8.0)

    def codes_of(self, packed: torch.Tensor) -> torch.Tensor:
        return unpack(packed, 4)


class Int2Codec(BlockCodec):
    """`int2:B`: codes -3 -1 1 3, the scale that fits them best in the sum of squares.

    No code means zero: values much smaller than their block's mean magnitude are wrong by about half of it. The
    scale starts from what is best for normal values (Max 1960) and is refitted twice, so that it also suits
    what top-k leaves, which has no small values.
    """

    bits = 2
    largest_code = 3.0
    # From the mean magnitude of normal values to half the best distance of levels.
    _START = 0.624

    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        magnitudes, scale = work.scaled, work.inverses
        # In units of the peak, so that no square leaves float32.
        peaks = work.peaks.clamp_(min=SMALLEST_NORMAL)
        magnitudes.div_(peaks)
        torch.mean(magnitudes, dim=1, keepdim=True, out=scale)
        scale.mul_(self._START)
        levels = torch.empty_like(magnitudes)
        for _ in range(2):
            torch.ge(magnitudes, scale * 2.0, out=levels).mul_(2.0).add_(1.0)
            squares = levels.square().sum(dim=1, keepdim=True)
            torch.div(levels.mul_(magnitudes).sum(dim=1, keepdim=True), squares, out=scale)
        # The very largest would round to infinity.
        scales.copy_(scale.mul_(peaks).clamp_(max=BFLOAT16_MAX))
        # A scale of zero: values too small for a normal number. Their codes do not matter.
        scales.masked_fill_(scales < SMALLEST_NORMAL, 0.0)
        work.inverses.copy_(scales).clamp_(min=SMALLEST_NORMAL).reciprocal_()

    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        # -3 -1 1 3 become 0 1 2 3: half of it, rounded down, plus 2, within 0 to 3.
        pack(work.codes.copy_(scaled.mul_(0.5).floor_().add_(2.0).clamp_(0.0, 3.0)), 2, out)

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(unpack(packed, 2)[: into.numel()]).mul_(2.0).sub_(3.0)

    def codes_of(self, packed: torch.Tensor) -> torch.Tensor:
        return unpack(packed, 2)


class SignCodec(BlockCodec):
    """`sign:B`: the sign of each value (zero counts as positive), times the mean magnitude of its block.

    The mean is the magnitude that fits best in the sum of squares (Bernstein 2018; Karimireddy 2019, section 5).
    """

    bits = 1
    largest_code = 1.0

    def fit(self, source: torch.Tensor, work: Workspace, scales: torch.Tensor) -> None:
        peaks = work.peaks.clamp_(min=SMALLEST_NORMAL)
        scale = work.scaled.div_(peaks).mean(dim=1, keepdim=True)
        # The very largest would round to infinity.
        scales.copy_(scale.mul_(peaks).clamp_(max=BFLOAT16_MAX))
        scales.masked_fill_(scales < SMALLEST_NORMAL, 0.0)
        work.inverses.fill_(1.0)

    def put(self, scaled: torch.Tensor, work: Workspace, out: torch.Tensor) -> None:
        pack(torch.ge(scaled, 0.0, out=work.codes), 1, out)

    def get(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(unpack(packed, 1)[: into.numel()]).mul_(2.0).sub_(1.0)
