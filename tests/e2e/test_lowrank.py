"""A swarm that exchanges factors in two passes, and loses a worker: the loss falls, and replicas stay alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from starlings.demo.kill import child_of, kill_at_once
from swarms import LiveSwarm, job_text, prepared_job, starlings


@pytest.mark.slow
def test_three_workers_train_on_through_a_kill(tmp_path: Path) -> None:
    sections = {
        "swarm": {"min_workers": 3, "settle_s": 0.5},
        "exchange": {"codec": "lowrank:4"},
        "train": {"batch": 16, "microbatch": 2},
    }
    job = prepared_job(tmp_path, job_text(10**8, **sections))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(3):
            swarm.join()
        swarm.wait(lambda r: r.phase == "training" and r.step >= 20, 180)
        victim = swarm.wait(lambda r: len(r.workers) == 3, 30).workers[0].worker_id
        child = child_of(swarm.swarm, victim)
        child.expendable = True
        kill_at_once(child.process)
        child.process.wait(10)
        lost = swarm.wait(lambda r: any(e.kind == "lost" and victim in e.text for e in r.events), 30)
        swarm.wait(lambda r: r.step >= lost.step + 10, 90)
        # Its next life replays what the others exchange, and takes part with their Q.
        swarm.swarm.start_again(child)
        back = swarm.wait(lambda r: [w.state for w in r.workers] == ["training"] * 3, 180)
        swarm.wait(lambda r: r.step >= back.step + 20, 90)
        assert starlings("stop", "--job", job, cwd=tmp_path).code == 0
        done = swarm.finish(120)
    events = swarm.history.events
    # Replicas whose digests differ are averaged at the end, and that is announced.
    assert not {"rewind", "catch_up_failed", "average"} & {event.kind for event in events}, events
    assert [point.step for point in swarm.history.points] == list(range(done.step))
    assert (done.samples_trained, done.samples_lost) == (done.step * 16, 0)
    losses = [point.loss for point in swarm.history.points]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), losses
