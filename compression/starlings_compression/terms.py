"""What a sum consists of, for code that adds up and encodes in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Term:
    """One summand on the host, flat and contiguous.

    `values` are float32 that are multiplied by `weight`; or, with scales (bfloat16, one per `block` of them, the last
    of which may be short), int8 codes that are decoded first.
    """

    weight: float
    values: torch.Tensor
    scales: torch.Tensor | None = None
    block: int = 1

    def piece(self, start: int, stop: int) -> Term:
        """Elements start..stop of it; multiples of the block, or the end."""
        scales = None if self.scales is None else self.scales[start // self.block : -(-stop // self.block)]
        return Term(self.weight, self.values[start:stop], scales, self.block)


@dataclass(slots=True)
class Landing:
    """Where code that encodes a sum in one pass may put what the bytes decode to while a cache has it, with a sum over
    the bits of each chunk of it (`compiled.Kernels.fold`).
    """

    # Float32, as long as the sum, on the host; may be the memory of a summand.
    out: torch.Tensor
    # Int32, one for each element of a chunk.
    weights: torch.Tensor
    # Where the first whole chunk begins.
    first: int
    # What has landed: elements first..last of `out`, and (sum, squares) of each chunk of them.
    last: int = 0
    folds: list[tuple[int, float]] = field(default_factory=list)

    def chunks(self, count: int, block: int) -> tuple[int, int]:
        """Begin and end of the whole chunks among `count` elements, where they consist of blocks; else (0, 0)."""
        length = self.weights.numel()
        whole = max(0, count - self.first) // length * length
        if not whole or self.first % block or length % block:
            return 0, 0
        return self.first, self.first + whole
