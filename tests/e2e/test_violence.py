"""Workers of a real swarm are killed and frozen at random, and come back: no sample is lost, no loss differs.

The devices are emulated slow ones, which sleep: so steps last long enough to be hit, and engines can share two cores.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from starlings.demo.kill import child_of, choose_victim, kill_at_once
from starlings.demo.swarm import Child
from starlings_job.reference import train_reference
from starlings_protos import control_pb2
from starlings_protos.identity import Identity
from support.namespaces import other_host, why_not
from swarms import LiveSwarm, freeze, job_text, kill_frozen, prepared_job, thaw

pytestmark = pytest.mark.slow

STEPS, BATCH, LENGTH = 4000, 16, 32
KILLS = 10
SLOW = ("--emulate", "gtx1080ti", "--precision", "fp32")


def prepared(folder: Path, workers: int, batch: int, microbatch: int, stages: int = 0) -> Path:
    """Exact codecs and SGD, so that losses can be compared. `stages`: 0 for the planner's choice."""
    return prepared_job(
        folder,
        job_text(
            STEPS * batch * LENGTH,
            data={"sequence_length": LENGTH},
            train={"batch": batch, "microbatch": microbatch, "optimizer": "sgd", "lr": 0.1, "clip": 0.5},
            pipeline={"codec": "exact", "stages": stages},
            exchange={"codec": "exact"},
            swarm={"min_workers": workers, "settle_s": 0.5},
        ),
    )


@contextmanager
def slow_swarm(
    folder: Path, workers: int = 3, batch: int = BATCH, microbatch: int = 1
) -> Iterator[LiveSwarm]:
    """A swarm in training, each of whose workers holds the whole model."""
    with LiveSwarm.of(prepared(folder, workers, batch, microbatch, stages=1), folder) as swarm:
        for _ in range(workers):
            swarm.join(*SLOW)
        swarm.wait(lambda r: r.phase == "training" and r.step >= 2, 180)
        yield swarm


def states(reply: control_pb2.StatusReply) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in reply.workers}


def is_back(reply: control_pb2.StatusReply, worker_id: str, count: int) -> bool:
    """`worker_id` holds a span again, like all others."""
    known = states(reply)
    return known.get(worker_id) == "training" and list(known.values()).count("training") == count


def events_of(swarm: LiveSwarm, kind: str, worker_id: str) -> int:
    return sum(event.kind == kind and worker_id in event.text for event in swarm.history.events)


def check_losses(swarm: LiveSwarm) -> None:
    """Each loss is that of a plain loop over the same samples."""
    losses = [point.loss for point in swarm.history.points]
    assert [point.step for point in swarm.history.points] == list(range(len(losses)))
    reference = train_reference(swarm.job, len(losses))
    for step, (ours, theirs) in enumerate(zip(losses, reference.losses, strict=True)):
        assert abs(ours - theirs) / theirs < 1e-4, f"loss of step {step}: {ours} against {theirs}"


def test_ten_kills_at_random_points(tmp_path: Path) -> None:
    seed = int(os.environ.get("STARLINGS_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
    print(f"replay with STARLINGS_TEST_SEED={seed}")
    rng = random.Random(seed)
    with slow_swarm(tmp_path) as swarm:
        for _ in range(KILLS):
            reply = swarm.wait(lambda r: r.phase == "training", 30)
            victim = choose_victim(reply.workers)
            assert victim is not None, states(reply)
            others = [w.worker_id for w in reply.workers if w.state == "training" and w.worker_id != victim]
            victim = rng.choice([victim, *others])
            child = child_of(swarm.swarm, victim)
            time.sleep(
                rng.uniform(0.0, 1.5)
            )  # The point of the step at which it dies, not a wait for anything.
            lost, joined = events_of(swarm, "lost", victim), events_of(swarm, "joined", victim)
            child.expendable = True
            kill_at_once(child.process)
            child.process.wait(10)
            swarm.wait(lambda r, v=victim: states(r).get(v) != "training", 10)
            at = swarm.wait(lambda r: r.phase == "training", 10).step
            swarm.wait(lambda r, at=at: r.step > at, 60)
            swarm.swarm.start_again(child)
            swarm.wait(lambda r, v=victim: is_back(r, v, 3), 120)
            assert events_of(swarm, "lost", victim) == lost + 1, "one kill is one loss"
            assert events_of(swarm, "joined", victim) == joined + 1, "and one resync"
        reply = swarm.wait(lambda r: True, 10)
        assert reply.samples_lost == 0
        assert not [event.text for event in swarm.history.events if event.kind == "rewind"]
    check_losses(swarm)


def test_a_worker_killed_before_it_accumulated_costs_only_its_leases(tmp_path: Path) -> None:
    """The step goes on in its attempt: what the others have done is not done again."""
    with slow_swarm(tmp_path, batch=48, microbatch=8) as swarm:
        reply = swarm.wait(lambda r: r.phase == "training", 30)
        victim = choose_victim(reply.workers)
        assert victim is not None
        child = child_of(swarm.swarm, victim)
        at = freeze_before_anything_is_done(swarm, child)
        child.expendable = True
        kill_frozen(child)
        child.process.wait(10)
        swarm.wait(lambda r, v=victim: v not in states(r), 15)
        swarm.wait(lambda r, at=at: r.step > at + 2, 120)
        (lost,) = [event for event in swarm.history.events if event.kind == "plan" and victim in event.text]
        assert f"step {at} goes on, " in lost.text
        assert "0 of its microbatches" not in lost.text
        assert not [event.text for event in swarm.history.events if event.kind == "step_restarted"]
        assert not [event.text for event in swarm.history.events if "begins again" in event.text]
        swarm.swarm.start_again(child)
        swarm.wait(lambda r, v=victim: is_back(r, v, 3), 120)
        assert swarm.wait(lambda r: True, 10).samples_lost == 0
    check_losses(swarm)


def freeze_before_anything_is_done(swarm: LiveSwarm, child: Child) -> int:
    """Stops a worker at the beginning of a step, and says of which: nobody has finished a microbatch in it."""
    for _ in range(20):
        before = swarm.wait(lambda r: r.phase == "training", 60).step
        step = swarm.wait(lambda r, before=before: r.step > before, 60).step
        freeze(child)
        time.sleep(0.3)  # What it said before it stopped arrives.
        seen = swarm.wait(lambda r: True, 10)
        if (seen.step, seen.step_microbatches_done) == (step, 0):
            return int(step)
        thaw(child)
    raise AssertionError("its first microbatch was always done already")


@pytest.mark.parametrize("frozen_s", [5, 20, 60])
def test_a_frozen_worker_is_fenced_and_resyncs(tmp_path: Path, frozen_s: int) -> None:
    with slow_swarm(tmp_path) as swarm:
        reply = swarm.wait(lambda r: r.phase == "training", 30)
        victim = choose_victim(reply.workers)
        assert victim is not None
        child = child_of(swarm.swarm, victim)
        step = reply.step
        freeze(child)
        frozen_at_s = time.monotonic()
        try:
            # The others go on: at the latest when the silence has become a loss.
            if frozen_s >= 20:
                swarm.wait(lambda r: r.step >= step + 5, frozen_s)
                dropped = swarm.wait(lambda r, v=victim: v not in states(r), 1)
                assert dropped.phase == "training"
            time.sleep(max(0.0, frozen_at_s + frozen_s - time.monotonic()))
        finally:
            thaw(child)
        swarm.wait(lambda r, v=victim: is_back(r, v, 3), 120)
        at = swarm.wait(lambda r: True, 10).step
        swarm.wait(lambda r, at=at: r.step >= at + 5, 60)
        lost, joined = events_of(swarm, "lost", victim), events_of(swarm, "joined", victim)
        assert lost == joined <= 1, "one freeze is one loss at most, and as many resyncs"
        assert lost == 1 or frozen_s < 20
        assert swarm.wait(lambda r: True, 10).samples_lost == 0
    check_losses(swarm)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible")
@pytest.mark.parametrize("memory", ["1GB", "1.6MB"])
def test_a_partition_of_thirty_seconds(tmp_path: Path, memory: str) -> None:
    """Two workers and the coordinator on one side, two workers on the other."""
    with other_host() as there, LiveSwarm.of(prepared(tmp_path, 4, BATCH, 1), tmp_path, there.here) as swarm:
        for _ in range(2):
            swarm.join(*SLOW, "--memory", memory)
            swarm.join(*SLOW, "--memory", memory, host=there.there, through=there.through)
        whole = swarm.wait(lambda r: r.phase == "training" and r.step >= 2, 180)
        assert len(states(whole)) == 4
        far = {Identity.load(swarm.swarm.directory / "workers" / n).id for n in ("2", "4")}
        there.cut()
        cut_at_s = time.monotonic()
        alone = swarm.wait(lambda r: not far & set(states(r)), 25)
        near_covers_all = alone.phase == "training"
        if near_covers_all:
            swarm.wait(lambda r: r.step >= alone.step + 3, 20)
        time.sleep(max(0.0, cut_at_s + 30.0 - time.monotonic()))
        there.mend()
        swarm.wait(lambda r: all(is_back(r, worker_id, 4) for worker_id in far), 120)
        at = swarm.wait(lambda r: True, 10).step
        done = swarm.wait(lambda r: r.step >= at + 5, 60)
        assert done.samples_lost == 0
        for worker_id in far:
            assert events_of(swarm, "lost", worker_id) == 1, "membership changes once each way"
            assert events_of(swarm, "join", worker_id) == 2
    check_losses(swarm)
