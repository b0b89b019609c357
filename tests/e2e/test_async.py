"""`async` on real processes: a job trains to its tokens without a barrier, and ends as every job does."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarms import LiveSwarm, job_text, prepared_job

STEPS, BATCH, LENGTH = 40, 8, 32
TRAIN = {"schedule": "async", "batch": BATCH, "microbatch": 2, "lr": 3e-3}


def test_one_worker_trains_to_its_tokens(tmp_path: Path) -> None:
    job = prepared_job(
        tmp_path, job_text(STEPS * BATCH * LENGTH, train={**TRAIN, "evaluations": 4}, swarm={"settle_s": 0.1})
    )
    with LiveSwarm.of(job, tmp_path) as swarm:
        swarm.join()
        done = swarm.finish(180)
    assert done.step >= STEPS
    assert done.samples_trained >= STEPS * BATCH
    assert done.samples_unmerged == done.samples_lost == 0
    # Bytes at random have 5.5 nats.
    assert done.has_validation_loss
    assert done.validation_loss < 3.0
    assert done.checkpoint.endswith(f"{done.step:08d}")
    # On the way, too; nobody had anything to average with.
    assert done.evaluations
    assert not any(evaluation.has_average for evaluation in done.evaluations)
    assert all(1.0 < evaluation.loss < 6.0 for evaluation in done.evaluations)


@pytest.mark.slow
def test_replicas_that_meet_are_evaluated_alone_and_averaged_on_the_way(tmp_path: Path) -> None:
    sections = {
        "train": {**TRAIN, "evaluations": 12},
        "exchange": {"warmup_every": 1, "warmup_fraction": 0.9},
        "swarm": {"min_workers": 2, "settle_s": 0.3},
    }
    job = prepared_job(tmp_path, job_text(60 * BATCH * LENGTH, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(2):
            swarm.join()
        done = swarm.finish(400)
    met = [evaluation for evaluation in done.evaluations if evaluation.has_average]
    assert met, done.evaluations
    # Replicas met seconds ago, and their average is no worse than one of them by much.
    assert all(0.5 < e.average_loss < e.loss + 0.5 for e in met)
    assert any(e.average_loss != e.loss for e in met)


@pytest.mark.slow
def test_three_workers_train_a_pipeline(tmp_path: Path) -> None:
    """None holds the whole model; replicas of a stage that two hold exchange in pairs, and are averaged at the end."""
    sections = {"train": TRAIN, "swarm": {"min_workers": 3, "settle_s": 0.3}}
    job = prepared_job(tmp_path, job_text(60 * BATCH * LENGTH, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(3):
            swarm.join("--memory", "6MB")
        done = swarm.finish(300)
    assert len(done.stages) >= 3
    assert done.samples_trained >= 60 * BATCH
    assert done.validation_loss < 3.0
    assert all(worker.tokens > 0 for worker in done.workers)
