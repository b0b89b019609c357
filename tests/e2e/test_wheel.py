"""The wheel, installed into a clean environment outside the repository, is a working `starlings`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from support.demo_outcome import check_outcome

ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str], cwd: Path, timeout_s: float = 60) -> str:
    """Runs outside the repository, without its paths; returns stdout."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "STARLINGS"))
    }
    environment["XDG_DATA_HOME"] = str(cwd / "data")
    done = subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)], out)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel. Its dependencies are the running one's, by a path file: torch is large.

    Path files of an environment reached by a path file are not read, so the editable install does not leak
    in.
    """
    where = tmp_path_factory.mktemp("clean")
    venv.create(where / "venv", with_pip=False, symlinks=True)
    python = where / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = (
        Path(p)
        for p in run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], where
        ).split()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        where,
    )
    return python


def test_the_wheel_holds_all_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    packages = {t for t in tops if not t.endswith(".dist-info")}
    assert packages == {
        "starlings",
        "starlings_coordinator",
        "starlings_worker",
        "starlings_compression",
        "starlings_protos",
        "starlings_job",
        "starlings_simulator",
    }
    for package in packages:
        assert f"{package}/py.typed" in names
    assert "starlings_compression/kernels.c" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_help_and_init_work_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    command = str(installed.parent / "starlings")
    where = run([str(installed), "-c", "import starlings; print(starlings.__file__)"], tmp_path).strip()
    assert str(ROOT) not in where
    assert "starlings demo" in run([command, "--help"], tmp_path)
    assert run([command, "--version"], tmp_path).startswith("starlings ")
    run([command, "init"], tmp_path)
    assert (tmp_path / "job.toml").is_file()


@pytest.mark.slow
def test_a_short_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    command = str(installed.parent / "starlings")
    out = run(
        [command, "demo", "--steps", "6", "--seed", "3", "--json", "outcome.json"], tmp_path, timeout_s=400
    )
    assert "validation loss" in out
    assert "from_pretrained" in out
    check_outcome(json.loads((tmp_path / "outcome.json").read_text()))
