"""Machines whose wall clocks are wrong: near enough, they train and are told; too far, they are told to set the clock.

Only our own packages read the shifted clock. The native parts of gRPC and TLS go by the system's, and gRPC mixes the
two: it adds a call's timeout to Python's `time.time` and compares the sum with its own clock.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swarms import LiveSwarm, job_text, prepared_job, starlings

pytestmark = pytest.mark.slow

MINUTE, DAY = 60, 86400
STEPS, BATCH = 20, 8


def shifted(folder: Path, by_s: float) -> dict[str, str]:
    """An environment in which our processes, children included, read a clock that is `by_s` ahead."""
    where = folder / f"clock{by_s:+.0f}"
    where.mkdir()
    (where / "sitecustomize.py").write_text(
        "import sys, time\n"
        "right = time.time\n"
        "def shifted():\n"
        "    ours = sys._getframe(1).f_globals.get('__name__', '').startswith('starlings')\n"
        f"    return right() + {by_s} * ours\n"
        "time.time = shifted\n"
    )
    others = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(where), others)))}


def test_ten_minutes_off_both_ways_they_train_and_are_told(tmp_path: Path) -> None:
    job = prepared_job(
        tmp_path,
        job_text(STEPS * BATCH * 32, swarm={"min_workers": 3, "settle_s": 0.5}, checkpoint={"every": 5}),
    )
    with LiveSwarm.of(job, tmp_path) as swarm:
        ahead, behind, right = (
            swarm.join("--json", environment=environment)
            for environment in (
                shifted(tmp_path, 10 * MINUTE),
                shifted(tmp_path, -10 * MINUTE),
                {},
            )
        )
        swarm.wait(lambda r: r.phase == "training" and len(r.workers) == 3, 120)
        done = swarm.finish(120)
    assert (done.samples_trained, done.samples_lost) == (STEPS * BATCH, 0)
    kinds = {event.kind for event in swarm.history.events}
    assert not {"lost", "rewind", "engine_down", "rejoin"} & kinds, kinds
    told = [
        [
            record["text"]
            for line in child.log.read_text().splitlines()
            if line.startswith("{")
            if (record := json.loads(line))["event"] == "notice"
        ]
        for child in (ahead, behind, right)
    ]
    assert ["10 min ahead of" in text for text in told[0]] == [True]
    assert ["10 min behind" in text for text in told[1]] == [True]
    assert told[2] == []


def test_a_month_off_it_is_told_to_set_the_clock(tmp_path: Path) -> None:
    job = prepared_job(tmp_path, job_text(10**8))
    with LiveSwarm.of(job, tmp_path):
        made = starlings("invite", "create", "--job", job, "--lifetime", "90d", cwd=tmp_path)
        (invite,) = (word for word in made.out.split() if word.startswith("starlings://"))
        for by_s, says in ((30 * DAY, "30 days ahead of"), (-30 * DAY, "days behind")):
            refused = starlings(
                "join",
                "--dir",
                tmp_path / f"w{by_s}",
                cwd=tmp_path,
                environment={"STARLINGS_INVITE": invite, **shifted(tmp_path, by_s)},
            )
            assert refused.code == 15, refused
            sentence = " ".join(refused.err.split())
            assert says in sentence
            assert "set the clock" in sentence.lower()
            assert "Traceback" not in refused.err
