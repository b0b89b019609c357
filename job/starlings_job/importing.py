"""Weights from a Hugging Face directory, block by block: `[model] from = DIR`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from starlings_job.description import ModelDescription
from starlings_job.errors import CheckpointError, JobFileError
from starlings_job.model.stage import meta_tensors
from starlings_job.model.tensors import torch_tensor
from starlings_job.safetensors_io import read_header
from starlings_job.state import RawTensor

INDEX_LIMIT_BYTES = 64 << 20
# Constants that older checkpoints carry along: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")


def hugging_face_state(
    directory: Path, description: ModelDescription
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(block, {name: float32 tensor}) for every block in order, from one safetensors file or several.

    A missing output embedding is a copy of the input embedding: checkpoints of tied models leave it out.

    Raises:
        JobFileError: no safetensors, or tensors that are missing, unknown or of another shape than
        config.json says.
    """
    found: dict[tuple[str, str], tuple[Path, str]] = {}
    unknown = []
    for file, name in _names(directory):
        where = description.locate(name)
        if _CONSTANTS.fullmatch(name):
            continue
        if where is None or where[0] not in description.blocks:
            unknown.append(name)
        else:
            found[where] = (file, name)
    expected = meta_tensors(description)
    if description.is_language_model:
        embedding = found.get(("embed", description.rules.token_embedding))
        if embedding is not None:
            found.setdefault(("head", "lm_head.weight"), embedding)
    missing = [
        description.hugging_face_name(block, name)
        for block, tensors in expected.items()
        for name in tensors
        if (block, name) not in found
    ]
    unknown += [
        description.hugging_face_name(block, name) for block, name in found if name not in expected[block]
    ]
    if missing or unknown:
        lists = [f"{word} {_some(names)}" for word, names in (("lacks", missing), ("has", unknown)) if names]
        raise JobFileError(
            f"[model] from: {directory} does not fit its config.json: it {' and '.join(lists)}"
        )
    for block, tensors in expected.items():
        state = {}
        for name, parameter in tensors.items():
            file, full = found[block, name]
            raw = _read(file, full)
            if raw.shape != tuple(parameter.shape):
                raise JobFileError(
                    f"[model] from: {full} has shape {list(raw.shape)}, config.json means {list(parameter.shape)}"
                )
            state[name] = torch_tensor(raw).to(torch.float32)
        yield block, state


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _names(directory: Path) -> Iterator[tuple[Path, str]]:
    """Every tensor's file and name."""
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
                header, _ = read_header(file, path.stat().st_size)
            except CheckpointError as error:
                raise JobFileError(f"[model] from: {path}: {error}") from None
        for tensor in header:
            yield path, tensor


def _read(path: Path, name: str) -> RawTensor:
    with path.open("rb") as file:
        header, begin = read_header(file, path.stat().st_size)
        data_type, shape, first, end = header[name]
        if data_type not in ("F32", "F16", "BF16", "F64"):
            raise JobFileError(
                f"[model] from: {name} has type {data_type}; quantised weights cannot be trained"
            )
        file.seek(begin + first)
        return RawTensor(data_type, shape, memoryview(file.read(end - first)))
