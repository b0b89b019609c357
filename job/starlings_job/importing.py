"""Weights from a Hugging Face directory, block by block: `[model] from = DIR`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from starlings_job.description import ModelDescription
from starlings_job.errors import CheckpointError, JobFileError
from starlings_job.family import OUTPUT
from starlings_job.model.stage import meta_tensors
from starlings_job.model.tensors import torch_tensor
from starlings_job.safetensors_io import read_header
from starlings_job.state import RawTensor

INDEX_LIMIT_BYTES = 64 << 20
# Constants that older checkpoints carry along: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r"(.*\.)?((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    name: str
    data_type: str
    shape: tuple[int, ...]
    first_byte: int
    end_byte: int

    def read(self) -> torch.Tensor:
        if self.data_type not in ("F32", "F16", "BF16", "F64"):
            raise JobFileError(
                f"[model] from: {self.name} has type {self.data_type}; quantised weights cannot be trained"
            )
        with self.path.open("rb") as file:
            file.seek(self.first_byte)
            data = memoryview(file.read(self.end_byte - self.first_byte))
        return torch_tensor(RawTensor(self.data_type, self.shape, data)).to(torch.float32)


def hugging_face_state(
    directory: Path, description: ModelDescription
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(block, {name: float32 tensor}) for every block in order, from one safetensors file or several.

    A missing output embedding is a copy of the input embedding: checkpoints of tied models leave it out. Experts
    are taken one by one, as published checkpoints hold them, or stacked.

    Raises:
        JobFileError: no safetensors, or tensors that are missing, unknown or of another shape than
        config.json says.
    """
    found: dict[tuple[str, str], _Stored] = {}
    unknown = []
    for stored in _stored(directory):
        where = description.locate(stored.name)
        if _CONSTANTS.fullmatch(stored.name):
            continue
        if where is None or where[0] not in description.blocks:
            unknown.append(stored.name)
        else:
            found[where] = stored
    expected = meta_tensors(description)
    if description.is_language_model:
        embedding = found.get(("embed", description.rules.token_embedding))
        if embedding is not None:
            found.setdefault(("head", OUTPUT), embedding)
    missing = []
    sources: dict[tuple[str, str], list[_Stored]] = {}
    for block, tensors in expected.items():
        for name in tensors:
            pieces = (name,) if (block, name) in found else description.pieces(name) or (name,)
            missing += [description.hugging_face_name(block, p) for p in pieces if (block, p) not in found]
            sources[block, name] = [found.pop((block, p)) for p in pieces if (block, p) in found]
    unknown += [stored.name for stored in found.values()]
    if missing or unknown:
        lists = [f"{word} {_some(names)}" for word, names in (("lacks", missing), ("has", unknown)) if names]
        raise JobFileError(
            f"[model] from: {directory} does not fit its config.json: it {' and '.join(lists)}"
        )
    for block, tensors in expected.items():
        yield block, {n: _assembled(sources[block, n], tuple(p.shape)) for n, p in tensors.items()}


def _assembled(stored: list[_Stored], shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter of this shape: one stored tensor, or the rows of several (or of one expert's) end to end."""
    each = shape
    if len(stored) > 1 or len(stored[0].shape) < len(shape) == 3:
        each = (shape[0] * shape[1] // len(stored), shape[2])
    for part in stored:
        if part.shape != each:
            raise JobFileError(
                f"[model] from: {part.name} has shape {list(part.shape)}, config.json means {list(each)}"
            )
    read = [part.read() for part in stored]
    return read[0].reshape(shape) if len(read) == 1 else torch.cat(read).reshape(shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _stored(directory: Path) -> Iterator[_Stored]:
    """Every tensor of the directory."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            if index.stat().st_size > INDEX_LIMIT_BYTES:
                raise ValueError
            weight_map = json.loads(index.read_bytes())["weight_map"]
            files = sorted({str(name) for name in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise JobFileError(f"[model] from: {index} is malformed") from None
    else:
        files = ["model.safetensors"]
    for name in files:
        path = directory / name
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not path.is_file():
            raise JobFileError(
                f"[model] from: {directory} has no {name}; Starlings reads safetensors only, never pickled weights"
            )
        with path.open("rb") as file:
            try:
                header, begin = read_header(file, path.stat().st_size)
            except CheckpointError as error:
                raise JobFileError(f"[model] from: {path}: {error}") from None
        for tensor, (data_type, shape, first, end) in header.items():
            yield _Stored(path, tensor, data_type, shape, begin + first, begin + end)
