"""`starlings simulate` from files to words, picture and JSON, through the process that does the work."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from starlings import children
from starlings.main import app
from starlings.views import simulated as view
from support.fleets import decoder

JOB = """
[job]
name = "played"
tokens = "1B"
[model]
preset = "tiny"
[train]
schedule = "async"
batch = 64
microbatch = 2
inner_batch = 8
"""
FLEET = """
[fleet]
name = "three homes"
[[workers]]
name = "steady"
count = 2
memory = "8GiB"
forward_seconds = { embed = 0.01, layer = 0.05, head = 0.05 }
region = "eu-west-1"
access = "fibre"
[[workers]]
name = "restless"
memory = "8GiB"
forward_seconds = { embed = 0.01, layer = 0.02, head = 0.02 }
region = "us-east-1"
access = "cable"
lifetime_hours = 0.05
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A job that nobody prepared and a fleet; the profile is made up, all other steps are real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    job, fleet = tmp_path / "job.toml", tmp_path / "fleet.toml"
    job.write_text(JOB)
    fleet.write_text(FLEET)
    run_heavy = children.run_heavy

    def run(step: str, arguments: dict[str, Any], **more: Any) -> Any:
        if step != "profile":
            return run_heavy(step, arguments, **more)
        Path(arguments["out"]).write_bytes(decoder(4, megabytes=0.2).to_json())
        return {"out": arguments["out"]}

    monkeypatch.setattr(children, "run_heavy", run)
    return job, fleet


def test_a_fleet_is_played_with_workers_that_come_and_go(files: tuple[Path, Path], tmp_path: Path) -> None:
    job, fleet = files
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([[0, 1, "a"], [0, 1, "b"], [40, 1, "c"], [100, -1, "b"], [160, -1, "zz"]]))
    picture = tmp_path / "day.svg"
    arguments = ["simulate", str(job), "--fleet", str(fleet), "--hours", "0.05", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--churn", str(trace), "--svg", str(picture)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["event"] == "simulated"
    assert answer["virtual_s"] == pytest.approx(180.0)
    assert answer["tokens"] > 0
    assert sum(answer["seconds"].values()) == pytest.approx(180.0 * answer["workers_on_average"])
    there = {worker["worker"]: worker["present_s"] for worker in answer["workers"]}
    assert there["steady-1"] == pytest.approx(180.0)
    # Node "b" is away from 100 s to 160 s, when the trace begins again.
    assert there["steady-2"] == pytest.approx(120.0)
    ET.fromstring(picture.read_text())
    said = Console(width=160, file=io.StringIO())
    said.print(view.render(answer))
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert "three homes" in text
    assert "forward and backward passes" in text


def test_flows_can_be_asked_for_and_say_the_same(files: tuple[Path, Path]) -> None:
    job, fleet = files
    answers = {}
    for mode in ("--flow", "--exact"):
        arguments = ["simulate", str(job), "--fleet", str(fleet), "--hours", "0.05", "--churn", "none"]
        done = CliRunner().invoke(app, [*arguments, mode, "--json"])
        assert done.exit_code == 0, done.output
        answers[mode] = json.loads(done.stdout.splitlines()[-1])
    flow, exact = answers["--flow"], answers["--exact"]
    assert (flow["mode"], exact["mode"]) == ("flow", "exact")
    assert flow["tokens_per_s_training"] == pytest.approx(exact["tokens_per_s_training"], rel=0.05)
    assert set(flow) == set(exact)


def test_what_is_wrong_is_said_with_the_fix(files: tuple[Path, Path]) -> None:
    job, fleet = files
    done = CliRunner().invoke(app, ["simulate", str(job), "--fleet", str(fleet), "--churn", "nowhere.json"])
    assert done.exit_code == 2
    assert "lifetimes" in done.output + (done.stderr or "")


def test_a_preset_that_is_not_modelled_is_named_before_anything_is_played(files: tuple[Path, Path]) -> None:
    job, fleet = files
    job.write_text(JOB + '[exchange]\npreset = "diloco"\n')
    done = CliRunner().invoke(app, ["simulate", str(job), "--fleet", str(fleet), "--hours", "0.01"])
    assert done.exit_code == 2
    assert "not modelled" in done.output + (done.stderr or "")
