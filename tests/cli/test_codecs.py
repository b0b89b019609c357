"""`starlings codecs` measures every codec there is, and says what it needs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from starlings import children
from starlings.failures import CommandError, explain
from starlings.main import app
from starlings_compression.families import FAMILIES


def test_every_codec_is_measured() -> None:
    done = CliRunner().invoke(app, ["codecs", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["codec"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(FAMILIES) == {part.split(":")[0] for name in rows for part in name.split("|")}
    for name, row in rows.items():
        assert row["encode_gb_per_s"] > 0, name
        for kind in ("normal", "heavy", "gradient"):
            # Of one encoding: a part of the tensor at most, but for signs of unlike values.
            assert 0 <= row[f"error_{kind}"] <= 1.1, name
    assert rows["exact"]["error_gradient"] == 0
    assert rows["int8:128"]["bits_per_value"] == pytest.approx(8.125, abs=0.01)
    assert rows["int8:128"]["error_normal"] < 0.01 < rows["int4:64"]["error_normal"]


def test_a_machine_without_torch_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence, code = explain(ModuleNotFoundError("No module named 'torch'", name="torch"))

    def refuse(*_: object, **__: object) -> None:
        raise CommandError(sentence, code)

    monkeypatch.setattr(children, "run_heavy", refuse)
    done = CliRunner().invoke(app, ["codecs", "--json"])
    assert done.exit_code == 2
    assert "starlings[worker]" in json.loads(done.stdout.splitlines()[-1])["error"]
