"""A job directory that was copied while in use: refused while the first coordinator answers, else said and gone on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from starlings_coordinator.last_used import FILE, CopyInUse, note_use, read_use
from support.coordinator_harness import childless
from support.prepared_job import write_prepared_job


async def test_a_copy_is_refused_while_the_first_runs_and_goes_on_after_it_was_lost(tmp_path: Path) -> None:
    first, copy = write_prepared_job(tmp_path / "first"), tmp_path / "copy"
    async with childless(first):
        shutil.copytree(first, copy)
        record = json.loads((copy / FILE).read_text())
        (copy / FILE).write_text(json.dumps(record | {"host": "elsewhere"}))
        with pytest.raises(
            CopyInUse, match=r"in use by elsewhere since 20.*answers at 127\.0\.0\.1"
        ) as refused:
            async with childless(copy):
                pass
        assert refused.value.exit_code == 11
        assert (copy / FILE).exists(), "and again: the refusal changed nothing"
    assert not (first / FILE).exists(), "an orderly end leaves nothing to ask"
    async with childless(copy) as running:
        (said,) = [a["text"] for a in running.of("announce") if a["kind"] == "moved"]
        assert "last used by elsewhere" in said
        assert "taken to have ended" in said


async def test_a_coordinator_that_was_killed_here_asks_nobody(tmp_path: Path) -> None:
    directory = write_prepared_job(tmp_path / "job")
    note_use(directory, ("127.0.0.1:1",))
    async with childless(directory) as running:
        assert not [a for a in running.of("announce") if a["kind"] == "moved"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"host": "x", "control": 3}', "\x00"])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_use(tmp_path) is None
