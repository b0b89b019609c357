"""The small jobs that scripted swarms train."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from starlings_job.prepare import prepare

# Job text; `model` is a preset or a family's smallest configuration.
JOB = """
[job]
name = "scripted"
seed = 7
tokens = "100k"
[model]
{model}
[data]
source = "text.txt"
sequence_length = 32
held_out = 16
[train]
batch = 8
microbatch = 2
optimizer = "{optimizer}"
momentum = {momentum}
lr = {lr}
warmup = 2
{more_train}
[pipeline]
codec = "{pipeline}"
[exchange]
codec = "{exchange}"
{more_exchange}
"""


def write_text(path: Path) -> None:
    """Some 150 KB that a small model can learn something of."""
    rng = random.Random(1)
    words = ["bird", "flock", "turns", "follows", "its", "seven", "nearest", "and", "the", "never", "leads"]
    lines = [" ".join(rng.choices(words, k=rng.randint(4, 12))) + "." for _ in range(3500)]
    path.write_text("\n".join(lines))


def prepare_job(directory: Path, **changes: Any) -> Path:
    """A prepared small job; changes: model, optimizer, momentum, lr, pipeline, exchange; and
    more_train, more_exchange: further lines of those sections.
    """
    values = {
        "model": 'preset = "micro"',
        "optimizer": "adamw",
        "momentum": 0.0,
        "lr": 1e-3,
        "pipeline": "exact",
        "exchange": "exact",
        "more_train": "",
        "more_exchange": "",
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "text.txt")
    path = directory / "job.toml"
    path.write_text(JOB.format(**{**values, **changes}))
    prepare(path, directory / "job")
    return directory / "job"
