"""What a sum consists of, for code that adds up and encodes in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass

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
