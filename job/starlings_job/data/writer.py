"""Record files as a stream of tokens goes in."""

from __future__ import annotations

import array
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from typing import BinaryIO

from starlings_job.records import token_array

_FLUSH_TOKENS = 1 << 20


class TokenWriter:
    """Writes one split's tokens, and its mask where there is one.

    Without a mask records share one token (stride = sequence length), so no target is lost. With a mask
    they lie one after another and those without any target are left out: a step must not consist of them.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        mask_name: str,
        *,
        token_bytes: int,
        sequence_length: int,
        masked: bool,
    ) -> None:
        self._length = sequence_length
        self._token_bytes = token_bytes
        self._file: BinaryIO = (directory / name).open("wb")
        self._mask_file: BinaryIO | None = (directory / mask_name).open("wb") if masked else None
        self._tokens = token_array(token_bytes)
        self._mask = bytearray()
        self._written = 0
        self.target_count = 0

    def add(self, tokens: Sequence[int], counts: bool) -> None:
        """Appends tokens. `counts`: whether they are targets; without a mask all are."""
        if self._token_bytes == 1 and isinstance(tokens, bytes):
            self._tokens.frombytes(tokens)
        else:
            self._tokens.extend(tokens)
        if self._mask_file is not None:
            self._mask += (b"\1" if counts else b"\0") * len(tokens)
        if len(self._tokens) >= _FLUSH_TOKENS:
            self._flush()

    @property
    def token_count(self) -> int:
        """Tokens added so far and kept or still waiting."""
        return self._written + len(self._tokens)

    @property
    def records(self) -> int:
        """Whole records that the file holds after `close`."""
        if self._mask_file is not None:
            return self._written // (self._length + 1)
        return max(0, (self.token_count - 1) // self._length)

    def close(self) -> None:
        """Raises OSError when the disk is full."""
        try:
            self._flush()
        finally:
            self._file.close()
            if self._mask_file is not None:
                self._mask_file.close()

    def _flush(self) -> None:
        if self._mask_file is None:
            self._write(self._tokens)
            self._written += len(self._tokens)
            del self._tokens[:]
            return
        size = self._length + 1
        whole = len(self._tokens) // size * size
        for begin in range(0, whole, size):
            mask = self._mask[begin : begin + size]
            targets = mask[1:].count(1)
            if targets:
                self._write(self._tokens[begin : begin + size])
                self._mask_file.write(mask)
                self._written += size
                self.target_count += targets
        del self._tokens[:whole]
        del self._mask[:whole]

    def _write(self, tokens: array.array[int]) -> None:
        if sys.byteorder == "big":
            tokens = tokens[:]
            tokens.byteswap()
        self._file.write(tokens.tobytes())


class EntropyCounter:
    """Empirical entropies of a stream of tokens: of one token, and of one given the one before it."""

    def __init__(self) -> None:
        self._ones: Counter[int] = Counter()
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._last: int | None = None

    def add(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._ones.update(tokens)
        if self._last is not None:
            self._pairs[self._last, tokens[0]] += 1
        self._pairs.update(pairwise(tokens))
        self._last = tokens[-1]

    @property
    def unigram(self) -> float:
        """Nats per token: what a model that knows only frequencies pays."""
        total = sum(self._ones.values())
        return -sum(n / total * log(n / total) for n in self._ones.values()) if total else 0.0

    @property
    def bigram(self) -> float:
        """Nats per token: what a model that knows the frequencies after each token pays."""
        total = sum(self._pairs.values())
        first: Counter[int] = Counter()
        for (before, _), n in self._pairs.items():
            first[before] += n
        return -sum(n / total * log(n / first[a]) for (a, _), n in self._pairs.items()) if total else 0.0
