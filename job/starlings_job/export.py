"""A checkpoint as a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads. Torch-free."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlings_job.checkpoint import load_manifest, newest_version, read_block
from starlings_job.data.tokenizer import FOLDER
from starlings_job.description import ModelDescription
from starlings_job.errors import ExportError, disk_full_explained
from starlings_job.prepared import checkpoint_url, load_prepared, weights_url
from starlings_job.safetensors_io import write_file
from starlings_job.state import PARAMETER, RawTensor

_BUILDING = ".exporting"


def export_checkpoint(
    job_dir: str | Path, out_dir: str | Path, *, version: int | None = None
) -> dict[str, Any]:
    """Writes config.json, model.safetensors (float32) and the tokenizer to `out_dir`.

    Args:
        version: of the checkpoints; the newest when None; 0 is the weights that training began with.

    Returns:
        path, version, family, parameters, bytes, facts of the checkpoint.

    Raises:
        ExportError: `out_dir` is not empty, or there is no such checkpoint.
        CheckpointError: the checkpoint is damaged.
        DiskFull: no space; `out_dir` is as it was.
    """
    job_dir, out = Path(job_dir), Path(out_dir).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} is there already and not empty: choose another directory")
    job = load_prepared(job_dir)
    url = checkpoint_url(job_dir, job)
    if version is None:
        version = newest_version(url)
        if version is None:
            raise ExportError(
                f"job {job.job.name!r} has no checkpoint yet in {url}: let it run, or stop it in order"
            )
    url = weights_url(job_dir) if version == 0 else url
    manifest = load_manifest(url, version)
    description = job.description
    tensors = _whole_state(url, version, description)
    building = out.with_name(out.name + _BUILDING)
    shutil.rmtree(building, ignore_errors=True)
    try:
        with disk_full_explained("the export", out):
            building.mkdir(parents=True)
            config = hugging_face_config(description)
            (building / "config.json").write_text(
                json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8"
            )
            with (building / "model.safetensors").open("wb") as file:
                written = write_file(file, tensors, {"format": "pt"})
            if (job_dir / FOLDER).is_dir():
                for source in (job_dir / FOLDER).iterdir():
                    shutil.copyfile(source, building / source.name)
            if out.exists():
                out.rmdir()
            os.replace(building, out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    count = sum(tensor.data.nbytes // 4 for tensor in tensors.values())
    return {
        "path": str(out),
        "version": version,
        # How to load it depends on the family: "sequential" is no Hugging Face model.
        "family": job.description.family,
        "parameters": count,
        "bytes": written.byte_count,
        "facts": dict(manifest.facts),
    }


def hugging_face_config(description: ModelDescription) -> Mapping[str, Any]:
    """What config.json says. For a Sequential: the factory and its arguments, which only Starlings reads."""
    if not description.is_language_model:
        return {"model_type": description.family, **description.config}
    config = {key: value for key, value in description.config.items() if key != "attn_implementation"}
    return {
        **config,
        "architectures": [description.rules.architecture],
        "model_type": description.family,
        "dtype": "float32",
    }


def _whole_state(url: str, version: int, description: ModelDescription) -> dict[str, RawTensor]:
    manifest = load_manifest(url, version)
    state: dict[str, RawTensor] = {}
    tied = description.tied_parameters()
    copies: dict[tuple[str, str], RawTensor] = {}
    for block in description.blocks:
        for name, tensor in read_block(url, version, block, optimizer=False, manifest=manifest).items():
            inner = name.removeprefix(PARAMETER)
            if tied is not None and (block, inner) in tied:
                copies[block, inner] = tensor
                if (block, inner) == tied[1]:
                    continue
            names = description.published_names(block, inner)
            pieces = description.pieces(inner)
            state |= _pieces(tensor, names) if pieces else {names[0]: tensor}
    if tied is not None and copies[tied[0]].data != copies[tied[1]].data:
        raise ExportError(f"version {version}: the two copies of the tied embedding differ")
    return state


def _pieces(stacked: RawTensor, names: tuple[str, ...]) -> dict[str, RawTensor]:
    """A parameter of all experts, (experts, rows, columns), as the tensors of published checkpoints: an equal
    share of an expert's rows each.
    """
    experts, rows, columns = stacked.shape
    shape = (experts * rows // len(names), columns)
    size = stacked.data.nbytes // len(names)
    return {
        name: RawTensor(stacked.data_type, shape, stacked.data[i * size : (i + 1) * size])
        for i, name in enumerate(names)
    }
