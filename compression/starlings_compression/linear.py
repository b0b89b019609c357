"""Sums of low rank over members that hold a matrix each: PowerSGD's two rounds (Vogels 2019, algorithms 1 and 2).

    P = sum of M Q,   orthonormalised;   Q' = sum of M^T P;   the sum of all M is about P Q'^T

Both products are linear in M, so members add up factors and never see a matrix of another. What each has left
over, M - P (its own M^T P)^T, it adds to its next M. Decoded sums and what members keep add up to all inputs,
whatever Q was: members that begin with different ones come to a poorer P once, and all to the same.

All of a vector's tensors go together. The first round has P^T of each matrix, and after them all values of other
tensors and of matrices that factors would not make smaller: those are summed up exactly. The second round has Q'^T
of each matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from starlings_compression.families import Element
from starlings_compression.lowrank import orthonormal_rows, times_columns, times_rows, write_terms
from starlings_compression.products import ALIGNMENT_BYTES, one_thread
from starlings_compression.sizes import linear_counts, matrix_shape, reduce_shape

_ALIGNMENT_ELEMENTS = ALIGNMENT_BYTES // 4


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where a matrix lies: in the vector, in the first and second round's values, and in the memory of residuals."""

    rows: int
    columns: int
    start: int
    left: int
    right: int
    kept: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[self.kept : self.kept + self.rows * self.columns].view(self.rows, self.columns)


class LinearRounds:
    """One member's side of one vector's rounds, one after the other. `first`, then `second`, then `result`.

    What it remembers is transactional, as `ErrorFeedback` is: only what commits counts, and `first` starts from the
    last commit each time. Residuals take 8 bytes per value of a matrix. All members need equal ranks and shapes.
    """

    def __init__(
        self, rank: int, shapes: Sequence[tuple[int, ...]], device: torch.device, *, seed: int = 0
    ) -> None:
        """`shapes`: of the tensors that lie one after the other in the vector. `seed`: of the first Q."""
        self._rank = rank
        self._device = device
        self._seed = seed
        self.first_size, self.second_size = linear_counts(rank, shapes)
        matrices: list[_Matrix] = []
        # Elements [start, stop) of the vector that are summed up exactly; neighbours joined.
        self._exact: list[tuple[int, int]] = []
        position = left = right = kept = 0
        for shape in shapes:
            count = torch.Size(shape).numel()
            if reduce_shape(Element("lowrank", (rank,)), shape) is not None:
                rows, columns = matrix_shape(shape)
                matrices.append(_Matrix(rows, columns, position, left, right, kept))
                left, right = left + rank * rows, right + rank * columns
                kept += -(-count // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
            elif self._exact and self._exact[-1][1] == position:
                self._exact[-1] = (self._exact[-1][0], position + count)
            elif count:
                self._exact.append((position, position + count))
            position += count
        self._matrices = tuple(matrices)
        self._exact_from = left
        self._kept_size = kept
        self.reset()

    def reset(self) -> None:
        """Forget everything, as at the start."""
        # Residuals, each matrix aligned: as of the last commit, what becomes of it if this round commits, and neither.
        self._committed: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        # The next Q^T of each matrix, on the host.
        self._warm: tuple[torch.Tensor, ...] = ()
        self._warm_next: tuple[torch.Tensor, ...] | None = None
        self._lefts: tuple[torch.Tensor, ...] = ()

    @property
    def reduces(self) -> bool:
        """Whether there is any matrix that factors make smaller."""
        return bool(self._matrices)

    # ------------------------------------------------------------------ a round

    @torch.no_grad()
    def first(self, vector: torch.Tensor) -> torch.Tensor:
        """What is to be summed up in the first round, from this member's flat float32 `vector`. Not finite where the
        vector is not.
        """
        self.rollback()
        pending = self._spare
        if pending is None:
            pending = torch.zeros(self._kept_size, dtype=torch.float32, device=self._device)
        self._spare, self._pending = None, pending
        values = torch.empty(self.first_size, dtype=torch.float32, device=self._device)
        with one_thread():
            for number, matrix in enumerate(self._matrices):
                own = vector[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)
                corrected = matrix.of(pending)
                if self._committed is None:
                    corrected.copy_(own)
                else:
                    torch.add(own, matrix.of(self._committed), out=corrected)
                start = self._start(number).to(self._device)
                self._left(values, matrix).copy_(times_rows(corrected, start, 1.0))
        position = self._exact_from
        for begin, end in self._exact:
            values[position : position + end - begin] = vector[begin:end]
            position += end - begin
        return values

    @torch.no_grad()
    def second(self, first_sum: torch.Tensor) -> torch.Tensor | None:
        """What is to be summed up in the second round, after the first came to `first_sum`; None after no `first`: this
        member has nothing to add.

        P is made orthonormal on the host, step by step in float64, so that it has the same bits on every machine.
        """
        host = first_sum.to("cpu")
        with one_thread():
            self._lefts = tuple(
                orthonormal_rows(self._left(host, matrix)).to(self._device) for matrix in self._matrices
            )
            if self._pending is None:
                return None
            values = torch.empty(self.second_size, dtype=torch.float32, device=self._device)
            for matrix, left in zip(self._matrices, self._lefts, strict=True):
                corrected = matrix.of(self._pending)
                right = times_columns(corrected, left, 1.0)
                self._right(values, matrix).copy_(right)
                corrected.addmm_(left.t(), right, alpha=-1.0)
        return values

    @torch.no_grad()
    def result(self, first_sum: torch.Tensor, second_sum: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the decoded sum of all members' vectors into `out`, after `second`; the same bits on every machine."""
        for matrix, left in zip(self._matrices, self._lefts, strict=True):
            into = out[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)
            write_terms(left, self._right(second_sum, matrix), into)
        position = self._exact_from
        for begin, end in self._exact:
            out[begin:end] = first_sum[position : position + end - begin]
            position += end - begin
        host = second_sum.to("cpu")
        self._warm_next = tuple(
            self._directions(number, self._right(host, matrix))
            for number, matrix in enumerate(self._matrices)
        )
        self._lefts = ()

    def _left(self, values: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        return values[matrix.left : matrix.left + self._rank * matrix.rows].view(self._rank, matrix.rows)

    def _right(self, values: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        return values[matrix.right : matrix.right + self._rank * matrix.columns].view(
            self._rank, matrix.columns
        )

    def _start(self, number: int) -> torch.Tensor:
        return self._warm[number] if self._warm else self._drawn(number)

    def _drawn(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self._seed + 7919 * number) % (1 << 63))
        return torch.randn(self._rank, self._matrices[number].columns, generator=generator)

    def _directions(self, number: int, right: torch.Tensor) -> torch.Tensor:
        """Q^T to begin with next time: in units of each row's peak, since only directions count; drawn where zero."""
        peaks = right.abs().amax(dim=1, keepdim=True)
        if bool((peaks > 0.0).all()):
            return right / peaks
        return torch.where(peaks > 0.0, right / peaks, self._drawn(number))

    # ------------------------------------------------------------------ ends

    @property
    def owed(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """What was left over so far, as of the last commit: elements [begin, end) of the vector, and their values."""
        committed = self._committed
        if committed is None:
            return []
        return [((m.start, m.stop), m.of(committed).reshape(-1)) for m in self._matrices]

    def commit(self) -> None:
        """The result counts: keep what this member has left over, and begin with its Q."""
        if self._pending is not None:
            self._spare, self._committed, self._pending = self._committed, self._pending, None
        if self._warm_next is not None:
            self._warm, self._warm_next = self._warm_next, None

    def rollback(self) -> None:
        """The rounds since the last commit do not count."""
        if self._pending is not None:
            self._spare, self._pending = self._pending, None
        self._warm_next = None
        self._lefts = ()
