"""Bytes from outside at every parser of a job: the documented error, or a checked value; nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from starlings_job.checkpoint import BlockEntry, FileEntry, Manifest
from starlings_job.description import ModelDescription, describe
from starlings_job.errors import CheckpointError, JobError
from starlings_job.presets import PRESETS
from starlings_job.profile import BlockProfile, Profile, ProfileError
from starlings_job.records import DatasetMeta
from starlings_job.spec import JobSpec, PreparedSection, parse_job
from support.small_families import SMALL

DESCRIPTION = describe("llama", PRESETS["micro"].config, "preset")
META = DatasetMeta(
    kind="tokens", population=10, held_out=2, sequence_length=64, vocabulary_size=256, stride_tokens=64
)
JOB = parse_job('[job]\nname = "x"\ntokens = 5\n[model]\npreset = "micro"\n').model_copy(
    update={"prepared": PreparedSection(model=DESCRIPTION.to_record(), dataset=META.to_record())}
)
PROFILE = Profile((BlockProfile("embed", "embed", 1, 1, 1, 1, 1, 4),), "llama", 64, 256, 65)
MANIFEST = Manifest(
    3, {"embed": BlockEntry("d", FileEntry("embed.safetensors", 9, "0" * 64), None)}, {"a": 1}
)


def read_job(data: bytes) -> None:
    job = JobSpec.from_json(data)
    if job.prepared is not None:
        _ = job.description, job.dataset, job.digest()


PARSERS: dict[str, tuple[Callable[[bytes], Any], bytes, type[Exception]]] = {
    "job": (read_job, JOB.to_json(), JobError),
    "model": (ModelDescription.from_json, DESCRIPTION.to_json().encode(), JobError),
    **{
        family: (
            ModelDescription.from_json,
            describe(family, SMALL[family], "x").to_json().encode(),
            JobError,
        )
        for family in ("qwen3_moe", "smollm3", "gemma3_text")
    },
    "dataset": (DatasetMeta.from_json, META.to_json().encode(), JobError),
    "profile": (Profile.from_json, PROFILE.to_json(), ProfileError),
    "manifest": (Manifest.from_json, MANIFEST.to_json(), CheckpointError),
}
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e308, float("nan"), "", "x" * 300, "\ud800", [], [[]], {}, {"a": {}}, ["a"] * 9,
)  # fmt: skip


def spoiled(value: Any, rng: random.Random) -> Any:
    """The JSON value with something strange somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: spoiled(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], spoiled(value[index], rng), *value[index + 1 :]]
    return rng.choice(STRANGE)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_bytes_from_outside(name: str) -> None:
    parse, valid, error = PARSERS[name]
    parse(valid)
    rng = random.Random(name)
    for round_number in range(10_000):
        if round_number % 3 == 0:
            data = rng.randbytes(rng.randrange(80))
        elif round_number % 3 == 1:
            data = json.dumps(spoiled(json.loads(valid), rng)).encode()
        else:
            cut = bytearray(valid)
            for _ in range(rng.randint(1, 3)):
                cut[rng.randrange(len(cut))] = rng.randrange(256)
            data = bytes(cut[: rng.randrange(len(cut)) if rng.random() < 0.3 else len(cut)])
        try:
            parse(data)
        except error:
            continue
