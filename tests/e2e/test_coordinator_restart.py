"""The coordinator is killed and started again on its directory: training goes on from the step it was in."""

from __future__ import annotations

from pathlib import Path

from swarms import LiveSwarm, job_text, prepared_job

STEPS = 60


def test_killed_in_mid_training_and_started_again(tmp_path: Path) -> None:
    job = prepared_job(tmp_path, job_text(STEPS * 8 * 32, swarm={"min_workers": 2, "settle_s": 0.5}))
    with LiveSwarm.of(job, tmp_path) as swarm:
        for _ in range(2):
            swarm.join()
        before = swarm.wait(lambda r: r.phase == "training" and r.step >= 10, 120)
        swarm.kill_coordinator()
        swarm.start_coordinator()
        after = swarm.wait(lambda r: r.phase == "training" and r.step >= 1, 60)
        assert after.step >= before.step, "a committed step is never undone"
        assert after.plan_version == before.plan_version, "nobody was planned, or loaded, anew"
        done = swarm.finish(120)
    assert [point.step for point in swarm.history.points] == list(range(STEPS))
    assert (done.samples_trained, done.samples_lost) == (STEPS * 8, 0)
    events = swarm.history.events
    assert sum(event.sequence == 1 for event in events) == 2, "two coordinators have spoken"
    second = max(index for index, event in enumerate(events) if event.sequence == 1)
    kinds = [event.kind for event in events[second:]]
    assert kinds.count("restarted") == 1
    assert kinds.count("rejoin") == 2
    assert not {"lost", "rewind", "join", "engine_down", "gathering"} & set(kinds)
