"""Fingerprints of vectors on the device: bits by a 64-bit sum, size by the squared norm."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_CHUNK_WORDS = 1 << 16
_NORM_CHUNK_ELEMENTS = 1 << 17
_MASK = (1 << 64) - 1
# Odd, so that multiplication is a bijection of 64-bit words; the fractional part of the golden ratio.
_MIX = 0x9E3779B97F4A7C15


def bits_digest(vector: Tensor) -> int:
    """A 64-bit digest of the vector's bits that depends on each element's position.

    The same bits give the same number on every device: only integer arithmetic modulo 2^64 is used.

    Args:
        vector: float32, one-dimensional, contiguous.
    """
    size = vector.numel()
    even = size - size % 2
    # Two neighbours make one word: half the work of widening every element. A slice may begin at an odd
    # element, where a 64-bit view is not allowed.
    if vector.storage_offset() % 2:
        vector = vector.clone()
    words = vector[:even].view(torch.int64)
    digest = size
    weights = _weights(vector.device)
    for begin in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[begin : begin + _CHUNK_WORDS]
        partial = int((chunk * weights[: chunk.numel()]).sum().item())
        digest = (digest * _MIX + partial) & _MASK
    if size % 2:
        last = int(vector[even:].view(torch.int32).item())
        digest = (digest * _MIX + last) & _MASK
    return digest


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Odd 64-bit factors, one per position of a chunk."""
    position = torch.arange(_CHUNK_WORDS, dtype=torch.int64)
    signed_mix = _MIX - (1 << 64)
    return ((position * signed_mix) | 1).to(device)


def squared_norm(vector: Tensor) -> float:
    """Sum of squares in float64, chunk by chunk: torch's own norm of another type takes seven times as long."""
    count = vector.numel()
    if count == 0:
        return 0.0
    wide = torch.empty(min(_NORM_CHUNK_ELEMENTS, count), dtype=torch.float64, device=vector.device)
    total = torch.zeros((), dtype=torch.float64, device=vector.device)
    for begin in range(0, count, _NORM_CHUNK_ELEMENTS):
        chunk = vector[begin : begin + _NORM_CHUNK_ELEMENTS]
        values = wide[: chunk.numel()].copy_(chunk)
        total += torch.dot(values, values)
    return float(total.item())


def is_finite(vector: Tensor) -> bool:
    """Whether no element is infinite or not a number."""
    if vector.numel() == 0:
        return True
    low, high = torch.aminmax(vector)
    return bool(torch.isfinite(low) & torch.isfinite(high))
