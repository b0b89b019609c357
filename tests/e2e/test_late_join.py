"""A worker joins a job that trains: nobody stops for it, and afterwards it is a replica like the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swarms import LiveSwarm, job_text, prepared_job, starlings


@pytest.mark.slow
@pytest.mark.parametrize(
    "codecs", [("int8:128", "int8:128"), ("fp8", "topk:64/4096|int2"), ("int8:128", "lowrank:4")]
)
def test_a_fourth_worker_joins_three_that_train(tmp_path: Path, codecs: tuple[str, str]) -> None:
    """Also with a sparse codec, of which each aggregate comes back as a union that grows with the group, and
    with factors, which are summed up in two passes.
    """
    pipeline, exchange = codecs
    sections = {
        "swarm": {"min_workers": 3, "settle_s": 0.5},
        "pipeline": {"codec": pipeline},
        "exchange": {"codec": exchange},
        "train": {"batch": 16, "microbatch": 2},
    }
    join_late(tmp_path, sections, workers=3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_a_third_worker_joins_two_whatever_the_optimizer_keeps(tmp_path: Path, optimizer: str) -> None:
    """Momentum of some parameters and two moments of others; codes with their scales."""
    sections = {
        "swarm": {"min_workers": 2, "settle_s": 0.5},
        "exchange": {"codec": "int8:128"},
        "train": {"batch": 16, "microbatch": 2, "optimizer": optimizer},
    }
    join_late(tmp_path, sections, workers=2)


def join_late(tmp_path: Path, sections: Mapping[str, Mapping[str, Any]], *, workers: int) -> None:
    """One more than `workers` joins them while they train; at the end all replicas have the same bits."""
    job = prepared_job(tmp_path, job_text(10**8, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(workers):
            swarm.join()
        before = swarm.wait(lambda r: r.phase == "training" and r.step >= 5, 120)
        assert len(before.workers) == workers
        swarm.join()
        joined = swarm.wait(
            lambda r: [w.state for w in r.workers] == ["training"] * (workers + 1) or r.phase != "training",
            90,
        )
        assert joined.phase == "training"
        swarm.wait(lambda r: r.step >= joined.step + 10, 60)
        assert starlings("stop", "--job", job, cwd=tmp_path).code == 0
        done = swarm.finish(120)
    events = swarm.history.events
    kinds = [event.kind for event in events]
    assert kinds.count("joined") == 1
    assert not {"step_restarted", "lost", "rewind", "catch_up_failed", "gathering"} & set(kinds), events
    # Replicas whose digests differ are averaged at the end, and that is announced.
    assert "average" not in kinds
    assert [point.step for point in swarm.history.points] == list(range(done.step))
    assert (done.samples_trained, done.samples_lost) == (done.step * 16, 0)
    assert all(w.tokens > 0 for w in done.workers if w.span.first_stage == 0)
