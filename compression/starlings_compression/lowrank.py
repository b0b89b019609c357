"""`lowrank:R`: a matrix as the product of two thin ones (PowerSGD, Vogels 2019, algorithm 1).

    P = M Q,   orthonormalised;   Q = M^T P;   M' = P Q^T

One step of the power method, which starts from the Q of the last committed round (warm start), so over rounds it
comes to the best factors. Tensors of more dimensions count as matrices, their first dimension by the others.
Vectors, and matrices of which the factors would not be smaller, travel exactly.

Values: P^T (R x rows), then Q^T (R x columns), float32.
"""

from __future__ import annotations

import torch

from starlings_compression.blocks import FLOAT32_MAX
from starlings_compression.codec import Codec, Reader, check_floating
from starlings_compression.exact import ExactCodec
from starlings_compression.layout import DataType, Form
from starlings_compression.products import aligned, one_thread
from starlings_compression.sizes import matrix_shape, reduce_shape
from starlings_compression.sparse import Reducer
from starlings_compression.spec import CodecSpec
from starlings_compression.state import CodecState, Memory
from starlings_compression.tensors import DATA_TYPES, TORCH_TYPES, finite_peak

# Elements of the rows that are multiplied at once.
ROWS_ELEMENTS = 1 << 20
# What is left of a column after projection, below which it depends on the others.
DEPENDENT = 1e-6
# Products of larger values could leave float32.
LARGE = 2.0**90


class LowrankCodec(Reducer):
    def __init__(self, spec: CodecSpec, inner: Codec) -> None:
        super().__init__(spec, inner)
        self._exact = ExactCodec(CodecSpec())
        (self._rank,) = self.arguments

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        check_floating(DATA_TYPES[values.dtype], name, self.spec)
        if not self._reduces(tuple(values.shape)):
            self._exact.write(values, sections, name, None)
            return
        peak = finite_peak(values, name)
        matrix = values.view(matrix_shape(values.shape))
        scale = 2.0**-96 if peak > LARGE else 1.0
        with one_thread():
            left = orthonormal_rows(times_rows(matrix, self._start(matrix, state), scale))
            right = times_columns(matrix, left, scale)
        if scale != 1.0:
            right.div_(scale).clamp_(-FLOAT32_MAX, FLOAT32_MAX)
        self.inner.write(torch.cat([left.view(-1), right.view(-1)]), sections, name, state)
        if state is not None:
            state.stage(Memory(state.committed.round + 1, right))

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        if not self._reduces(form.shape):
            return self._exact.reader(form, sections, device)
        rows, columns = matrix_shape(form.shape)
        values = self.read_values(self._rank * (rows + columns), DataType.FLOAT32, sections, device)
        left, right = values[: self._rank * rows], values[self._rank * rows :]
        largest = min(torch.finfo(TORCH_TYPES[form.data_type]).max, FLOAT32_MAX)
        reach = self._rank * finite_peak(left, "factor") * finite_peak(right, "factor")
        return _LowrankReader(
            left.view(self._rank, rows), right.view(self._rank, columns), largest if reach > largest else None
        )

    def _reduces(self, shape: tuple[int, ...]) -> bool:
        assert self.spec.reducer is not None
        return reduce_shape(self.spec.reducer, shape) is not None

    def _start(self, matrix: torch.Tensor, state: CodecState | None) -> torch.Tensor:
        """Q^T to begin with: the last one; random where there is none, or a row of it is zero."""
        seed = 0 if state is None else state.seed
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        start = torch.randn(self._rank, matrix.shape[1], generator=generator).to(matrix.device)
        last = None if state is None else state.committed.factor
        if last is None or last.shape != start.shape:
            return start
        # In units of each row's peak: only the directions count, and products stay far from the ends of float32.
        peaks = last.abs().amax(dim=1, keepdim=True)
        return torch.where(peaks > 0.0, last / peaks, start)


def _block(matrix: torch.Tensor, rows: slice, scale: float) -> torch.Tensor:
    block = matrix[rows]
    return aligned(block) if block.dtype == torch.float32 and scale == 1.0 else (block * scale).float()


def _slices(matrix: torch.Tensor) -> list[slice]:
    step = max(ROWS_ELEMENTS // matrix.shape[1], 1)
    return [slice(start, start + step) for start in range(0, matrix.shape[0], step)]


def times_rows(matrix: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """(M Q)^T from Q^T, R x rows."""
    product = torch.empty(right.shape[0], matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for rows in _slices(matrix):
        product[:, rows] = torch.mm(right, _block(matrix, rows, scale).t())
    return product


def times_columns(matrix: torch.Tensor, left: torch.Tensor, scale: float) -> torch.Tensor:
    """(M^T P)^T from P^T, R x columns."""
    total = torch.zeros(left.shape[0], matrix.shape[1], dtype=torch.float32, device=matrix.device)
    for rows in _slices(matrix):
        total.addmm_(left[:, rows], _block(matrix, rows, scale))
    return total


def ordered_sum(values: torch.Tensor, dimension: int) -> torch.Tensor:
    """The sum over a dimension, halves added to each other until one is left: the same bits on every machine, which
    `torch.sum` promises for one kind of processor only.
    """
    while (count := values.shape[dimension]) > 1:
        half = count // 2
        folded = values.narrow(dimension, 0, half) + values.narrow(dimension, half, half)
        if count % 2:
            folded.narrow(dimension, 0, 1).add_(values.narrow(dimension, count - 1, 1))
        values = folded
    return values.sum(dimension)


def orthonormal_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of length 1, orthogonal to each other, that span the same space; zero where one depends on those before.

    Gram-Schmidt in float64, twice: once leaves too much of what was nearly parallel. Each product, sum, quotient and
    root is rounded by itself, so the same rows give the same bits on every machine.
    """
    done = torch.zeros_like(rows, dtype=torch.float64)
    for position, row in enumerate(rows.to(torch.float64)):
        before = ordered_sum(row * row, 0).sqrt()
        for _ in range(2 if position else 0):
            shares = ordered_sum(done[:position] * row, 1)
            row = row - ordered_sum(done[:position] * shares.unsqueeze(1), 0)
        after = ordered_sum(row * row, 0).sqrt()
        # No branch: on an accelerator that would wait for it.
        done[position] = torch.where(after > DEPENDENT * before, row / after, 0.0)
    return done.to(torch.float32)


def write_terms(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
    """P Q^T from P^T (R x rows) and Q^T (R x columns), into float32.

    Adds up the terms one by one, each product and sum rounded by itself: slower than a BLAS where the rank is high, and
    the same bits on every machine.
    """
    for rows in _slices(into):
        product, factor = into[rows], left[:, rows].unsqueeze(2)
        torch.mul(factor[0], right[0], out=product)
        term = torch.empty_like(product)
        for rank in range(1, right.shape[0]):
            product.add_(torch.mul(factor[rank], right[rank], out=term))


class _LowrankReader:
    def __init__(self, left: torch.Tensor, right: torch.Tensor, bound: float | None) -> None:
        self._left = left
        self._right = right
        self._bound = bound
        self.granularity = right.shape[1]

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        columns = self.granularity
        values = into if into.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
        left = self._left[:, start // columns : stop // columns]
        write_terms(left, self._right, values.view(-1, columns))
        if self._bound is not None:
            values.nan_to_num_(nan=0.0, posinf=self._bound, neginf=-self._bound)
            values.clamp_(-self._bound, self._bound)
        if values is not into:
            into.copy_(values)
