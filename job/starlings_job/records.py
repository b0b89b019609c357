"""The prepared dataset as records: what a lease carries, one record per sample. Torch-free, memory-mapped.

| kind | record, in bytes |
| --- | --- |
| tokens | `sequence_length + 1` tokens of 1, 2 or 4 bytes (little-endian); with a mask one more byte each |
| images | the pixels (channels, rows, columns; one byte each), then the label (one byte) |

Token t predicts token t + 1; a mask byte of 0 at t + 1 leaves that target out of the loss.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from starlings_job.errors import JobFileError, NotPrepared

FORMAT = 1
TOKENS = "tokens"
IMAGES = "images"
# Longest context that generation hands on; far above any model's.
PROMPT_LIMIT_TOKENS = 1 << 24
_TYPE_CODES = {1: "B", 2: "H", 4: "I"}


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """What `dataset.json` says: the format of records, their number, and figures about the text."""

    kind: str
    # Training and held-out samples.
    population: int
    held_out: int
    sequence_length: int
    # Tokens, or classes.
    vocabulary_size: int
    token_bytes: int = 1
    masked: bool = False
    # Tokens between the beginnings of two records; one token is shared unless there is a mask.
    stride_tokens: int = 0
    # The same for held-out records, which are drawn from all over the held-out text; 0 = as for training.
    held_out_stride_tokens: int = 0
    # (channels, rows, columns); empty for tokens.
    image_shape: tuple[int, ...] = ()
    # Longest sequence that the model takes: generation keeps only this many last tokens.
    context_tokens: int = 1
    # "bytes" or "huggingface"; "" for images.
    tokenizer: str = ""
    # The source text that was used: number of files or documents, bytes, SHA-256 over all bytes in order.
    source_files: int = 0
    source_bytes: int = 0
    source_sha256: str = ""
    # Nats per token of the held-out tokens; None for images.
    unigram_entropy: float | None = None
    # The same given the previous token.
    bigram_entropy: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in (TOKENS, IMAGES) or self.token_bytes not in _TYPE_CODES:
            raise JobFileError(f"the dataset's kind {self.kind[:40]!r} is not known to this version")
        if (
            min(
                self.population,
                self.held_out,
                self.sequence_length,
                self.vocabulary_size,
                self.context_tokens,
            )
            < 1
        ):
            raise JobFileError("the dataset is empty")
        if self.kind == IMAGES and (len(self.image_shape) != 3 or min(self.image_shape) < 1):
            raise JobFileError("the dataset's images have no shape")
        strides = {self.stride_tokens, self.held_out_stride_tokens or self.stride_tokens}
        if self.kind == TOKENS and not strides <= {self.sequence_length, self.sequence_length + 1}:
            raise JobFileError("the dataset's records overlap in an unknown way")

    @property
    def tokens_per_record(self) -> int:
        return self.sequence_length + 1

    @property
    def record_bytes(self) -> int:
        """Bytes of one record of a TRAIN or EVALUATE lease."""
        if self.kind == IMAGES:
            return prod(self.image_shape) + 1
        return self.tokens_per_record * (self.token_bytes + self.masked)

    def to_record(self) -> dict[str, Any]:
        record = asdict(self)
        record["image_shape"] = list(self.image_shape)
        return {"format": FORMAT, **record}

    def to_json(self) -> str:
        return json.dumps(self.to_record(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DatasetMeta:
        """Checked, because it may come from another machine.

        Raises:
            JobFileError: malformed or of another format.
        """
        if record.get("format") != FORMAT:
            raise JobFileError(f"the dataset is not of format {FORMAT}; it was prepared by another version")
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name not in record:
                raise JobFileError(f"the dataset's description lacks {f.name}")
            value = record[f.name]
            if not _fits(f.type if isinstance(f.type, str) else f.type.__name__, value):
                raise JobFileError(f"the dataset's description has a bad {f.name}: {str(value)[:60]!r}")
            values[f.name] = tuple(value) if f.name == "image_shape" else value
        return cls(**values)

    @classmethod
    def from_json(cls, data: str | bytes) -> DatasetMeta:
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            raise JobFileError("the dataset's description is no JSON") from None
        if not isinstance(record, dict):
            raise JobFileError("the dataset's description is no JSON object")
        return cls.from_record(record)


def _fits(type_text: str, value: object) -> bool:
    match type_text:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str) and len(value) <= 256
        case "float | None":
            return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        case _:
            return isinstance(value, list | tuple) and len(value) <= 4 and all(_fits("int", v) for v in value)


def pack_tokens(tokens: Iterable[int], token_bytes: int) -> bytes:
    """Tokens as a record's bytes; also the records of a GENERATE lease."""
    return b"".join(int(token).to_bytes(token_bytes, "little") for token in tokens)


def unpack_tokens(data: bytes | memoryview, token_bytes: int) -> tuple[int, ...]:
    """The inverse of `pack_tokens`. Raises ValueError when the bytes are no whole number of tokens."""
    if len(data) % token_bytes:
        raise ValueError(f"{len(data)} bytes are no whole number of tokens of {token_bytes} bytes")
    if token_bytes == 1:
        return tuple(bytes(data))
    return tuple(
        int.from_bytes(data[i : i + token_bytes], "little") for i in range(0, len(data), token_bytes)
    )


class RecordStore:
    """The records of a prepared directory, by sample id. Reads slice a memory map; safe from many threads."""

    def __init__(self, directory: str | Path) -> None:
        """Raises NotPrepared when files are absent or shorter than dataset.json says."""
        directory = Path(directory)
        try:
            self.meta = DatasetMeta.from_json((directory / "dataset.json").read_bytes())
        except OSError:
            raise NotPrepared(f"{directory} holds no prepared dataset: run `starlings prepare`") from None
        meta = self.meta
        stride = meta.held_out_stride_tokens or meta.stride_tokens
        self._train = _Records(directory, "tokens.bin", "mask.bin", meta, meta.population, meta.stride_tokens)
        self._held_out = _Records(directory, "held_out.bin", "held_out_mask.bin", meta, meta.held_out, stride)

    @property
    def population(self) -> int:
        """Training samples; ids run from 0 to population - 1."""
        return self.meta.population

    @property
    def held_out_count(self) -> int:
        return self.meta.held_out

    @property
    def record_bytes(self) -> int:
        return self.meta.record_bytes

    def read(self, ids: Sequence[int]) -> bytes:
        """The records of training samples, one after another.

        Raises:
            ValueError: an id that names no sample.
        """
        return self._train.read(ids)

    def read_held_out(self, ids: Sequence[int]) -> bytes:
        """As `read`, for held-out samples."""
        return self._held_out.read(ids)

    def target_count(self, ids: Sequence[int]) -> int:
        """Targets that the loss of these training samples counts."""
        return self._train.target_count(ids)

    def held_out_target_count(self, ids: Sequence[int]) -> int:
        return self._held_out.target_count(ids)

    def held_out_tokens(self, sample: int, count: int) -> tuple[int, ...]:
        """The first tokens of a held-out sample: a prompt for generation. Raises ValueError for images."""
        if self.meta.kind != TOKENS:
            raise ValueError("a dataset of images has no tokens")
        size = min(count, self.meta.tokens_per_record) * self.meta.token_bytes
        return unpack_tokens(self._held_out.read((sample,))[:size], self.meta.token_bytes)

    def close(self) -> None:
        self._train.close()
        self._held_out.close()

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Records:
    """One file of records and, where there is a mask, its companion."""

    def __init__(
        self, directory: Path, name: str, mask_name: str, meta: DatasetMeta, count: int, stride_tokens: int
    ) -> None:
        self._meta, self._count, self._stride_tokens = meta, count, stride_tokens
        if meta.kind == IMAGES:
            self._stride, self._size = meta.record_bytes, meta.record_bytes
        else:
            self._stride = stride_tokens * meta.token_bytes
            self._size = meta.tokens_per_record * meta.token_bytes
        self._data = _map(directory / name, (count - 1) * self._stride + self._size)
        self._mask: mmap.mmap | None = None
        if meta.masked:
            least = (count - 1) * stride_tokens + meta.tokens_per_record
            self._mask = _map(directory / mask_name, least)

    def read(self, ids: Sequence[int]) -> bytes:
        parts = []
        for sample in ids:
            begin = self._checked(sample) * self._stride
            parts.append(self._data[begin : begin + self._size])
            if self._mask is not None:
                parts.append(self._mask_of(sample))
        return b"".join(parts)

    def target_count(self, ids: Sequence[int]) -> int:
        if self._mask is None:
            for sample in ids:
                self._checked(sample)
            return len(ids) * (1 if self._meta.kind == IMAGES else self._meta.sequence_length)
        # The first token of a record is nobody's target.
        return sum(self._mask_of(self._checked(sample))[1:].count(1) for sample in ids)

    def close(self) -> None:
        self._data.close()
        if self._mask is not None:
            self._mask.close()

    def _mask_of(self, sample: int) -> bytes:
        assert self._mask is not None
        begin = sample * self._stride_tokens
        return self._mask[begin : begin + self._meta.tokens_per_record]

    def _checked(self, sample: int) -> int:
        if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < self._count:
            raise ValueError(f"sample {str(sample)[:40]} is not one of 0 to {self._count - 1}")
        return sample


def _map(path: Path, least_bytes: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        raise NotPrepared(f"{path} is absent or empty: run `starlings prepare` again") from None
    if len(mapped) < least_bytes:
        mapped.close()
        raise NotPrepared(f"{path} has fewer bytes than dataset.json says: run `starlings prepare` again")
    return mapped


def token_bytes_for(vocabulary_size: int) -> int:
    """The smallest of 1, 2, 4 bytes that holds every token."""
    return 1 if vocabulary_size <= 1 << 8 else 2 if vocabulary_size <= 1 << 16 else 4


def token_array(token_bytes: int) -> array[int]:
    """An empty array whose items have exactly `token_bytes` bytes."""
    items: array[int] = array(_TYPE_CODES[token_bytes])
    assert items.itemsize == token_bytes
    return items
