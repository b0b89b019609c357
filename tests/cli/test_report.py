"""What the demo writes down, from recorded replies."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from starlings.demo.report import final_panel, machine_report
from starlings.demo.run import DemoOptions, job_text, save_picture
from starlings.views.status import History
from starlings_job.spec import parse_job
from starlings_protos import control_pb2

# What users of `--json` may rely on.
FIELDS = {
    "validation_loss",
    "unigram_entropy",
    "bigram_entropy",
    "loss_curve",
    "workers",
    "plan",
    "bytes_sent",
    "events",
    "samples_leased",
    "samples_trained",
    "samples_lost",
    "tokens_per_second",
    "export_path",
}


def test_the_report_has_every_field_and_is_plain_data(
    recorded: Callable[[str], control_pb2.StatusReply], tmp_path: Path
) -> None:
    history = History()
    history.add(recorded("training"))
    report = machine_report(
        history, {"unigram": 3.4, "bigram": 2.4}, tmp_path / "model", seed=7, elapsed_s=100.0
    )
    again = json.loads(json.dumps(report))
    assert set(again) >= FIELDS
    assert [w["class"] for w in again["workers"]] == ["rtx4090", "rtx3060", "laptop", "laptop"]
    assert all({"class", "span", "gossip_peers", "tokens"} <= set(w) for w in again["workers"])
    assert again["bytes_sent"]["forward"] == 4 * 1_200_000
    assert len(again["loss_curve"]) == 24
    # From the first committed step to the last, so that starting up does not count.
    points = again["loss_curve"]
    expected = (points[-1]["tokens"] - points[0]["tokens"]) / (points[-1]["at_s"] - points[0]["at_s"])
    assert again["tokens_per_second"] == expected

    panel = final_panel({**report, "validation_loss": 2.0, "sample_text": "def f"}, history, "model = ...")
    screen = Console(width=110, file=io.StringIO(), record=True)
    screen.print(panel)
    text = screen.export_text()
    for expected_text in ("2.000", "2.400", "3.400", "below the bigram", "def f", "model = ..."):
        assert expected_text in text
    save_picture(tmp_path / "run.svg", history, panel)
    assert (tmp_path / "run.svg").read_text("utf-8").startswith("<svg")


def test_the_demos_job_file_is_a_valid_job(tmp_path: Path) -> None:
    job = parse_job(job_text(DemoOptions(4, 30, 5, tmp_path, None, False)))
    assert job.steps_total == 30
    assert job.job.seed == 5
    assert job.swarm.min_workers == 4
    assert (job.network.ports.control, job.network.ports.enrolment) == (0, 0)
