"""The committed corpus of the fuzz target, and a time-boxed run of the target itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codec_cases import EVERY, check

FUZZ = Path(__file__).parents[1] / "fuzz"
CORPUS = sorted((FUZZ / "corpus").iterdir())
# As long as a person waits; new paths come in the first seconds, then ever more rarely.
RUN_S = 45


def test_every_file_of_the_corpus_is_accepted_or_refused_as_its_name_says() -> None:
    assert len(CORPUS) > 2 * len(EVERY)
    wrong = [path.name for path in CORPUS if check(path.read_bytes()) != path.name.startswith("good")]
    assert not wrong
    assert sum(path.name.startswith("bad") for path in CORPUS) >= 10


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="needs atheris, which is for Linux only"
)
def test_a_coverage_guided_run_finds_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable, str(FUZZ / "packed_target.py"), str(tmp_path), str(FUZZ / "corpus"),
        f"-max_total_time={RUN_S}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048",
        f"-artifact_prefix={tmp_path}/",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S + 120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    print(done.stderr[-3000:])
    assert done.returncode == 0
    assert "Done " in done.stderr
