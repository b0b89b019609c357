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
    IndexWriter,
    Reducer,
    check_indices,
    largest_of_rows,
    read_indices,
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
        indices = IndexWriter(index_bits(side * side), sections[0])
        transform = _Transform(tiling, flat.device)
        done = 0
        for start in range(0, flat.numel(), transform.step):
            for part in transform.parts(flat[start : start + transform.step]):
                with one_thread():
                    coefficients = transform.forward(part, scale)
                found, where = largest_of_rows(coefficients, kept)
                chosen[done : done + found.numel()] = found.view(-1)
                indices.add(where.view(-1))
                done += found.numel()
        indices.close()
        if scale != 1.0:
            chosen.div_(scale).clamp_(-FLOAT32_MAX, FLOAT32_MAX)
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
        reach = kept * finite_peak(values, "coefficients")
        return _DctReader(_Transform(tiling, device), indices, values, largest if reach > largest else None)


class _Transform:
    """Between consecutive elements and the coefficients of the tiles that they make up, a part at a time.

    A band is a row of tiles: `tile_rows` rows of the matrix, which are consecutive elements. A part is some whole
    bands, or, where a band is large, some columns of one, so that memory stays small.
    """

    def __init__(self, tiling: Tiling, device: torch.device) -> None:
        self.tiling = tiling
        self.band_elements = tiling.tile_rows * tiling.columns
        self.step = chunk_elements(device, self.band_elements) if self.band_elements else 1
        self._columns = chunk_elements(device, tiling.tile_elements) // tiling.tile_rows
        self._down = dct_matrix(tiling.tile_rows).to(device)
        self._across = dct_matrix(tiling.tile_columns).to(device)

    def parts(self, elements: torch.Tensor) -> list[torch.Tensor]:
        """Views of whole bands, the last of which may be short: bands x rows x columns, in the order of tiles."""
        cut = self.tiling
        whole = elements.numel() - elements.numel() % self.band_elements
        parts = []
        if whole:
            parts += self._cut(elements[:whole].view(-1, cut.tile_rows, cut.columns))
        if whole < elements.numel():
            rest = elements[whole:]
            # Vectors may end within a row; their rows are short.
            if rest.numel() % cut.columns:
                rest = torch.nn.functional.pad(rest, (0, -rest.numel() % cut.columns))
            parts += self._cut(rest.view(1, -1, cut.columns))
        return parts

    def _cut(self, bands: torch.Tensor) -> list[torch.Tensor]:
        step = self._columns
        return [bands[:, :, start : start + step] for start in range(0, bands.shape[2], step)]

    def forward(self, part: torch.Tensor, scale: float) -> torch.Tensor:
        """Coefficients, tiles x tile elements."""
        cut = self.tiling
        values = part if part.dtype == torch.float32 and scale == 1.0 else part.mul(scale).float()
        short, narrow = cut.tile_rows - part.shape[1], -part.shape[2] % cut.tile_columns
        if short or narrow:
            values = torch.nn.functional.pad(values, (0, narrow, 0, short))
        values = aligned(values.contiguous())
        tiles = values.view(values.shape[0], cut.tile_rows, -1, cut.tile_columns).transpose(1, 2)
        turned = torch.matmul(tiles, self._across.t())
        return torch.matmul(self._down, turned).reshape(-1, cut.tile_elements)

    def backward(self, coefficients: torch.Tensor, part: torch.Tensor, bound: float | None) -> None:
        """Writes the elements of a part, of any floating type; none beyond `bound`."""
        cut = self.tiling
        tiles = coefficients.view(part.shape[0], -1, cut.tile_rows, cut.tile_columns)
        with one_thread():
            values = torch.matmul(torch.matmul(self._down.t(), tiles), self._across)
        if bound is not None:
            values.nan_to_num_(nan=0.0, posinf=bound, neginf=-bound).clamp_(-bound, bound)
        rows = values.transpose(1, 2).reshape(part.shape[0], cut.tile_rows, -1)
        part.copy_(rows[:, : part.shape[1], : part.shape[2]])

    def tiles_of(self, part: torch.Tensor) -> int:
        return part.shape[0] * -(-part.shape[2] // self.tiling.tile_columns)


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
        transform = self._transform
        cut = transform.tiling
        # Elsewhere first where the last row is not whole.
        direct = into.numel() % cut.columns == 0
        values = into if direct else into.new_empty(-(-into.numel() // cut.columns) * cut.columns)
        first = start // self.granularity * cut.across
        for part in transform.parts(values):
            last = first + transform.tiles_of(part)
            coefficients = torch.zeros(last - first, cut.tile_elements, device=into.device)
            coefficients.scatter_(1, self._indices[first:last].long(), self._values[first:last])
            transform.backward(coefficients, part, self._bound)
            first = last
        if not direct:
            into.copy_(values[: into.numel()])
