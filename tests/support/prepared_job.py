"""A prepared job's directory made without torch: the micro model with weights that are only bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from starlings_job.checkpoint import CheckpointWriter
from starlings_job.description import describe
from starlings_job.prepared import FORMAT, JOB_FILE, PREPARED_FILE, WEIGHTS
from starlings_job.presets import PRESETS
from starlings_job.profile import BlockProfile, Profile
from starlings_job.records import TOKENS, DatasetMeta
from starlings_job.spec import load_job
from starlings_job.state import PARAMETER, RawTensor

JOB = """
[job]
name = "{name}"
seed = 3
tokens = {tokens}
[model]
preset = "micro"
[data]
source = "stdlib"
sequence_length = 16
held_out = 4
[train]
batch = 4
microbatch = 2
[swarm]
min_workers = {min_workers}
settle_s = 0.0
[checkpoint]
every = {every}
keep = 2
[network]
host = "127.0.0.1"
ports = {{ control = 0, enrolment = 0, page = 0 }}
"""
STEPS = 3
TOKENS_PER_STEP = 4 * 16
POPULATION = 50


def block_names() -> tuple[str, ...]:
    return ("embed", *(f"layers.{i}" for i in range(4)), "head")


def tensor(seed: object, shape: tuple[int, ...]) -> RawTensor:
    count = 1
    for length in shape:
        count *= length
    return RawTensor("F32", shape, memoryview(random.Random(str(seed)).randbytes(4 * count)))


def block_state(block: str, version: int, *, optimizer: bool = True) -> dict[str, RawTensor]:
    """What a correct worker holds at `version`; the bytes follow from block, version and name."""
    shapes = {"weight": (64, 40), "bias": (64,)}
    tensors = {PARAMETER + n: tensor((block, version, n), s) for n, s in shapes.items()}
    if optimizer and version > 0:
        for kind in ("exp_avg:", "exp_avg_sq:"):
            tensors |= {kind + n: tensor((block, version, kind, n), s) for n, s in shapes.items()}
    return tensors


def block_profile(name: str) -> BlockProfile:
    kind = "layer" if name.startswith("layers.") else name
    count = 64 * 40 + 64
    return BlockProfile(name, kind, count, count, 1_000_000, 10_000, 64 * 16 * 4, 64 * 40 * 4)


def write_prepared_job(
    directory: Path,
    *,
    name: str = "test",
    steps: int = STEPS,
    min_workers: int = 1,
    every: int = 0,
    extra: str = "",
) -> Path:
    """Writes job.toml beside nothing and everything `starlings prepare` would into `directory`; returns it."""
    directory.mkdir(parents=True)
    job_file = directory / JOB_FILE
    text = JOB.format(name=name, tokens=steps * TOKENS_PER_STEP, min_workers=min_workers, every=every)
    job_file.write_text(text + extra)
    job = load_job(job_file)
    preset = PRESETS["micro"]
    model = describe(preset.family, preset.config, "micro")
    (directory / "model.json").write_text(model.to_json())
    meta = DatasetMeta(
        kind=TOKENS,
        population=POPULATION,
        held_out=4,
        sequence_length=16,
        vocabulary_size=256,
        stride_tokens=16,
        context_tokens=model.context_tokens,
        tokenizer="bytes",
        unigram_entropy=3.0,
        bigram_entropy=2.0,
    )
    (directory / "dataset.json").write_text(meta.to_json())
    letters = random.Random(1)
    for file, samples in (("tokens.bin", POPULATION), ("held_out.bin", 4)):
        (directory / file).write_bytes(bytes(letters.choices(b"abcdefgh \n", k=samples * 16 + 1)))
    blocks = tuple(block_profile(block) for block in block_names())
    profile = Profile(blocks, "llama", 16, 256, meta.record_bytes)
    (directory / "profile.json").write_bytes(profile.to_json())
    with CheckpointWriter(directory / WEIGHTS, 0) as writer:
        for block in block_names():
            writer.add_block(block, block_state(block, 0))
        writer.finish()
    stamp: Mapping[str, object] = {"format": FORMAT, "preparation_digest": job.preparation_digest()}
    (directory / PREPARED_FILE).write_text(json.dumps(stamp))
    return directory
