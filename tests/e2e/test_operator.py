"""The owner's hand on a job of real processes: paused and let go on, a worker sent away, everybody explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarms import Done, LiveSwarm, job_text, prepared_job, starlings_here

TRAIN = {"schedule": "async", "batch": 8, "microbatch": 2, "lr": 3e-3}


@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_is_paused_and_goes_on_and_a_worker_is_sent_away(tmp_path: Path, restart: bool) -> None:
    job = prepared_job(
        tmp_path,
        job_text(10**8, train=TRAIN, swarm={"min_workers": 2, "settle_s": 0.3}, checkpoint={"every": 0}),
    )

    def command(*arguments: str) -> Done:
        return starlings_here(*arguments, "--job", job, "--json")

    with LiveSwarm.of(job, tmp_path) as swarm:
        first, second = swarm.join("--json"), swarm.join("--json")
        swarm.wait(lambda r: r.phase == "training" and r.step >= 3 and len(r.workers) == 2, 120)

        assert command("pause", "--reason", "moving house").records[0]["changed"]
        paused = swarm.wait(lambda r: r.HasField("pause") and not r.pause.settling, 60)
        assert "moving house" in paused.waiting_for
        if restart:
            swarm.kill_coordinator()
            swarm.start_coordinator()
        still = swarm.wait(
            lambda r: r.HasField("pause") and all(w.state == "training" and not w.reason for w in r.workers),
            60,
        )
        (listed,) = command("workers").records
        assert all(w["stages"] for w in listed["workers"])
        assert listed["pause"]["reason"] == "moving house"
        assert all(w["capacity_tokens_per_second"] > 0 for w in listed["workers"])
        after = swarm.wait(lambda r: r.elapsed_s >= still.elapsed_s + 1, 30)
        assert (after.samples_trained, after.tokens) == (still.samples_trained, still.tokens)
        (advice,) = command("rebalance", "--dry-run").records
        assert [a["question"] for a in advice["advice"]] == ["the plan as it is"]
        assert not advice["advice"][0]["moves"]
        assert advice["advice"][0]["rate_now"] > 0
        assert command("resume").records[0]["changed"]
        swarm.wait(lambda r: not r.HasField("pause") and r.step >= after.step + 2, 60)

        (victim, stayer) = (w.worker_id for w in after.workers)
        (reply,) = command("evict", victim[:8], "--for", "90s", "--reason", "it is too loud").records
        assert reply["changed"], reply
        swarm.wait(lambda r: any(w.state == "evicted" for w in r.workers), 30)
        gone = first if f"as {victim}." in first.log.read_text() else second
        assert gone.process.wait(60) == 16
        said = [json.loads(line) for line in gone.log.read_text().splitlines() if line.startswith("{")]
        assert any("it is too loud" in str(record) for record in said[-3:]), said[-3:]
        swarm.swarm.workers.remove(gone)
        (why,) = command("why", victim).records
        assert why["state"] == "evicted"
        assert "it is too loud" in why["because"][0]["text"]
        refused = command("evict", stayer)
        assert refused.code == 2
        assert "--force" in refused.out + refused.err
        (why,) = command("why", stayer[:7]).records
        assert {"state", "span", "plan"} <= {reason["topic"] for reason in why["because"]}
        assert command("why", "wffffffff").code == 2
        last = swarm.wait(lambda r: r.phase == "training", 30)
        assert last.samples_lost == 0
        if not restart:
            return
        assert command("drain", stayer, "--reason", "we move").records[0]["changed"]
        left = second if gone is first else first
        assert left.process.wait(90) == 0
        assert "the job's owner asked it to: we move" in left.log.read_text()
        assert command("stop").code == 0
        # Nobody is left who could end it in order: what is saved is the outcome, and the coordinator goes at once.
        assert swarm.swarm.coordinator is not None
        assert swarm.swarm.coordinator.process.wait(60) == 0
