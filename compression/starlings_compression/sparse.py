"""`topk:K/CHUNK` and `randk:K/CHUNK`: few values of each chunk of consecutive ones; all others decode to zero."""

from __future__ import annotations

from typing import cast

import torch

from starlings_compression.codec import Codec, Reader, check_floating
from starlings_compression.errors import CodecError
from starlings_compression.layout import DataType, Form
from starlings_compression.packing import pack_indices, unpack_indices
from starlings_compression.sizes import drawn_of, index_bits, kept_of
from starlings_compression.spec import CodecSpec
from starlings_compression.state import CodecState, Memory
from starlings_compression.tensors import DATA_TYPES, TORCH_TYPES, chunk_elements, is_finite, view


class Reducer(Codec):
    """A codec whose values go on to another one. Its own sections come first."""

    def __init__(self, spec: CodecSpec, inner: Codec) -> None:
        super().__init__(spec)
        assert spec.reducer is not None
        self.inner = inner
        self.arguments = spec.reducer.arguments

    def read_values(
        self, count: int, data_type: DataType, sections: tuple[memoryview, ...], device: torch.device
    ) -> torch.Tensor:
        """All reduced values. Raises CodecError."""
        reader = self.inner.reader(Form(data_type, (count,)), sections, device)
        values = torch.empty(count, dtype=TORCH_TYPES[data_type], device=device)
        if count:
            reader.read(0, count, values)
        return values


# ---------------------------------------------------------------------- largest of each row


def largest_of_rows(rows: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices (int32, ascending in each row) of the `kept` largest magnitudes of each row.

    NaN counts as larger than everything, so it is among them if there is any.
    """
    _, indices = torch.topk(rows.abs(), kept, dim=1, sorted=False)
    indices = indices.sort(dim=1).values
    return rows.gather(1, indices), indices.to(torch.int32)


def check_indices(indices: torch.Tensor, limit: int) -> None:
    """Raises CodecError for indices (rows x kept) that do not ascend, or reach `limit`."""
    if indices.numel() == 0:
        return
    # They ascend, so the last of each row is its largest.
    if int(indices[:, -1].max()) >= limit:
        raise CodecError(f"an index is not below {limit}")
    kept = indices.shape[1]
    if kept > 1:
        step = chunk_elements(indices.device, kept) // kept
        for start in range(0, indices.shape[0], step):
            rows = indices[start : start + step]
            if not bool((rows[:, 1:] > rows[:, :-1]).all()):
                raise CodecError("indices do not ascend")


class IndexWriter:
    """Packs int32 indices into a section as they are found: all of them together take as much memory as the values."""

    def __init__(self, bits: int, section: memoryview) -> None:
        self._bits = bits
        self._target = view(section, torch.uint8)
        self._written_bytes = 0
        # The first half of three bytes, where an odd number of 12-bit indices was added.
        self._left: torch.Tensor | None = None

    def add(self, indices: torch.Tensor) -> None:
        """Flat indices, on any device; they may be overwritten."""
        if self._left is not None:
            indices, self._left = torch.cat([self._left, indices]), None
        if self._bits == 12 and indices.numel() % 2:
            indices, self._left = indices[:-1], indices[-1:].clone()
        self._write(indices)

    def close(self) -> None:
        if self._left is not None:
            self._write(self._left)
            self._left = None

    def _write(self, indices: torch.Tensor) -> None:
        start, length = self._written_bytes, -(-indices.numel() * self._bits // 8)
        target = self._target[start : start + length]
        if indices.device.type == "cpu":
            pack_indices(indices, self._bits, target)
        else:
            packed = torch.empty_like(target, device=indices.device)
            pack_indices(indices, self._bits, packed)
            target.copy_(packed)
        self._written_bytes += length


def read_indices(section: memoryview, bits: int, count: int, device: torch.device) -> torch.Tensor:
    """Flat int32 indices. Raises CodecError."""
    return unpack_indices(view(section, torch.uint8), bits, count).to(device)


class TopkCodec(Reducer):
    """Chunked top-k by magnitude (Lin 2018; chunks as in SparseLoCo, section 3).

    Sections: indices within their chunk, ascending, of 8, 12 or 16 bits; then the values. A last, shorter chunk
    keeps as many values as the others, or all.
    """

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        flat = values.view(-1)
        check_floating(DATA_TYPES[flat.dtype], name, self.spec)
        kept, chunk = self.arguments
        total = kept_of(flat.numel(), chunk, kept)
        chosen = torch.empty(total, dtype=flat.dtype, device=flat.device)
        indices = IndexWriter(index_bits(chunk), sections[0])
        whole = flat.numel() // chunk
        rows = flat[: whole * chunk].view(whole, chunk)
        step = chunk_elements(flat.device, chunk) // chunk
        for start in range(0, whole, step):
            found, where = largest_of_rows(rows[start : start + step], kept)
            chosen[start * kept : start * kept + found.numel()] = found.view(-1)
            indices.add(where.view(-1))
        if whole * chunk < flat.numel():
            rest = flat[whole * chunk :].view(1, -1)
            found, where = largest_of_rows(rest, total - whole * kept)
            chosen[whole * kept :] = found.view(-1)
            indices.add(where.view(-1))
        indices.close()
        # NaN and infinity are the largest of their chunk: here they are, if there are any.
        if not is_finite(chosen):
            raise CodecError(f"{name}: NaN or infinite values")
        self.inner.write(chosen, sections[1:], name, state)

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        kept, chunk = self.arguments
        count = form.element_count
        total = kept_of(count, chunk, kept)
        indices = read_indices(sections[0], index_bits(chunk), total, device)
        whole = count // chunk
        check_indices(indices[: whole * kept].view(whole, kept), chunk)
        check_indices(indices[whole * kept :].view(1, -1), count % chunk)
        values = self.read_values(total, form.data_type, sections[1:], device)
        return _TopkReader(indices, values, kept, chunk)


class _TopkReader:
    def __init__(self, indices: torch.Tensor, values: torch.Tensor, kept: int, chunk: int) -> None:
        self._indices = indices
        self._values = values
        self._kept = kept
        self._chunk = chunk
        self.granularity = chunk

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        into.zero_()
        first, kept, chunk = start // self._chunk, self._kept, self._chunk
        whole = (stop - start) // chunk
        split = slice(first * kept, (first + whole) * kept)
        into[: whole * chunk].view(whole, chunk).scatter_(
            1, self._indices[split].view(whole, kept).long(), self._values[split].view(whole, kept)
        )
        if whole * chunk < stop - start:
            into[whole * chunk :].scatter_(0, self._indices[split.stop :].long(), self._values[split.stop :])


# ---------------------------------------------------------------------- drawn by lot


def _signed(number: int) -> int:
    """The same 64 bits as a signed number, which is all that torch has."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele 2014), in place on int64: the same bits on every machine."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words.bitwise_xor_((words >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return words


def drawn_places(seed: int, first: int, count: int, piece: int, device: torch.device) -> torch.Tensor:
    """Places (int64) in 0 .. piece - 1, one for each of the pieces first .. first + count - 1."""
    words = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    words.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(seed))
    return (
        _mixed(words).bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(piece).bitwise_right_shift_(32)
    )


def round_seed(state: CodecState | None) -> int:
    """The seed of the next round: as good as random, and the same for equal states."""
    if state is None:
        return 0
    words = torch.tensor([_signed(state.seed + 0x9E3779B97F4A7C15 * state.committed.round)])
    return cast(int, _mixed(words).item())


class RandkCodec(Reducer):
    """Rand-k with a shared seed (Stich 2018, section 2.2), stratified: each chunk is K equal pieces, of each of which
    one value travels. Places follow from the seed, so no indices do. Values are not scaled up: that is for
    whoever uses it without error feedback.

    Sections: the seed (8 bytes), then the values. With a state, every committed round draws anew.
    """

    def write(
        self, values: torch.Tensor, sections: tuple[memoryview, ...], name: str, state: CodecState | None
    ) -> None:
        flat = values.view(-1)
        check_floating(DATA_TYPES[flat.dtype], name, self.spec)
        if not is_finite(flat):
            raise CodecError(f"{name}: NaN or infinite values")
        kept, chunk = self.arguments
        seed = round_seed(state)
        chosen = torch.empty(drawn_of(flat.numel(), chunk, kept), dtype=flat.dtype, device=flat.device)
        piece = chunk // kept
        step = chunk_elements(flat.device, piece)
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            places = _places(seed, start, start + part.numel(), piece, flat.device)
            first = start // piece
            torch.index_select(part, 0, places, out=chosen[first : first + places.numel()])
        sections[0][:] = seed.to_bytes(8, "little", signed=True)
        self.inner.write(chosen, sections[1:], name, state)
        if state is not None:
            state.stage(Memory(round=state.committed.round + 1))

    def reader(self, form: Form, sections: tuple[memoryview, ...], device: torch.device) -> Reader:
        check_floating(form.data_type, "packed tensor", self.spec)
        kept, chunk = self.arguments
        total = drawn_of(form.element_count, chunk, kept)
        values = self.read_values(total, form.data_type, sections[1:], device)
        return _RandkReader(int.from_bytes(sections[0], "little", signed=True), values, chunk // kept)


def _places(seed: int, start: int, stop: int, piece: int, device: torch.device) -> torch.Tensor:
    """Where the drawn values of elements start .. stop lie, counted from start (a multiple of `piece`)."""
    whole, rest = divmod(stop - start, piece)
    places = drawn_places(seed, start // piece, whole, piece, device)
    places += torch.arange(0, whole * piece, piece, dtype=torch.int64, device=device)
    if rest:
        last = drawn_places(seed, stop // piece, 1, rest, device)
        places = torch.cat([places, last + whole * piece])
    return places


class _RandkReader:
    def __init__(self, seed: int, values: torch.Tensor, piece: int) -> None:
        self._seed = seed
        self._values = values
        self._piece = piece
        self.granularity = piece

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        into.zero_()
        places = _places(self._seed, start, stop, self._piece, into.device)
        first = start // self._piece
        into.scatter_(0, places, self._values[first : first + places.numel()])
