"""`starlings plan` from files to words, picture and JSON, through the processes that do the work."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from starlings import children, profiles
from starlings.main import app
from starlings.views import plan as view
from starlings.views.plan_picture import draw
from support.fleets import decoder

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "fleet.toml"
JOB = '[job]\nname = "planned"\ntokens = "1M"\n[model]\npreset = "micro"\n[train]\nschedule = "async"\nbatch = 8\n'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file that nobody prepared, on a machine with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def ask(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def measured_already(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Torch takes long to load: the profile is made up here, all other steps are real. Returns the steps asked for."""
    steps = []
    run_heavy = children.run_heavy

    def run(step: str, arguments: dict[str, Any], **more: Any) -> Any:
        steps.append(step)
        if step != "profile":
            return run_heavy(step, arguments, **more)
        Path(arguments["out"]).write_bytes(decoder(4, megabytes=0.2).to_json())
        return {"out": arguments["out"]}

    monkeypatch.setattr(children, "run_heavy", run)
    return steps


@pytest.mark.slow
def test_a_model_that_nobody_measured_is_planned_for(job: Path) -> None:
    answer = ask("plan", str(job), "--fleet", str(EXAMPLE))
    assert 100_000 < answer["parameters"] < 1_000_000
    assert answer["stages"][0]["first_block"] == "embed"


def test_the_shipped_fleet_is_planned_for_with_words_picture_and_json(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = measured_already(monkeypatch)
    picture = tmp_path / "plan.svg"
    answer = ask("plan", str(job), "--fleet", str(EXAMPLE), "--compare", "--marginal", "--svg", str(picture))
    assert answer["event"] == "plan"
    assert answer["workers"] == len(answer["placement"]) == 18
    # Four small layers: everybody holds all of it.
    assert {row["role"] for row in answer["placement"]} == {"whole model"}
    assert answer["layouts"][0]["layout"] == "ours"
    assert answer["tokens"] == 1_000_000
    drawn = ET.fromstring(picture.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 18
    assert answer["marginal"]["add"][0]["gain"] > 0
    advice = ask("advise", str(job), "--fleet", str(EXAMPLE))
    assert advice["event"] == "advice"
    assert advice["replicas"] == 18 * len(answer["stages"])
    assert steps == ["profile", "plan", "advise"]
    said = Console(width=160, file=io.StringIO())
    said.print(view.render(answer))
    for words in (
        "tokens/s predicted: 1 M tokens",
        "What binds:",
        "home-1 to home-6",
        "EUR per hour",
        "One more worker",
    ):
        assert words in said.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["job.toml", "--fleet", "none.toml"], "none.toml is no file"),
        (["nowhere.toml", "--fleet", str(EXAMPLE)], "is no job file"),
        (["job.toml", "--fleet", str(EXAMPLE), "--tokens", "many"], "--tokens many: must be a number"),
    ],
)
def test_wrong_arguments_say_the_fix(
    job: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(job.parent)
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 2
    assert said in json.loads(done.stdout.splitlines()[-1])["error"]


def test_a_fleet_file_with_a_slip_is_refused_before_anything_is_measured(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "run_heavy", lambda *_, **__: pytest.fail("asked"))
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[[workers]]\nclas = "rtx3090"\n')
    done = CliRunner().invoke(app, ["plan", str(job), "--fleet", str(fleet), "--json"])
    assert done.exit_code == 2
    assert "did you mean 'class'" in json.loads(done.stdout.splitlines()[-1])["error"]


def test_another_model_is_measured_anew(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(children, "run_heavy", lambda step, arguments, **_: asked.append(arguments["out"]))
    profiles.profile_file(job, lambda news: None)
    job.write_text(JOB + "[data]\nsequence_length = 32\n")
    profiles.profile_file(job, lambda news: None)
    assert len(set(asked)) == 2


def test_names_in_a_picture_are_escaped() -> None:
    row = {"worker": "a<b", "site": "s&t", "role": "idle", "reason": "", "load": 0.0}
    answer = {
        "job": "<j>",
        "fleet": "f",
        "tokens_per_s": 1.0,
        "of_bound": 1.0,
        "binding": "compute",
        "placement": [row],
        "stages": [{}],
    }
    assert ET.fromstring(draw(answer)).tag.endswith("svg")


def test_times_read_well() -> None:
    assert [view.time_words(s) for s in (40, 90, 18_000, 276_480)] == [
        "40 s",
        "1.5 minutes",
        "5 hours",
        "3.2 days",
    ]
