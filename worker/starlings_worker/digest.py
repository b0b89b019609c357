"""Fingerprints of vectors on the device: bits by a 64-bit sum, size by the squared norm."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from starlings_compression.compiled import FOLDED_ELEMENTS, any_kernels, int8_kernels
from starlings_compression.terms import Landing, Term

_CHUNK_ELEMENTS = 1 << 16
_MASK = (1 << 64) - 1
# Odd, so that multiplication is a bijection of words; the fractional part of the golden ratio.
_MIX = 0x9E3779B97F4A7C15


class Fingerprint:
    """Both of one vector while it is written, in any order: `take` soon after each piece, as long as a cache has it.

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
        # (sum, squares) by chunk. Tensors stay on their device until the end, so that nobody waits for it meanwhile.
        self._chunks: dict[int, tuple[int | Tensor, float | Tensor]] = {}
        # The latest pieces that follow each other, from their first chunk that is not taken yet.
        self._start = self._stop = 0
        self._kernels = any_kernels() if vector.device.type == "cpu" else None

    def take(self, start: int, stop: int) -> None:
        """Elements start..stop are final. Of a chunk that begins or ends elsewhere the rest may come next, or never."""
        if start != self._stop:
            self._start = start
        self._stop = stop
        ended = stop == self._vector.numel()
        first = -(-self._start // _CHUNK_ELEMENTS)
        last = -(-stop // _CHUNK_ELEMENTS) if ended else stop // _CHUNK_ELEMENTS
        for chunk in range(first, last):
            self._take(chunk)
        if last > first:
            self._start = last * _CHUNK_ELEMENTS

    def write(self, terms: Sequence[Term], begin: int, start: int, stop: int) -> int:
        """Writes elements start..stop of a sum of terms that stands at `begin` in the vector, and takes them, as far as
        compiled code can do both at once: up to which element. `start` if it cannot, or what comes is not finite.

        Terms are one of codes, or all plain; the vector's own memory may be the values of one.
        """
        position = begin + start
        whole = (stop - start) // _CHUNK_ELEMENTS * _CHUNK_ELEMENTS
        if self._kernels is None or not whole or not terms or position % _CHUNK_ELEMENTS:
            return start
        into, weights = self._vector[position : position + whole], _weights(self._vector.device)
        if all(term.scales is None for term in terms):
            done, folds = self._kernels.add_up_folded(
                [term.piece(start, start + whole) for term in terms], into, weights
            )
        else:
            (term,) = terms
            kernels = int8_kernels(term.block)
            if kernels is None or start % term.block or not _divides_chunks(term.block):
                return start
            piece = term.piece(start, start + whole)
            assert piece.scales is not None
            done, folds = whole, kernels.decode_folded(piece.scales, piece.values, into, weights)
        chunks = done // _CHUNK_ELEMENTS
        self._adopt(position, folds.pairs()[:chunks])
        return start + chunks * _CHUNK_ELEMENTS

    def landing(self, begin: int, stop: int) -> Landing | None:
        """Elements begin..stop of the vector, for compiled code that writes and folds them: `landed` follows."""
        if self._kernels is None or begin == stop:
            return None
        first = self.border(begin, 0, 1) % _CHUNK_ELEMENTS
        return Landing(self._vector[begin:stop], _weights(self._vector.device), first)

    def landed(self, landing: Landing, begin: int) -> range:
        """Takes what compiled code wrote; which elements of what stands at `begin` these are."""
        self._adopt(begin + landing.first, landing.folds)
        return range(landing.first, landing.last) if landing.folds else range(0)

    def _adopt(self, position: int, folds: Iterable[tuple[int, float]]) -> None:
        self._chunks.update(enumerate(folds, position // _CHUNK_ELEMENTS))

    @staticmethod
    def border(begin: int, start: int, multiple: int) -> int:
        """Where `write` could go on, after element `start` of what stands at `begin`; a multiple of `multiple`, else
        far away.
        """
        border = (begin + start) // _CHUNK_ELEMENTS * _CHUNK_ELEMENTS + _CHUNK_ELEMENTS - begin
        return border if border % multiple == 0 else sys.maxsize

    def _take(self, chunk: int) -> None:
        start = chunk * _CHUNK_ELEMENTS
        values, weights = self._vector[start : start + _CHUNK_ELEMENTS], _weights(self._vector.device)
        if self._kernels is not None and values.numel() % FOLDED_ELEMENTS == 0:
            self._chunks[chunk] = self._kernels.fold(values, weights)
            return
        products = values.view(torch.int32) * weights[: values.numel()]
        if len(products) % 2:
            products = torch.nn.functional.pad(products, (0, 1))
        # In float64: squares of float32 leave its range. Chunk by chunk, as torch's own norm of another type takes
        # seven times as long.
        wide = values.to(torch.float64)
        self._chunks[chunk] = products.view(torch.int64).sum(), torch.dot(wide, wide)

    def finish(self) -> tuple[int, float]:
        """(digest, squared norm) of the whole vector. The norm is finite exactly when every element is."""
        digest, norm = self._vector.numel(), 0.0
        chunks = range(-(-self._vector.numel() // _CHUNK_ELEMENTS))
        for chunk in chunks:
            if chunk not in self._chunks:
                self._take(chunk)
        for chunk in chunks:
            partial, squares = self._chunks[chunk]
            digest = (digest * _MIX + int(partial)) & _MASK
            norm += float(squares)
        return digest, norm


def _divides_chunks(block: int) -> bool:
    return _CHUNK_ELEMENTS % block == 0 and block % FOLDED_ELEMENTS == 0


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
