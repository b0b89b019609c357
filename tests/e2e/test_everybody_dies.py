"""Everybody is killed at the same moment, as by a power cut: the coordinator's directory is enough to go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from starlings.demo.kill import kill_at_once
from starlings.views.status import History
from starlings_job.checkpoint import newest_version
from starlings_job.prepared import checkpoint_url, load_prepared
from starlings_protos import control_pb2
from swarms import LiveSwarm, job_text, prepared_job

pytestmark = pytest.mark.slow

STEPS, BATCH, WORKERS = 40, 8, 2


@dataclass(frozen=True)
class Told:
    """Before the power cut, and after it until the end."""

    before: control_pb2.StatusReply
    # The newest complete checkpoint on disk; None without any.
    newest: int | None
    done: control_pb2.StatusReply
    # Of the second coordinator only.
    events: list[control_pb2.Event]
    points: dict[int, float]


def power_cut(folder: Path, *, every: int, cut_at: int, lose_log: bool = False, **sections: Any) -> Told:
    """A job whose processes all die once step `cut_at` is committed (and a checkpoint is there, if there are any)."""
    text = job_text(
        STEPS * BATCH * 32,
        swarm={"min_workers": WORKERS, "settle_s": 0.5},
        checkpoint={"every": every},
        **sections,
    )
    job = prepared_job(folder, text)
    with LiveSwarm.of(job, folder) as swarm:
        for _ in range(WORKERS):
            swarm.join()
        before = swarm.wait(lambda r: r.step >= cut_at and (r.checkpoint or not every), 120)
        for worker in swarm.swarm.workers:
            worker.expendable = True
            kill_at_once(worker.process)
        swarm.kill_coordinator()
        for worker in swarm.swarm.workers:
            worker.process.wait(10)
        newest = newest_version(checkpoint_url(job, load_prepared(job)))
        if lose_log:
            lost = [path for path in job.glob("core.sqlite*") if not path.unlink()]
            assert lost, "there was a log to lose"
        swarm.history = History()
        swarm.start_coordinator()
        for worker in swarm.swarm.workers:
            swarm.swarm.start_again(worker)
        done = swarm.finish(180)
        seen = swarm.history
    return Told(before, newest, done, seen.events, {point.step: point.loss for point in seen.points})


def check_end(told: Told) -> None:
    assert (told.done.phase, told.done.step) == ("done", STEPS)
    assert told.done.samples_lost == 0
    assert told.done.samples_trained == STEPS * BATCH


def rewound_to(told: Told) -> list[str]:
    return [event.text for event in told.events if event.kind == "rewind"]


def test_training_goes_on_from_the_newest_manifest(tmp_path: Path) -> None:
    told = power_cut(tmp_path, every=5, cut_at=18)
    check_end(told)
    assert told.newest is not None
    assert 0 < told.newest <= told.before.step + 1
    (text,) = rewound_to(told)
    assert f"from version {told.newest}:" in text
    assert list(told.points) == list(range(STEPS))


def test_checkpoints_without_the_log_are_enough(tmp_path: Path) -> None:
    told = power_cut(tmp_path, every=5, cut_at=18, lose_log=True)
    check_end(told)
    assert told.newest is not None
    assert told.newest > 0
    assert f"training from step {told.newest}" in [e.text for e in told.events if e.kind == "training"]
    assert list(told.points) == list(range(told.newest, STEPS)), "the curve before it went with the log"


def test_without_any_checkpoint_it_begins_again_and_says_so(tmp_path: Path) -> None:
    told = power_cut(tmp_path, every=0, cut_at=10)
    check_end(told)
    assert told.newest is None
    (text,) = rewound_to(told)
    assert "from version 0:" in text
    assert list(told.points) == list(range(STEPS))
