"""`/means`: each code stands for the mean of the values that got it, instead of the middle of its bin.

With the codes given, this is the best choice in the sum of squares (Lloyd 1982, second condition), and what was dropped
is then orthogonal to what was sent, so that error feedback never grows. One value per code for the whole tensor,
in units of its block's scale: sum(scale * value) / sum(scale**2) over all values with the code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from starlings_compression.errors import CodecError


class BinMeans:
    """Sums over chunks, in float64 and in a fixed order."""

    def __init__(
        self, bits: int, codes_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self._codes_of = codes_of
        self._products = torch.zeros(1 << bits, dtype=torch.float64, device=device)
        self._squares = torch.zeros_like(self._products)

    def add(self, source: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor) -> None:
        """One chunk: values (blocks x B), their scales, and their codes."""
        codes = self._codes_of(packed)[: source.numel()]
        wide = scales.to(torch.float64).unsqueeze(1)
        products = source.to(torch.float64).mul_(wide).view(-1)
        squares = wide.square().expand_as(source).reshape(-1)
        self._products += _sum_by_code(codes, products, self._products.numel())
        self._squares += _sum_by_code(codes, squares, self._squares.numel())

    def finish(self, default: torch.Tensor) -> torch.Tensor:
        """The mean of each code; `default` where no value has it, or none but zeros."""
        means = (self._products / self._squares).to(torch.float32).cpu()
        return torch.where(torch.isfinite(means), means, default)


def _sum_by_code(codes: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    if codes.device.type == "cpu":
        # One thread, so one order.
        return torch.bincount(codes, weights=weights, minlength=count)
    # On accelerators bincount adds in the order in which threads arrive.
    zero = torch.zeros((), dtype=weights.dtype, device=weights.device)
    return torch.stack([torch.where(codes == code, weights, zero).sum() for code in range(count)])


def check_means(means: torch.Tensor) -> float:
    """The largest magnitude. Raises CodecError for means that are not finite."""
    largest = float(means.abs().amax())
    if not largest < float("inf"):
        raise CodecError("the mean of a bin is not finite")
    return largest
