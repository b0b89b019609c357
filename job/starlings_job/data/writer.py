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
    """Writes the training tokens, and their mask where there is one.

    Without a mask records share one token (stride = sequence length), so no target is lost. With a mask
    they lie one after another and those without any target are left out: a step must not consist of them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        token_bytes: int,
        sequence_length: int,
        masked: bool,
    ) -> None:
        self._length = sequence_length
        self._file: BinaryIO = (directory / "tokens.bin").open("wb")
        self._mask_file: BinaryIO | None = (directory / "mask.bin").open("wb") if masked else None
        self._tokens = token_array(token_bytes)
        self._mask = bytearray()
        self._written = 0
        # After `close`: the first record whose first token came after each `mark`; maybe one that does not exist.
        self.marks: list[int] = []
        # With a mask: marks that no record was written behind yet, and how many tokens came before the buffer.
        self._unplaced: list[int] = []
        self._passed = 0

    def mark(self) -> None:
        """From here on the tokens are another source's."""
        if self._mask_file is None:
            self.marks.append(-(-(self._written + len(self._tokens)) // self._length))
        else:
            self._unplaced.append(self._passed + len(self._tokens))

    def add(self, tokens: Sequence[int], counts: bool) -> None:
        """Appends tokens. `counts`: whether they are targets; without a mask all are."""
        _extend(self._tokens, tokens)
        if self._mask_file is not None:
            self._mask += (b"\1" if counts else b"\0") * len(tokens)
        if len(self._tokens) >= _FLUSH_TOKENS:
            self._flush()

    @property
    def records(self) -> int:
        """Whole records that the file holds after `close`."""
        if self._mask_file is not None:
            return self._written // (self._length + 1)
        return max(0, (self._written - 1) // self._length)

    def close(self) -> None:
        """Raises OSError when the disk is full."""
        try:
            self._flush()
            self._place(self._passed + len(self._tokens))
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
            self._place(self._passed + begin)
            if 1 in mask[1:]:
                self._write(self._tokens[begin : begin + size])
                self._mask_file.write(mask)
                self._written += size
        self._passed += whole
        del self._tokens[:whole]
        del self._mask[:whole]

    def _place(self, begin: int) -> None:
        """The next record begins with that token of all that came in, or a later one."""
        while self._unplaced and self._unplaced[0] <= begin:
            self._unplaced.pop(0)
            self.marks.append(self.records)

    def _write(self, tokens: array.array[int]) -> None:
        self._file.write(_little_endian(tokens))


class HeldOutWriter:
    """Collects all held-out text and writes records that are spread evenly over it.

    So a few hundred records speak for many documents, large and small. They lie one after another.
    """

    def __init__(
        self, directory: Path, *, token_bytes: int, sequence_length: int, masked: bool, records: int
    ) -> None:
        """`records`: how many at most."""
        self._directory = directory
        self._size = sequence_length + 1
        self._wanted = records
        self._tokens = token_array(token_bytes)
        self._mask: bytearray | None = bytearray() if masked else None
        self.records = 0
        self.entropies = EntropyCounter()

    def add(self, tokens: Sequence[int], counts: bool) -> None:
        """As `TokenWriter.add`."""
        _extend(self._tokens, tokens)
        if self._mask is not None:
            self._mask += (b"\1" if counts else b"\0") * len(tokens)

    def write(self) -> None:
        """Writes the records. Raises OSError when the disk is full."""
        begins = [
            begin
            for begin in range(0, len(self._tokens) - self._size + 1, self._size)
            if self._mask is None or 1 in self._mask[begin + 1 : begin + self._size]
        ]
        self.records = min(self._wanted, len(begins))
        chosen = [begins[i * len(begins) // self.records] for i in range(self.records)]
        with (self._directory / "held_out.bin").open("wb") as file:
            for begin in chosen:
                tokens = self._tokens[begin : begin + self._size]
                file.write(_little_endian(tokens))
                self.entropies.add(tokens)
        if self._mask is not None:
            with (self._directory / "held_out_mask.bin").open("wb") as file:
                for begin in chosen:
                    file.write(self._mask[begin : begin + self._size])


def _extend(items: array.array[int], tokens: Sequence[int]) -> None:
    if items.itemsize == 1 and isinstance(tokens, bytes):
        items.frombytes(tokens)
    else:
        items.extend(tokens)


def _little_endian(tokens: array.array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


class EntropyCounter:
    """Empirical entropies of sequences of tokens: of one target, and of one given the token before it.

    The first token of a sequence is nobody's target, as in the loss.
    """

    def __init__(self) -> None:
        self._pairs: Counter[tuple[int, int]] = Counter()

    def add(self, tokens: Sequence[int]) -> None:
        """Counts one sequence."""
        self._pairs.update(pairwise(tokens))

    @property
    def unigram(self) -> float:
        """Nats per target: what a model that knows only frequencies pays."""
        ones: Counter[int] = Counter()
        for (_, after), n in self._pairs.items():
            ones[after] += n
        total = sum(ones.values())
        return -sum(n / total * log(n / total) for n in ones.values()) if total else 0.0

    @property
    def bigram(self) -> float:
        """Nats per target: what a model that knows the frequencies after each token pays."""
        total = sum(self._pairs.values())
        first: Counter[int] = Counter()
        for (before, _), n in self._pairs.items():
            first[before] += n
        return -sum(n / total * log(n / first[a]) for (a, _), n in self._pairs.items()) if total else 0.0
