"""`diloco` and `sparseloco` on real processes: local steps, then rounds of a stage's whole group."""

from __future__ import annotations

from pathlib import Path

import pytest

from starlings_protos import control_pb2
from swarms import LiveSwarm, job_text, prepared_job

BATCH, LENGTH = 8, 32
TRAIN = {"schedule": "async", "batch": BATCH, "microbatch": 2, "inner_batch": 1, "lr": 3e-3}


def rounds(reply: control_pb2.StatusReply) -> list[int]:
    return [stage.rounds_averaged for stage in reply.exchanges]


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    [
        {"preset": "diloco", "every": 10},
        {"preset": "diloco", "every": 10, "fragments": 2, "merge_alpha": 0.5, "codec": "int4:64"},
        {"preset": "sparseloco", "every": 10},
    ],
    ids=["diloco", "fragments", "sparseloco"],
)
def test_two_replicas_train_in_rounds(tmp_path: Path, exchange: dict[str, object]) -> None:
    sections = {"train": TRAIN, "exchange": exchange, "swarm": {"min_workers": 2, "settle_s": 0.3}}
    job = prepared_job(tmp_path, job_text(400 * BATCH * LENGTH, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(2):
            swarm.join()
        seen = swarm.wait(lambda reply: bool(rounds(reply)) and min(rounds(reply)) >= 3, 400)
        done = swarm.finish(400)
    for stage in seen.exchanges:
        assert len(stage.replicas) == 2
        assert all(replica.averaged > 0 for replica in stage.replicas)
        assert stage.reports_unexpected == 0
    met = [r.last for stage in seen.exchanges for r in stage.replicas if r.last.fraction == 1.0]
    assert met
    assert all(len(last.members) == 2 and not last.dropped for last in met)
    assert done.validation_loss < 3.0
