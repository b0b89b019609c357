"""docs/reference.md tells the truth about commands, keys and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from starlings import template
from starlings.failures import INTERRUPTED, READER_GONE
from starlings.main import app
from starlings_job.families import FAMILIES
from starlings_job.spec import JobSpec
from starlings_protos.errors import ExitCode

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def table() -> str:
    """The table of keys, as it must stand at the end of the page."""
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for path, default in template.fields(JobSpec):
        shown = "" if default is None else f"`{template.toml_value(default)}`"
        meaning = template.COMMENTS[path].replace("|", "\\|")
        section, _, key = path.rpartition(".")
        lines.append(f"| `[{section}] {key}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_keys_is_current() -> None:
    assert REFERENCE.read_text("utf-8").endswith(table())


def test_every_command_is_listed() -> None:
    text = REFERENCE.read_text("utf-8")
    command = get_command(app)
    for name in command.commands:  # type: ignore[attr-defined]
        assert f"`starlings {name}" in text, name


def test_every_family_of_models_is_listed() -> None:
    text = REFERENCE.read_text("utf-8")
    models = text[text.index("## Models") : text.index("## job.toml")]
    rows = [line.split("|")[1] for line in models.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(FAMILIES)


def test_every_exit_code_is_listed() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE.read_text("utf-8"), re.MULTILINE)}
    assert listed == {*map(int, ExitCode), INTERRUPTED, READER_GONE}
