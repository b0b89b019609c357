"""Presets of `[exchange]` on real processes: replicas meet while they train, and the job ends as every job does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarms import LiveSwarm, job_text, prepared_job

BATCH, LENGTH = 8, 32
STEPS, ROUNDS = 800, 4
PRESETS: dict[str, dict[str, Any]] = {
    "noloco": {"every": 4},
    "gossip": {},
    "palsgd": {"every": 4, "swaps": 1, "pull_probability": 0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_replicas_exchange_and_learn(tmp_path: Path, preset: str) -> None:
    """Two whole models; rounds of half a second at least, so the job lasts until enough of them are through."""
    sections: dict[str, Any] = {
        "train": {"schedule": "async", "batch": BATCH, "microbatch": 2, "lr": 3e-3},
        "exchange": {"preset": preset, **PRESETS[preset]},
        "pipeline": {"stages": 1},
        "swarm": {"min_workers": 2, "settle_s": 0.3},
    }
    job = prepared_job(tmp_path, job_text(STEPS * BATCH * LENGTH, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(2):
            swarm.join()
        met = swarm.wait(lambda r: sum(stage.rounds_averaged for stage in r.exchanges) >= ROUNDS, 400)
        (stage,) = met.exchanges
        assert stage.reports_unexpected == 0
        assert not stage.named
        assert all(replica.averaged >= ROUNDS - 2 for replica in stage.replicas)
        done = swarm.finish(500)
    assert done.samples_trained >= STEPS * BATCH
    # Bytes at random have 5.5 nats.
    assert done.validation_loss < 2.5
