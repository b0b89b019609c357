"""The library by itself: no other package of ours, no compiler, no zstandard, as on a volunteer's machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import starlings_compression
from codec_cases import EVERY, normal
from starlings_compression.codec import make_codec

SCRIPT = """
import importlib, importlib.abc, pkgutil, sys

class Nobody(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top == "zstandard" or top.startswith("starlings") and top != "starlings_compression":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nobody())
import starlings_compression
for module in pkgutil.walk_packages(starlings_compression.__path__, "starlings_compression."):
    importlib.import_module(module.name)

import torch
from starlings_compression.codec import make_codec
from starlings_compression.compiled import any_kernels, prepare
from starlings_compression.errors import SpecError

print(prepare("int8:128"), any_kernels())
for spec in sys.argv[1:]:
    try:
        codec = make_codec(spec)
    except SpecError as error:
        print(f"refused {spec}: {error}")
        continue
    data = codec.encode(torch.randn(90, 70, generator=torch.Generator().manual_seed(0)))
    assert codec.decode(data, limit_bytes=4 * 6300).shape == (90, 70)
    print(spec, data.hex())
"""


def test_every_codec_works_where_there_is_nothing_but_torch(tmp_path: Path) -> None:
    source = Path(starlings_compression.__file__).parents[1]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("CC", "CXX")},
        "PATH": str(tmp_path),
        "PYTHONPATH": str(source),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *EVERY], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "there is no C compiler here None"
    refused = [line for line in lines if line.startswith("refused ")]
    assert len(refused) == sum("zstd" in spec for spec in EVERY) > 0
    assert all("zstd needs the Python package zstandard" in line for line in refused)
    made = dict(line.split(" ", 1) for line in lines if line not in refused)
    assert set(made) == {spec for spec in EVERY if "zstd" not in spec}
    for spec, data in made.items():
        assert data == make_codec(spec).encode(normal(90, 70)).hex(), spec
