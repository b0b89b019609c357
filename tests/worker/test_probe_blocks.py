"""The probe measures every kind of block of a job, of language models and of classifiers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from starlings_job.prepare import prepare
from starlings_job.prepared import load_prepared
from starlings_worker.device import open_device
from starlings_worker.emulation import Throttle
from starlings_worker.probe import memory_for_job, probe
from support.scripted_job import write_text

torch.set_num_threads(1)
TEXT = '[data]\nsource = "text.txt"\nsequence_length = 32\nheld_out = 8\n'


@pytest.mark.parametrize(
    ("preset", "data", "kinds"),
    [
        ("micro", TEXT, {"embed", "layer", "head"}),
        ("shapes", "", {"layers.0", "layers.1", "layers.2", "layers.3", "layers.4"}),
    ],
)
def test_every_kind_of_block_is_measured(tmp_path: Path, preset: str, data: str, kinds: set[str]):
    write_text(tmp_path / "text.txt")
    (tmp_path / "job.toml").write_text(
        f'[job]\nname = "p"\ntokens = 1000\n[model]\npreset = "{preset}"\n{data}'
    )
    prepare(tmp_path / "job.toml", tmp_path / "job")
    job = load_prepared(tmp_path / "job")
    device = open_device("cpu", "fp32")
    measured = probe(job, device, Throttle(0.0))
    assert set(measured.forward_seconds) == set(measured.backward_seconds) == kinds
    assert all(0 < s < 10 for s in (*measured.forward_seconds.values(), *measured.backward_seconds.values()))
    slow = probe(job, device, Throttle(0.1))
    heaviest = max(measured.forward_seconds, key=measured.forward_seconds.__getitem__)
    assert slow.forward_seconds[heaviest] > 2 * measured.forward_seconds[heaviest]


def test_a_cap_is_what_the_job_may_use():
    device = open_device("cpu", "fp32")
    assert memory_for_job(device, 5 << 20) == 5 << 20
    assert memory_for_job(device, 0) > 1 << 20
