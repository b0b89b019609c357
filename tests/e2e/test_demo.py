"""`starlings demo`: one command, a whole swarm of real processes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swarms import starlings


def start_demo(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "starlings", "demo", "--steps", "500", "--dir", "run", "--workers", "2"],
        cwd=folder,
        stdout=(folder / "out.txt").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # Whoever started the tests in the background made them deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(condition: Callable[[], object], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process's children and theirs, by parentage and by the directory that they work in."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.slow),
    ],
)
def test_nothing_survives_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    demo = start_demo(tmp_path)
    try:
        me = psutil.Process(demo.pid)
        # Coordinator with two children, two supervisors with an engine each.
        wait_until(lambda: len(family(me)) >= 7, 120, (tmp_path / "out.txt").read_text())
        children = family(me)
        os.kill(demo.pid, number)
        demo.wait(40)
        gone, alive = psutil.wait_procs(children, timeout=40)
        assert alive == [], [p.cmdline() for p in alive]
        assert len(gone) == len(children)
    finally:
        if demo.poll() is None:
            demo.kill()
    if number == signal.SIGINT:
        assert demo.returncode == 130
        assert "Traceback" not in (tmp_path / "out.txt").read_text()


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    try:
        me = psutil.Process(demo.pid)
        wait_until(lambda: len(family(me)) >= 7, 120, "the swarm did not come up")
        supervisors = [p for p in family(me) if "join" in p.cmdline()]
        supervisors[0].kill()
        assert demo.wait(60) != 0
    finally:
        if demo.poll() is None:
            demo.kill()
    text = (tmp_path / "out.txt").read_text()
    assert "was ended by signal 9" in text
    assert "worker" in text
    assert "Traceback" not in text


def test_one_worker_is_killed_on_the_way_and_nothing_is_lost(tmp_path: Path) -> None:
    done = starlings(
        "demo", "--steps", "6", "--kill-one-at", "2", "--json", "outcome.json", cwd=tmp_path, within_s=240
    )
    assert done.code == 0, done.out + done.err
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    killed = outcome["killed"]
    assert killed["step"] >= 2
    assert killed["worker_id"] not in {worker["id"] for worker in outcome["workers"]}
    assert 0 < killed["noticed_after_s"] < 10
    assert killed["worker_id"] in killed["said"]
    assert [point["step"] for point in outcome["loss_curve"]] == list(range(6))
    assert outcome["samples_leased"] == outcome["samples_trained"] == 6 * 16
    assert outcome["samples_lost"] == 0
    # The others went on: nobody was planned anew, and nobody loaded again.
    kinds = [event["kind"] for event in outcome["events"]]
    assert "rewind" not in kinds
    assert kinds.count("training") == 1
    assert "got SIGKILL in step" in done.out


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    done = starlings("demo", "--dir", precious, cwd=tmp_path)
    assert done.code == 2
    assert "--dir" in done.err
    assert (precious / "thesis.txt").read_text() == "years of work"
