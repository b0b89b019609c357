"""`starlings init`: the file loads, says every key, and its commented defaults are the real ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from starlings import template
from starlings_job.spec import JobSpec, load_job, parse_job


def test_every_key_of_the_specification_has_a_comment_and_no_other() -> None:
    assert {path for path, _ in template.fields(JobSpec)} == set(template.COMMENTS)


def test_the_file_loads(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "job.toml"
    path.write_text(template.render())
    job = load_job(path)
    assert job.job.name == "first-flight"
    assert job.model.preset == "tiny"
    assert job.steps_total > 100


def test_jobs_span_the_internet_unless_they_are_for_a_lan() -> None:
    job = parse_job(template.render())
    assert (job.train.schedule, job.exchange.preset) == ("async", "pairs")
    job = parse_job(template.render(template.CHOSEN_FOR_LAN))
    assert (job.train.schedule, job.exchange.preset) == ("sync", "allreduce")


@pytest.mark.parametrize("chosen", [template.CHOSEN, template.CHOSEN_FOR_LAN], ids=["internet", "lan"])
def test_uncommenting_every_default_changes_nothing(chosen: Mapping[str, Mapping[str, Any]]) -> None:
    text = template.render(chosen)
    lines = []
    for line in text.splitlines():
        match = re.fullmatch(r"# ([a-z0-9_]+) = (.+)", line)
        lines.append(
            line[2:]
            if match
            and match[1] not in ("config", "from", "limit", "skew", "to", "host", "sequence_length", "url")
            else line
        )
    assert parse_job("\n".join(lines)) == parse_job(text)
    assert len(tomllib.loads("\n".join(lines))["train"]) == len(
        JobSpec.model_fields["train"].annotation.model_fields
    )


def test_a_file_without_comments_holds_just_what_was_chosen() -> None:
    text = template.render(
        {"job": {"name": "x", "tokens": 1000}, "model": {"preset": "micro"}}, comments=False
    )
    assert tomllib.loads(text) == {"job": {"name": "x", "tokens": 1000}, "model": {"preset": "micro"}}
