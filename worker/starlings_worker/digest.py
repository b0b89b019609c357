"""Fingerprints of vectors on the device: bits by a 64-bit sum, size by the squared norm."""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor

from starlings_compression.compiled import FOLDED_ELEMENTS, any_kernels, int8_kernels
from starlings_compression.terms import Term

_CHUNK_ELEMENTS = 1 << 16
_MASK = (1 << 64) - 1
# Odd, so that multiplication is a bijection of words; the fractional part of the golden ratio.
_MIX = 0x9E3779B97F4A7C15


class Fingerprint:
    """Both of one vector while it is written: `advance` soon after each piece, as long as a cache has it.

    The digest is a 64-bit number that depends on each element's bits and on its position. The same bits give the same
    number on every device: only integer arithmetic is used. Each element's 32 bits are multiplied by an odd number of
    its position, modulo 2^32, two neighbours make a word, and the words of a chunk are added modulo 2^64.
    """

    def __init__(self, vector: Tensor) -> None:
        """
        Args:
            vector: float32, one-dimensional, contiguous.
        """
        self._vector = vector
        # Of each chunk. Tensors stay on their device until the end, so that nobody waits for it meanwhile.
        self._sums: list[int | Tensor] = []
        self._squares: list[float | Tensor] = []
        self._done = 0
        self._kernels = any_kernels() if vector.device.type == "cpu" else None

    def advance(self, written: int) -> None:
        """The first `written` elements are final."""
        count = self._vector.numel()
        while self._done < count and min(self._done + _CHUNK_ELEMENTS, count) <= written:
            self._take(self._done, min(self._done + _CHUNK_ELEMENTS, count))

    def decode(self, term: Term, begin: int, start: int, stop: int) -> int:
        """Decodes elements start..stop of a term that stands at `begin` in the vector, and takes them, as far as
        compiled code can do both at once: up to which element. `start` if it cannot.
        """
        position, block = begin + start, term.block
        whole = (stop - start) // _CHUNK_ELEMENTS * _CHUNK_ELEMENTS
        kernels = int8_kernels(block) if self._kernels is not None else None
        fits = whole > 0 and position == self._done and position % _CHUNK_ELEMENTS == start % block == 0
        if term.scales is None or kernels is None or not fits:
            return start
        if _CHUNK_ELEMENTS % block or block % FOLDED_ELEMENTS:
            return start
        into = self._vector[position : position + whole]
        scales, codes = term.scales[start // block :], term.values[start:]
        sums, squares = kernels.decode_folded(scales, codes, into, _weights(self._vector.device))
        self._sums.extend(sums)
        self._squares.extend(squares)
        self._done = position + whole
        return start + whole

    @staticmethod
    def border(begin: int, start: int, multiple: int) -> int:
        """Where `decode` could go on, after element `start` of what stands at `begin`; a multiple of `multiple`, else
        far away.
        """
        border = (begin + start) // _CHUNK_ELEMENTS * _CHUNK_ELEMENTS + _CHUNK_ELEMENTS - begin
        return border if border % multiple == 0 else sys.maxsize

    def _take(self, start: int, stop: int) -> None:
        values, weights = self._vector[start:stop], _weights(self._vector.device)
        if self._kernels is not None and (stop - start) % FOLDED_ELEMENTS == 0:
            folded, squares = self._kernels.fold(values, weights)
            self._sums.append(folded)
            self._squares.append(squares)
        else:
            products = values.view(torch.int32) * weights[: stop - start]
            if len(products) % 2:
                products = torch.nn.functional.pad(products, (0, 1))
            self._sums.append(products.view(torch.int64).sum())
            # In float64: squares of float32 leave its range. Chunk by chunk, as torch's own norm of another type takes
            # seven times as long.
            wide = values.to(torch.float64)
            self._squares.append(torch.dot(wide, wide))
        self._done = stop

    def finish(self) -> tuple[int, float]:
        """(digest, squared norm) of the whole vector. The norm is finite exactly when every element is."""
        self.advance(self._vector.numel())
        digest = self._vector.numel()
        for partial in self._sums:
            digest = (digest * _MIX + int(partial)) & _MASK
        return digest, sum(map(float, self._squares))


def fingerprint(vector: Tensor) -> tuple[int, float]:
    """The 64-bit digest of the bits of a float32 vector, and the sum of its squares in float64; see `Fingerprint`."""
    return Fingerprint(vector).finish()


def bits_digest(vector: Tensor) -> int:
    """A 64-bit digest of the bits of a float32 vector, one-dimensional and contiguous."""
    return fingerprint(vector)[0]


def squared_norm(vector: Tensor) -> float:
    """Sum of squares in float64."""
    return fingerprint(vector)[1]


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Odd 32-bit factors, one per position of a chunk."""
    position = torch.arange(_CHUNK_ELEMENTS, dtype=torch.int64)
    signed_mix = _MIX - (1 << 64)
    # The upper half of a product is mixed well.
    return (((position * signed_mix) >> 32) | 1).to(torch.int32).to(device)


def is_finite(vector: Tensor) -> bool:
    """Whether no element is infinite or not a number."""
    if vector.numel() == 0:
        return True
    low, high = torch.aminmax(vector)
    return bool(torch.isfinite(low) & torch.isfinite(high))
