"""The disk is really full, for checkpoints or for the log: what is said, what goes on, and what is there afterwards."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from starlings.directories import control_address
from starlings.failures import CommandError
from starlings_job.checkpoint import newest_version
from starlings_protos.invite import parse_address
from support.small_disk import resize, small_disk
from swarms import LiveSwarm, job_text, prepared_job

pytestmark = pytest.mark.slow

BATCH = 8


def test_training_goes_on_without_checkpoints_and_saves_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        steps = 300
        job = prepared_job(
            tmp_path, job_text(steps * BATCH * 32, checkpoint={"every": 1, "to": str(disk / "checkpoints")})
        )
        with LiveSwarm.of(job, tmp_path) as swarm:
            swarm.join()
            full = swarm.wait(lambda r: r.checkpoint_trouble, 120)
            assert "disk is full" in full.checkpoint_trouble.lower()
            on = swarm.wait(lambda r: r.step >= full.step + 5, 60)
            assert (on.phase, on.checkpoint_trouble) == ("training", full.checkpoint_trouble)
            assert newest_version(disk / "checkpoints") is None, "nothing half-written looks whole"
            resize(disk, "64m")
            saved = swarm.wait(lambda r: r.checkpoint and not r.checkpoint_trouble, 120)
            assert saved.phase in ("training", "finishing", "done")
            done = swarm.finish(120)
        assert newest_version(disk / "checkpoints") == steps
        assert (done.samples_trained, done.samples_lost) == (steps * BATCH, 0)


def test_a_full_log_is_code_nine_and_the_next_start_goes_on(tmp_path: Path) -> None:
    steps = 60
    with small_disk(tmp_path / "disk", "64m") as disk:
        job = disk / "job"
        shutil.copytree(prepared_job(tmp_path, job_text(steps * BATCH * 32)), job)
        with LiveSwarm.of(job, tmp_path) as swarm:
            swarm.join()
            before = swarm.wait(lambda r: r.phase == "training" and r.step >= 5, 120)
            coordinator = swarm.swarm.coordinator
            assert coordinator is not None
            port = parse_address(control_address(job)).port
            filler = disk / "filler"
            fill(filler)
            assert coordinator.process.wait(60) == 9
            assert "free some space and start again" in coordinator.obituary()
            with pytest.raises(CommandError):
                swarm.swarm.check()
            filler.unlink()
            swarm.start_coordinator(port)
            after = swarm.wait(lambda r: r.phase == "training" and r.step >= 1, 60)
            assert after.step >= before.step, "a committed step is never undone"
            done = swarm.finish(120)
        assert [point.step for point in swarm.history.points] == list(range(steps))
        assert (done.samples_trained, done.samples_lost) == (steps * BATCH, 0)


def fill(path: Path) -> None:
    """Takes all room that is left."""
    full = False
    with path.open("wb", buffering=0) as file:
        while not full:
            try:
                file.write(bytes(1 << 16))
            except OSError as error:
                full = error.errno == errno.ENOSPC
                if not full:
                    raise
