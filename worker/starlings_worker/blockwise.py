"""Optimizer moments in one byte per element: blocks of 256 elements with a float32 scale each.

Dettmers et al., "8-bit optimizers via block-wise quantization" (2022): sections 2.1 (blocks) and 2.2 (dynamic
quantisation: codes lie densely near a block's largest element and reach down over seven orders of magnitude, which a
second moment needs and evenly spaced codes do not give). A value is `code value * scale`, and the scale is the block's
largest absolute value. First moments are signed, second moments are not.

Everything is elementwise, a maximum or a comparison, each rounded alone or exact, so the same values give the same
bytes on every processor. A code of zero bytes is the value zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from starlings_job.optimizers import QUANTISED_BLOCK_ELEMENTS

_SIGNED, _UNSIGNED = "exp_avg_codes", "exp_avg_sq_codes"


@dataclass(frozen=True, slots=True)
class _Table:
    """values: by code, (256,). bounds: between neighbouring values, ascending. first: the code of the lowest value."""

    values: Tensor
    bounds: Tensor
    first: int


def decode(kind: str, codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Values, float32, of flat codes; `scales` has one for each block of them, the last of which may be short.

    Args:
        kind: "exp_avg_codes" (signed) or "exp_avg_sq_codes".
    """
    values = torch.index_select(_table(kind, codes.device).values, 0, codes.int())
    _by_block(values, scales, Tensor.mul_)
    return values if out is None else out.copy_(values)


def encode(kind: str, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """The nearest codes of flat values, into `codes` and `scales`. A second moment that is not zero gets no code of
    zero: the update would be divided by almost nothing.
    """
    table = _table(kind, values.device)
    whole = values.numel() - values.numel() % QUANTISED_BLOCK_ELEMENTS
    size = values.abs()
    torch.amax(
        size[:whole].view(-1, QUANTISED_BLOCK_ELEMENTS),
        dim=1,
        out=scales[: len(scales) - (whole < len(size))],
    )
    if whole < len(size):
        scales[-1] = size[whole:].max()
    ratio = _by_block(values.clone(), torch.where(scales > 0, scales, 1.0), Tensor.div_)
    found = torch.bucketize(ratio, table.bounds, out_int32=True)
    if kind == _UNSIGNED:
        found.clamp_(min=1).mul_(values > 0)
    codes.copy_(found.add_(table.first).bitwise_and_(255))


def _by_block(values: Tensor, scales: Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`operation`, in place, of every value and its block's scale."""
    whole = values.numel() - values.numel() % QUANTISED_BLOCK_ELEMENTS
    blocks = values[:whole].view(-1, QUANTISED_BLOCK_ELEMENTS)
    operation(blocks, scales[: len(blocks)].unsqueeze(1))
    if whole < values.numel():
        operation(values[whole:], scales[-1])
    return values


@lru_cache(maxsize=16)
def _table(kind: str, device: torch.device) -> _Table:
    ascending = _unsigned(8) if kind == _UNSIGNED else [-v for v in reversed(_unsigned(7)[1:])] + _unsigned(7)
    assert kind in (_SIGNED, _UNSIGNED), kind
    zero = ascending.index(Fraction(0))
    bounds = [float((low + high) / 2) for low, high in pairwise(ascending)]
    by_code = [1.0] * 256
    for position, value in enumerate(ascending):
        by_code[(position - zero) % 256] = float(value)
    return _Table(
        torch.tensor(by_code, dtype=torch.float32, device=device),
        torch.tensor(bounds, dtype=torch.float32, device=device),
        256 - zero,
    )


def _unsigned(bits: int) -> list[Fraction]:
    """2^bits values from 0 to 1, ascending: of each decade below 1 the middles of equal parts, half as many per decade;
    the largest is exactly 1. Exact numbers, so that all machines have one table.
    """
    values = [Fraction(0)]
    for decade in range(bits):
        parts = 2 ** (bits - 1 - decade)
        step = Fraction(9, 10) / parts
        values += [(Fraction(1, 10) + step * (k + Fraction(1, 2))) / 10**decade for k in range(parts)]
    values.sort()
    values[-1] = Fraction(1)
    return values
