"""Real engine processes over the pipe and over mTLS: the same training as one plain process, and the same bits.

Three engines serve all tests of this file, one life each; one of them computes without vector instructions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
import torch

from starlings_job.reference import ReferenceRun, evaluate, load_whole, train_reference
from starlings_protos import channels, data_pb2, data_pb2_grpc
from starlings_protos.assignments import assignment_metadata
from starlings_protos.errors import refusal_of
from starlings_protos.messages import (
    CatchUpFailed,
    ExchangeOpened,
    ExchangePurpose,
    Finish,
    Ready,
    Refusal,
    Retain,
    SignedAssignment,
    Span,
    Stage,
    StateReport,
    StepRestarted,
)
from starlings_protos.state_transfer import BlockInbox
from support.scripted_job import prepare_job
from support.scripted_swarm import ScriptedSwarm

pytestmark = pytest.mark.asyncio(loop_scope="module")
torch.set_num_threads(1)
# micro: embed, four layers, head.
THREE = (Stage(0, 1), Stage(2, 3), Stage(4, 5))
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def plain_job(folder: Path) -> Path:
    return prepare_job(folder / "plain")


@pytest.fixture(scope="module")
def reference(plain_job: Path) -> ReferenceRun:
    return train_reference(plain_job, 3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(plain_job: Path) -> AsyncIterator[ScriptedSwarm]:
    async with ScriptedSwarm(plain_job) as swarm:
        await swarm.start({}, {"ATEN_CPU_CAPABILITY": "default"}, {})
        yield swarm


def _spread(swarm: ScriptedSwarm) -> dict:
    """Every stage at two workers, overlapping spans; the third worker holds all."""
    a, b, c = (e.id for e in swarm.engines)
    return {a: Span(0, 1), b: Span(1, 2), c: Span(0, 2)}


def _agreed(reports: list[StateReport]) -> dict[str, str]:
    """The one digest of each block."""
    digests: dict[str, set[str]] = {}
    for report in reports:
        for block, digest in report.block_digests.items():
            digests.setdefault(block, set()).add(digest)
    assert all(len(d) == 1 for d in digests.values()), digests
    return {block: next(iter(d)) for block, d in digests.items()}


async def test_three_engines_train_as_one_plain_process_does(swarm: ScriptedSwarm, reference: ReferenceRun):
    """Also: replicas are bit-identical although one of them has another processor."""
    assert len({e.numeric_class for e in swarm.engines}) == 2
    ready = await swarm.assign(THREE, _spread(swarm))
    assert len({r.block_digests["layers.1"] for r in ready.values()}) == 1
    losses = [(await swarm.step(step, snapshot=step == 2))[0] for step in range(3)]
    assert losses == pytest.approx(reference.losses, rel=1e-5)
    digests = _agreed(await swarm.state(3))
    assert set(digests) == set(swarm.job.description.blocks)
    assert all(e.heartbeat.progress > 0 for e in swarm.engines)


async def test_committed_state_is_served_from_a_snapshot_and_equals_the_reference(
    swarm: ScriptedSwarm, reference: ReferenceRun
):
    """Follows the test before: version 3 was kept."""
    keeper = swarm.new_identity()
    signed = swarm.signed(keeper.id, None)
    donor = swarm.engines[2]
    async with channels.peer_channel(donor.addresses[0], donor.id, keeper) as channel:
        stub = data_pb2_grpc.DataStub(channel)
        squared, total = 0.0, 0.0
        for block in swarm.job.description.blocks:
            inbox = BlockInbox(3, block, 64 << 20)
            # Broken off after the first frames, and resumed.
            for frames in (2, None):
                request = data_pb2.StateRequest(
                    version=3, blocks=[block], optimizer=True, offset=inbox.offset
                )
                call = stub.FetchState(request, metadata=assignment_metadata(signed))
                inbox.begin_transfer()
                number = 0
                async for frame in call:
                    inbox.feed(frame)
                    number += 1
                    if number == frames:
                        break
                call.cancel()
                if inbox.complete:
                    break
            tensors = inbox.tensors()
            assert {n.partition(":")[0] for n in tensors} == {"param", "exp_avg", "exp_avg_sq"}
            for name, tensor in tensors.items():
                if name.startswith("param:"):
                    expected = reference.state[block, name.removeprefix("param:")]
                    got = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(expected.shape)
                    squared += float((got - expected).square().sum())
                    total += float(expected.square().sum())
        assert (squared / total) ** 0.5 < 1e-4
        request = data_pb2.StateRequest(version=2, blocks=["embed"], optimizer=True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.FetchState(request, metadata=assignment_metadata(signed)).read()
        assert refusal_of(refused.value) is Refusal.NOT_HELD


async def test_late_joiners_get_the_donors_state_bit_for_bit(swarm: ScriptedSwarm):
    """Follows: two workers begin with what the third one keeps; weights and optimizer."""
    a, b, c = swarm.engines
    before = _agreed(await swarm.state(3, snapshot=True))
    for engine in swarm.engines:
        engine.span = None
    ready = await swarm.assign(THREE, {a.id: Span(0, 2), b.id: Span(0, 1)}, version=3, donors=[c])
    assert ready[a.id].block_digests == before
    assert ready[b.id].block_digests.items() <= before.items()


@pytest.mark.parametrize(
    ("name", "changes", "recompute", "tolerance"),
    [
        ("sgd", {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}, True, 1e-5),
        ("tied", {"model": "config = 'gpt2.json'"}, False, 1e-5),
        ("int8", {"pipeline": "int8:128", "exchange": "int8:128"}, False, 2e-2),
        ("sparse", {"pipeline": "fp8", "exchange": "topk:64/4096|int2"}, False, 5e-2),
        ("lowrank", {"model": "config = 'gpt2.json'", "exchange": "lowrank:4"}, False, 5e-2),
    ],
)
async def test_other_jobs_in_new_lives(
    swarm: ScriptedSwarm, folder: Path, name: str, changes: dict, recompute: bool, tolerance: float
):
    """SGD with recomputation, GPT-2 with tied embeddings, lossy codecs both ways."""
    (folder / name).mkdir()
    (folder / name / "gpt2.json").write_text(json.dumps(GPT2))
    job = prepare_job(folder / name, **changes)
    reference = train_reference(job, 3)
    await swarm.use(job)
    await swarm.assign(THREE, _spread(swarm), recompute=recompute)
    losses = [(await swarm.step(step))[0] for step in range(3)]
    assert losses == pytest.approx(reference.losses, rel=tolerance)
    digests = _agreed(await swarm.state(3))
    if name == "tied":
        assert set(digests) == set(swarm.job.description.blocks)


@pytest.mark.parametrize("exchange", ["int8:128", "lowrank:2"])
async def test_a_late_joiner_catches_up_while_the_others_go_on(
    swarm: ScriptedSwarm, folder: Path, exchange: str
):
    """Two donors, of which each has a group of its own and one in common; lossy exchange, so with error feedback. The
    joiner loads version 2 while the donors train steps 2 to 5, and ends with their bits, the optimizer's too.
    """
    name = f"late-{exchange.partition(':')[0]}"
    await swarm.use(prepare_job(folder / name, exchange=exchange, pipeline="int8:128"))
    a, b, c = swarm.engines
    await swarm.assign(THREE, {a.id: Span(0, 1), b.id: Span(1, 2)})
    await swarm.step(0)
    for donor in (a, b):
        donor.say(Retain((2,), True, 2))
    await swarm.step(1, snapshot=True)
    swarm.observe(c, Span(0, 2), 2, (a, b))
    digests: dict[str, int] = {}
    for step in range(2, 6):
        _, prepared = await swarm.step(step, snapshot=step == 4)
        digests = {g.group: g.aggregate_digest for report in prepared for g in report.groups}
    ready = await c.next(Ready)
    while ready.version < 6:
        ready = await c.next(Ready)
    assert ready.aggregate_digests == digests
    swarm.admit(c, 6)
    for donor in (a, b):
        donor.say(Retain())
    _, prepared = await swarm.step(6)
    assert sum(len(g.microbatches) for p in prepared for g in p.groups) == 3 * swarm.job.microbatches_per_step
    assert set(_agreed(await swarm.state(7))) == set(swarm.job.description.blocks)


async def test_an_update_that_no_donor_keeps_is_said(swarm: ScriptedSwarm, plain_job: Path):
    """The donors were told to keep the version, not the updates."""
    await swarm.use(plain_job)
    a, b, c = swarm.engines
    await swarm.assign(THREE, {a.id: Span(0, 2), b.id: Span(0, 2)})
    for donor in (a, b):
        donor.say(Retain((1,)))
    await swarm.step(0, snapshot=True)
    swarm.observe(c, Span(1, 1), 1, (a, b))
    assert (await c.next(Ready)).version == 1
    await swarm.step(1)
    failed = await c.next(CatchUpFailed)
    assert failed.version == 1
    assert "not kept" in failed.reason


async def test_an_attempt_that_was_given_up_leaves_nothing_behind(
    swarm: ScriptedSwarm, plain_job: Path, reference: ReferenceRun
):
    await swarm.use(plain_job)
    await swarm.assign(THREE, _spread(swarm))
    await swarm.step(0)
    await swarm.microbatches(1, 0)
    for engine in swarm.engines:
        engine.say(StepRestarted(1, 1, "a test"))
    loss, prepared = await swarm.step(1, attempt=1)
    assert loss == pytest.approx(reference.losses[1], rel=1e-5)
    assert {p.attempt for p in prepared} == {1}
    _agreed(await swarm.state(2))


async def test_a_state_exchange_makes_replicas_equal(swarm: ScriptedSwarm):
    """Follows: each group's average with the optimizer's state; of two equal halves nothing changes."""
    before = _agreed(await swarm.state(2))
    groups = swarm.groups({})
    for engine in swarm.engines:
        mine = tuple(
            dataclasses.replace(
                g, members=tuple(dataclasses.replace(m, weight=1 / len(g.members)) for m in g.members)
            )
            for _, g in sorted(groups.items())
            if any(m.worker_id == engine.id for m in g.members)
        )
        engine.say(ExchangeOpened(2, 0, mine, 30.0, ExchangePurpose.STATE))
    reports = [await e.next(StateReport) for e in swarm.engines]
    after = _agreed(reports)
    pairs = {b for b in before if b not in ("layers.1", "layers.2")}
    assert {b: after[b] for b in pairs} == {b: before[b] for b in pairs}


async def test_evaluation_and_generation_go_through_the_pipeline(swarm: ScriptedSwarm, plain_job: Path):
    await swarm.use(plain_job)
    a, b, c = (e.id for e in swarm.engines)
    await swarm.assign(THREE, {a: Span(0, 0), b: Span(1, 1), c: Span(2, 2)})
    whole = load_whole(plain_job, swarm.job.description)
    assert await swarm.evaluate() == pytest.approx(evaluate(whole, swarm.store, 2), rel=1e-5)
    prompt = list(swarm.store.held_out_tokens(0, 8))
    tokens = list(prompt)
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(whole(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert await swarm.generate(prompt, 3) == tokens


async def test_callers_without_a_valid_assignment_are_refused(swarm: ScriptedSwarm):
    engine = swarm.engines[0]
    stranger = swarm.new_identity()
    good = swarm.signed(stranger.id, Span(1, 1))
    wrong = {
        "none": (),
        "of another worker": assignment_metadata(swarm.signed(swarm.engines[1].id, Span(1, 1))),
        "forged": assignment_metadata(SignedAssignment(good.payload, good.signature[:-1] + b"\x00")),
        "expired": assignment_metadata(swarm.signed(stranger.id, None, expires_s=1.0)),
        "of another job": assignment_metadata(swarm.signed(stranger.id, None, job="other")),
    }
    fenced = swarm.signed(stranger.id, Span(1, 1), incarnation=swarm.incarnation - 1)
    async with channels.peer_channel(engine.addresses[0], engine.id, stranger) as channel:
        stub = data_pb2_grpc.DataStub(channel)

        async def refusal(metadata: tuple) -> Refusal | None:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.FetchState(data_pb2.StateRequest(version=0), metadata=metadata).read()
            return refusal_of(refused.value)

        for name, metadata in wrong.items():
            assert await refusal(metadata) is Refusal.ASSIGNMENT, name
        assert await refusal(assignment_metadata(good)) is Refusal.NOT_HELD
        assert await refusal(assignment_metadata(fenced)) is Refusal.ASSIGNMENT

        async def pushed(frames: list[data_pb2.Frame]) -> Refusal | None:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Forward(iter(frames), metadata=assignment_metadata(good))
            return refusal_of(refused.value)

        assert await pushed([]) is Refusal.MALFORMED
        assert await pushed([data_pb2.Frame(chunk=b"x" * 5000)]) is Refusal.MALFORMED
        lying = data_pb2.Header(total_bytes=1 << 40)
        lying.microbatch.key.kind = 1
        tensor = lying.tensors.add(
            name="hidden", data_type=1, shape=[1 << 38], byte_count=1 << 40, codec="exact"
        )
        assert tensor.byte_count == lying.total_bytes
        assert await pushed([data_pb2.Frame(header=lying)]) is Refusal.LIMIT


async def test_the_end_of_the_job_ends_the_engines(swarm: ScriptedSwarm):
    """Last, because nobody is left after it."""
    for engine in swarm.engines:
        engine.say(Finish(True, "all steps are trained"))
    for engine in swarm.engines:
        await engine.finished.wait()
        assert await engine.process.wait() == 0
        assert not engine.failure
