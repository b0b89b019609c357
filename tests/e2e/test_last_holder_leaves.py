"""The only worker that has the model leaves in mid-training: its device is free at once, and nothing is lost."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from swarms import LiveSwarm, job_text, prepared_job, starlings


def _engines(pid: int) -> list[psutil.Process]:
    """Processes below `pid` that hold the device."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "starlings_worker.engine" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_its_device_is_free_within_seconds_and_another_goes_on_from_its_version(tmp_path: Path) -> None:
    job = prepared_job(tmp_path, job_text(10**8))
    with LiveSwarm.of(job, tmp_path) as swarm:
        leaver = swarm.join("--json")
        swarm.wait(lambda r: r.phase == "training" and r.step >= 5, 120)
        (engine,) = _engines(leaver.process.pid)
        began = time.monotonic()
        leaver.process.send_signal(signal.SIGTERM)
        psutil.wait_procs([engine], timeout=30)
        free_s = time.monotonic() - began
        assert not engine.is_running()
        assert free_s < 10
        assert leaver.process.wait(60) == 0
        records = [json.loads(line) for line in leaver.log.read_text().splitlines() if line.startswith("{")]
        (left,) = [r for r in records if r["event"] == "handing_over"]
        assert "was handed over" in records[-1]["text"], records[-3:]
        assert left["version"] >= 5
        where = tmp_path / "swarm" / "workers" / "1"
        assert not list((where / "cache").rglob("*.safetensors")), "what others have needs no copy"
        at = swarm.wait(lambda r: any(e.kind == "checkpoint" for e in swarm.history.events), 30)
        swarm.join()
        after = swarm.wait(lambda r: r.phase == "training" and r.step >= at.step + 3, 120)
        assert starlings("stop", "--job", job, cwd=tmp_path).code == 0
        done = swarm.finish(120)
    assert after.step > at.step
    steps = [point.step for point in swarm.history.points]
    assert steps == sorted(set(steps)) == list(range(done.step)), "no step was trained twice, none is missing"
    kinds = {event.kind for event in swarm.history.events}
    assert not {"lost", "rewind", "engine_down"} & kinds, kinds
    assert (done.samples_trained, done.samples_lost) == (done.step * 8, 0)
