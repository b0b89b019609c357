"""`dct-topk:CHUNK/K`: the largest cosine coefficients of each tile (DeMo, Peng 2024, section 3).

A tensor is cut as a matrix into tiles of CHUNK x CHUNK (smaller where the matrix is; filled up with zeros at the
edges), each goes through an orthonormal two-dimensional DCT-II, and the K coefficients of the largest
magnitude stay. Vectors lie in rows of CHUNK values; DeMo transforms them in one dimension, which with few values
kept of a chunk would leave nothing of most.

Sections: indices within their tile (row-major, ascending) of 8, 12 or 16 bits; then the coefficients, float32.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from starlings_compression.blocks import FLOAT32_MAX
from starlings_compression.codec import Reader, check_floating
from starlings_compression.layout import DataType, Form
from starlings_compression.products import aligned, one_thread
from starlings_compression.sizes import Tiling, index_bits, tiling_of
from starlings_compression.sparse import (
    Reducer,
    check_indices,
    largest_of_rows,
    read_indices,
    write_indices,
)
from starlings_compression.state import CodecState
from starlings_compression.tensors import DATA_TYPES, TORCH_TYPES, chunk_elements, finite_peak

# Sums of larger values could leave float32.
LARGE = 2.0**110


@lru_cache(maxsize=64)
def dct_matrix(size: int) -> torch.Tensor:
    """The orthonormal DCT-II of `size` values; its transpose is its inverse. Do not change it."""
    scales = [math.sqrt((1 if k == 0 else 2) / size) for k in range(size)]
    return torch.tensor(
        [
            [scales[k] * math.cos(math.pi * (2 * n + 1) * k / (2 * size)) for n in range(size)]
            for k in range(size)
        ],
        dtype=torch.float32,
    )


class DctTopkCodec(Reducer):
    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        check_floating(DATA_TYPES[values.dtype], name, self.spec)
        scale = 2.0**-16 if finite_peak(values, name) > LARGE else 1.0
        side, kept = self.arguments
        tiling = tiling_of(values.shape, side)
        kept = min(kept, tiling.tile_elements)
        flat = values.view(-1)
        chosen = torch.empty(tiling.count * kept, dtype=torch.float32, device=flat.device)
        indices = torch.empty(tiling.count * kept, dtype=torch.int32, device=flat.device)
        transform = _Transform(tiling, flat.device)
        done = 0
        for start in range(0, flat.numel(), transform.step):
            with one_thread():
                coefficients = transform.forward(flat[start : start + transform.step], scale)
            found, where = largest_of_rows(coefficients, kept)
            part = slice(done, done + found.numel())
            chosen[part], indices[part] = found.view(-1), where.view(-1)
            done = part.stop
        if scale != 1.0:
            chosen.div_(scale).clamp_(-FLOAT32_MAX, FLOAT32_MAX)
        write_indices(indices, index_bits(side * side), sections[0])
        self.inner.write(chosen, sections[1:], name, state)

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        side, kept = self.arguments
        tiling = tiling_of(form.shape, side)
        kept = min(kept, tiling.tile_elements)
        count = tiling.count * kept
        indices = read_indices(sections[0], index_bits(side * side), count, device).view(-1, kept)
        check_indices(indices, tiling.tile_elements)
        values = self.read_values(count, DataType.FLOAT32, sections[1:], device).view(-1, kept)
        largest = min(torch.finfo(TORCH_TYPES[form.data_type]).max, FLOAT32_MAX)
        reach = kept * float(values.abs().amax()) if count else 0.0
        return _DctReader(_Transform(tiling, device), indices, values, largest if reach > largest else None)


class _Transform:
    """Between consecutive elements and the coefficients of the tiles that they make up, some bands at a time.

    A band is a row of tiles: `tile_rows` rows of the matrix, which are consecutive elements.
    """

    def __init__(self, tiling: Tiling, device: torch.device) -> None:
        self.tiling = tiling
        self.band_elements = tiling.tile_rows * tiling.columns
        self.step = chunk_elements(device, self.band_elements) if self.band_elements else 1
        self._down = dct_matrix(tiling.tile_rows).to(device)
        self._across = dct_matrix(tiling.tile_columns).to(device)

    def forward(self, elements: torch.Tensor, scale: float) -> torch.Tensor:
        """Coefficients (tiles x tile elements) of whole bands, the last of which may be short."""
        cut = self.tiling
        bands = -(-elements.numel() // self.band_elements)
        whole = bands * self.band_elements
        values = elements if elements.dtype == torch.float32 and scale == 1.0 else elements.mul(scale).float()
        values = aligned(values)
        if elements.numel() < whole:
            values = torch.nn.functional.pad(values, (0, whole - elements.numel()))
        width = cut.across * cut.tile_columns
        rows = values.view(bands, cut.tile_rows, cut.columns)
        if width > cut.columns:
            rows = torch.nn.functional.pad(rows, (0, width - cut.columns))
        tiles = rows.view(bands, cut.tile_rows, cut.across, cut.tile_columns).transpose(1, 2)
        turned = torch.matmul(tiles, self._across.t())
        return torch.matmul(self._down, turned).reshape(-1, cut.tile_elements)

    def backward(self, coefficients: torch.Tensor, into: torch.Tensor) -> None:
        """The elements of whole bands from their coefficients; the last band may be cut short."""
        cut = self.tiling
        tiles = coefficients.view(-1, cut.across, cut.tile_rows, cut.tile_columns)
        with one_thread():
            values = torch.matmul(torch.matmul(self._down.t(), tiles), self._across)
        rows = values.transpose(1, 2).reshape(-1, cut.tile_rows, cut.across * cut.tile_columns)
        into.copy_(rows[:, :, : cut.columns].reshape(-1)[: into.numel()])


class _DctReader:
    def __init__(
        self, transform: _Transform, indices: torch.Tensor, values: torch.Tensor, bound: float | None
    ) -> None:
        self._transform = transform
        self._indices = indices
        self._values = values
        self._bound = bound
        self.granularity = max(transform.band_elements, 1)

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        cut = self._transform.tiling
        first = start // self.granularity * cut.across
        last = -(-stop // self.granularity) * cut.across
        coefficients = torch.zeros(last - first, cut.tile_elements, device=into.device)
        coefficients.scatter_(1, self._indices[first:last].long(), self._values[first:last])
        if self._bound is None:
            self._transform.backward(coefficients, into)
            return
        values = torch.empty_like(into, dtype=torch.float32)
        self._transform.backward(coefficients, values)
        values.nan_to_num_(nan=0.0, posinf=self._bound, neginf=-self._bound)
        into.copy_(values.clamp_(-self._bound, self._bound))
