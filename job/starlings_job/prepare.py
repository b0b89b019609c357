"""`starlings prepare`: from a job file to a directory that a slim coordinator can serve."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from starlings_job.checkpoint import CheckpointWriter
from starlings_job.data.prepare_text import write_text
from starlings_job.data.shapes import write_shapes
from starlings_job.data.tokenizer import load_tokenizer, resolve_tokenizer, save_tokenizer
from starlings_job.description import ModelDescription, describe, describe_config_file
from starlings_job.errors import JobFileError, disk_full_explained
from starlings_job.importing import hugging_face_state
from starlings_job.local_files import sync_folder
from starlings_job.model import initial_state, measure_profile, raw_tensor
from starlings_job.model.stage import meta_tensors
from starlings_job.prepared import (
    FORMAT,
    JOB_FILE,
    PREPARED_FILE,
    WEIGHTS,
    is_prepared,
    load_prepared,
    load_profile,
)
from starlings_job.presets import PRESETS, SHAPES
from starlings_job.records import DatasetMeta
from starlings_job.spec import JobSpec, load_job
from starlings_job.state import PARAMETER

# Phase ("text", "weights", "profile"), fraction done, what is being worked on.
Progress = Callable[[str, float, str], None]
_BUILDING = ".preparing"


def prepare(job_toml: str | Path, out_dir: str | Path, progress: Progress | None = None) -> dict[str, Any]:
    """Writes tokens, profile and version 0 of the weights to `out_dir`; returns what was found, for people.

    A directory that is prepared for this very job already is left alone. The same job file, text and seed
    give the same bytes.

    Raises:
        JobFileError: the job file, model or tokenizer cannot be used.
        NoDataMatched: no text, or too little.
        NotPrepared: the directory is prepared for another job.
        DiskFull: no space; the directory is as it was.
    """
    job_toml, out = Path(job_toml).absolute(), Path(out_dir).absolute()
    job = load_job(job_toml)
    report = progress or (lambda phase, fraction, detail: None)
    if is_prepared(out):
        load_prepared(out, job)
        if job_toml != out / JOB_FILE:
            shutil.copyfile(job_toml, out / JOB_FILE)
        return _facts(out, already=True)
    created = not out.exists()
    building = out / _BUILDING
    shutil.rmtree(building, ignore_errors=True)
    try:
        with disk_full_explained("the prepared job", out):
            building.mkdir(parents=True)
            _build(job, job_toml, building, report)
            _move_in(building, out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        if created and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise
    return _facts(out, already=False)


def _build(job: JobSpec, job_toml: Path, folder: Path, report: Progress) -> None:
    base = job_toml.parent
    description = describe_job(job, base)
    _check_trainable(job, description)
    job.check_cut(description.blocks)
    meta = _write_data(job, description, base, folder, report)
    _write_weights(job, description, base, folder, report)
    profile = measure_profile(description, meta, lambda fraction: report("profile", fraction, ""))
    (folder / "model.json").write_text(description.to_json(), "utf-8")
    (folder / "dataset.json").write_text(meta.to_json(), "utf-8")
    (folder / "profile.json").write_bytes(profile.to_json())
    shutil.copyfile(job_toml, folder / JOB_FILE)
    stamp = {"format": FORMAT, "preparation_digest": job.preparation_digest()}
    (folder / PREPARED_FILE).write_text(json.dumps(stamp, indent=2) + "\n", "utf-8")


def describe_job(job: JobSpec, base: Path) -> ModelDescription:
    """The model that `[model]` names; paths are relative to `base`.

    Raises:
        JobFileError: it cannot be read, is not allowed, or does not take the job's sequences.
    """
    trainable = job.train.trainable
    if job.model.preset is not None:
        preset = PRESETS[job.model.preset]
        where = f"preset {job.model.preset}"
        description = describe(preset.family, preset.config, where, untie=job.unties, trainable=trainable)
    else:
        path = base / Path(job.model.config or job.model.from_ or "").expanduser()
        if job.model.from_ is not None and not path.is_dir():
            raise JobFileError(f"[model] from: there is no directory {path}")
        description = describe_config_file(path, untie=job.unties, trainable=trainable)
    if description.is_language_model == (job.data.source == (SHAPES,)):
        raise JobFileError('[data] source "shapes" is for image classifiers, and they take nothing else')
    if description.is_language_model and job.data.sequence_length > description.context_tokens:
        raise JobFileError(
            f"[data] sequence_length = {job.data.sequence_length} is more than the model takes "
            f"({description.rules.positions_key} = {description.context_tokens})"
        )
    return description


def _check_trainable(job: JobSpec, description: ModelDescription) -> None:
    tensors = meta_tensors(description)
    names = [(block, name) for block, inner in tensors.items() for name in inner]
    if not any(description.is_trainable(block, name) for block, name in names):
        example = description.hugging_face_name(*names[len(names) // 2])
        raise JobFileError(
            f"[train] trainable {', '.join(job.train.trainable)} matches no parameter; one is called {example!r}"
        )


def _write_data(
    job: JobSpec, description: ModelDescription, base: Path, folder: Path, report: Progress
) -> DatasetMeta:
    if not description.is_language_model:
        return write_shapes(
            folder, job.data.held_out, job.job.seed, lambda done: report("text", done, SHAPES)
        )
    name = resolve_tokenizer(job.data.tokenizer, job.model.from_ or job.model.config, base)
    tokenizer = load_tokenizer(name, base)
    if tokenizer.vocabulary_size > description.vocabulary_size:
        raise JobFileError(
            f"[data] tokenizer has {tokenizer.vocabulary_size} tokens, "
            f"the model only {description.vocabulary_size} (vocab_size)"
        )
    meta = write_text(
        folder,
        job.data,
        base,
        tokenizer,
        vocabulary_size=description.vocabulary_size,
        context_tokens=description.context_tokens,
        seed=job.job.seed,
        progress=lambda done, what: report("text", done, what),
    )
    save_tokenizer(name, base, folder, description.context_tokens)
    return meta


def _write_weights(
    job: JobSpec, description: ModelDescription, base: Path, folder: Path, report: Progress
) -> None:
    blocks: Iterator[tuple[str, dict[str, torch.Tensor]]]
    if job.model.from_ is not None:
        blocks = hugging_face_state(base / Path(job.model.from_).expanduser(), description)
    else:
        blocks = initial_state(description, job.job.seed)
    with CheckpointWriter(folder / WEIGHTS, 0) as writer:
        for done, (block, tensors) in enumerate(blocks, 1):
            writer.add_block(block, {PARAMETER + name: raw_tensor(t) for name, t in tensors.items()})
            report("weights", done / len(description.blocks), block)
        writer.finish({"job": job.job.name, "tokens": 0})


def _move_in(building: Path, out: Path) -> None:
    """Moves everything to its place, the stamp last: until then the directory is not prepared."""
    entries = sorted(building.iterdir(), key=lambda path: path.name == PREPARED_FILE)
    for entry in entries:
        target = out / entry.name
        if entry.name == PREPARED_FILE:
            sync_folder(out)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(entry, target)
    building.rmdir()
    sync_folder(out)


def _facts(out: Path, *, already: bool) -> dict[str, Any]:
    job = load_prepared(out)
    profile, meta = load_profile(out), job.dataset
    return {
        "job": job.job.name,
        "already_prepared": already,
        "parameters": profile.parameter_count,
        "blocks": list(profile.block_names),
        "samples": meta.population,
        "held_out_samples": meta.held_out,
        "sequence_length": meta.sequence_length,
        "steps": job.steps_total,
        "source_files": meta.source_files,
        "source_bytes": meta.source_bytes,
        "source_sha256": meta.source_sha256,
        "unigram_entropy": meta.unigram_entropy,
        "bigram_entropy": meta.bigram_entropy,
        "notes": list(job.description.notes),
    }
