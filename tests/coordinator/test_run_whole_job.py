"""A job from beginning to end: real ports, planner and keeper, real core; the worker's part is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlings_coordinator.leases import PROMPT_TOKENS
from starlings_job.checkpoint import read_block, versions
from starlings_job.records import RecordStore
from starlings_protos import control_pb2
from starlings_protos.messages import LeaseGrant, LeaseKind
from support.coordinator_harness import ScriptedWorker, childless, coordinator, until
from support.prepared_job import STEPS, block_names, block_state, write_prepared_job


async def test_lone_worker_trains_evaluates_generates_saves_and_leaves(tmp_path: Path) -> None:
    directory = write_prepared_job(tmp_path / "job")
    async with coordinator(directory) as running, ScriptedWorker(running) as worker:
        stub, channel = running.owner()
        watching = asyncio.create_task(_watch(stub))
        worker.begin()
        assert running.task is not None
        assert await asyncio.wait_for(running.task, 60) == 0
        replies = await asyncio.wait_for(watching, 10)
        await channel.close()

    assert worker.finish is not None
    assert worker.finish.done
    last = replies[-1]
    assert (last.phase, last.step, last.samples_lost, last.samples_trained) == ("done", STEPS, 0, 4 * STEPS)
    assert abs(last.validation_loss - 2.5) < 1e-9
    # Events and loss points come once each over one stream.
    sequence = [e.sequence for r in replies for e in r.events]
    assert sequence == sorted(set(sequence))
    assert [p.step for r in replies for p in r.loss_curve] == list(range(STEPS))
    _check_leases(directory, worker, last.sample_text)
    _check_checkpoint(directory)
    assert running.of("ended") == [{"exit_code": 0, "reason": f"all {STEPS} steps are trained"}]

    # Started again, a finished job ends at once.
    async with childless(directory) as running:
        assert running.task is not None
        assert await asyncio.wait_for(running.task, 30) == 0


async def _watch(stub: object) -> list[control_pb2.StatusReply]:
    request = control_pb2.StatusRequest(interval_s=0.1)
    return [reply async for reply in stub.Watch(request)]  # type: ignore[attr-defined]


def _check_leases(directory: Path, worker: ScriptedWorker, sample_text: str) -> None:
    leases = [lease for grant in worker.seen(LeaseGrant) for lease in grant.leases]
    with RecordStore(directory) as records:
        for lease in leases:
            match lease.key.kind:
                case LeaseKind.TRAIN:
                    assert lease.records == records.read(lease.samples)
                case LeaseKind.EVALUATE:
                    assert lease.records == records.read_held_out(lease.samples)
                case LeaseKind.GENERATE:
                    prompt = bytes(records.held_out_tokens(lease.samples[0], PROMPT_TOKENS))
                    assert lease.records == prompt + bytes(lease.samples[1:])
        kinds = {lease.key.kind for lease in leases}
        assert kinds == {LeaseKind.TRAIN, LeaseKind.EVALUATE, LeaseKind.GENERATE}
        assert sample_text == (prompt + b"x" * 100).decode()


def _check_checkpoint(directory: Path) -> None:
    url = directory / "checkpoints"
    assert versions(url) == (STEPS,)
    for block in block_names():
        saved = {n: bytes(t.data) for n, t in read_block(url, STEPS, block).items()}
        assert saved == {n: bytes(t.data) for n, t in block_state(block, STEPS).items()}


async def test_job_continues_after_a_restart_in_the_middle(tmp_path: Path) -> None:
    directory = write_prepared_job(tmp_path / "job", steps=6, every=2)
    async with coordinator(directory) as running, ScriptedWorker(running) as worker:
        worker.hold_at_step = 4
        worker.begin()
        await until(lambda: worker.version == 4, "step 4")
        await until(lambda: versions(directory / "checkpoints"), "a checkpoint")
    async with coordinator(directory) as running, ScriptedWorker(running, worker.identity, nonce=2) as again:
        again.begin()
        assert running.task is not None
        assert await asyncio.wait_for(running.task, 60) == 0
    assert again.assignment is not None
    # It went on from a checkpoint, under a later plan, as a later life of the same worker.
    assert again.assignment.version >= 2
    assert again.assignment.plan_version > 1
    assert versions(directory / "checkpoints")[-1] == 6
