"""What an engine makes of a job's codecs: when it asks for a compiler, and that a missing library is named at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from starlings_compression.errors import SpecError
from starlings_job.prepared import load_prepared
from starlings_protos.messages import WorkerId
from starlings_worker.computer import Computer, compiled_for
from starlings_worker.device import Device
from starlings_worker.emulation import Throttle
from starlings_worker.meters import Meters
from support.prepared_job import write_prepared_job

LARGE = 1 << 20


@pytest.mark.parametrize(
    ("exchange", "pipeline", "elements", "wanted"),
    [
        ("exact", "int8:128", LARGE - 1, None),
        ("exact", "int8:64", LARGE, "int8:64"),
        ("exact", "bf16", LARGE, "int8:128"),
        ("lowrank:4", "exact", LARGE, "int8:128"),
        ("int8:256", "int8:128", 0, "int8:256"),
        ("int8:256", "int8:128", LARGE, "int8:256"),
        ("topk:64/4096|int8:128", "fp16", 0, None),
    ],
)
def test_what_is_compiled(exchange: str, pipeline: str, elements: int, wanted: str | None) -> None:
    assert compiled_for(exchange, pipeline, elements) == wanted


@pytest.mark.parametrize("section", ["pipeline", "exchange"])
def test_a_library_that_is_missing_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: str
) -> None:
    job = load_prepared(
        write_prepared_job(tmp_path / "job", extra=f'[{section}]\ncodec = "int8:128|zstd:3"\n')
    )

    def computer() -> Computer:
        return Computer(WorkerId("wa"), job, Device(torch.device("cpu"), False), Throttle(1.0), Meters())

    assert computer().held is None
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SpecError, match="zstd needs the Python package zstandard on every machine"):
        computer()
