"""Peers with a valid assignment that mean harm, against real engine processes that train meanwhile.

The engines have shorter deadlines than usual (support/hasty_engine.py), and are otherwise the real thing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from starlings_protos import channels, data_pb2, data_pb2_grpc
from starlings_protos.assignments import assignment_metadata
from starlings_protos.errors import refusal_of
from starlings_protos.frames import SMALLEST_CHUNK_BYTES, make_header, tensor_header
from starlings_protos.messages import (
    Hop,
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Refusal,
    Span,
    Stage,
    WorkerId,
)
from starlings_worker.serving import TRANSFERS_AT_ONCE
from support.hasty_engine import PACE, UNREAD_S
from support.scripted_job import prepare_job
from support.scripted_swarm import Engine, ScriptedSwarm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
TESTS = Path(__file__).resolve().parents[1]
# On top of a deadline, for a machine that does other things too.
LATE_S = 10.0
SLOTS = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScriptedSwarm]:
    """Two engines, a stage each; one step is trained, and its result kept."""
    job = prepare_job(tmp_path_factory.mktemp("jobs"))
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    async with ScriptedSwarm(job, "support.hasty_engine") as swarm:
        first, last = await swarm.start({"PYTHONPATH": path}, {"PYTHONPATH": path})
        swarm.strangers = [swarm.new_identity()]
        await swarm.assign(
            (Stage(0, 2), Stage(3, 5)), {first.id: Span(0, 0), last.id: Span(1, 1)}, slots=SLOTS
        )
        await swarm.step(0, snapshot=True)
        yield swarm


class Hostile:
    """A third worker, whose assignment is in order. Its microbatches are of a step that is not leased yet."""

    def __init__(self, swarm: ScriptedSwarm, stub: Any, identity_id: str, victim: Engine) -> None:
        self.stub, self.id, self.victim = stub, WorkerId(identity_id), victim
        self.metadata = assignment_metadata(swarm.signed(identity_id, Span(0, 0)))
        self.plan_version = swarm.plan_version

    def header(self, step: int, index: int, byte_count: int) -> data_pb2.Frame:
        key = MicrobatchKey(LeaseKind.TRAIN, step, 0, index)
        subject = MicrobatchHeader(key, 1, (Hop(self.id, 0, 0),), 64.0, self.plan_version)
        hidden = tensor_header(
            "hidden", data_pb2.DATA_TYPE_FLOAT32, (byte_count // 4,), byte_count, codec="exact"
        )
        records = tensor_header("records", data_pb2.DATA_TYPE_UINT8, (64,), 64)
        return data_pb2.Frame(header=make_header(subject, [records, hidden]))

    async def push(
        self, frames: Iterable[data_pb2.Frame], every_s: float = 0.0
    ) -> tuple[Refusal | None, str, float]:
        """Frames, and then an open stream with nothing on it: the refusal, its words, and after how many seconds."""
        begun_s = time.monotonic()

        async def said() -> AsyncIterator[data_pb2.Frame]:
            for frame in frames:
                yield frame
                await asyncio.sleep(every_s)
            await asyncio.Event().wait()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.stub.Forward(said(), metadata=self.metadata)
        return refusal_of(refused.value), str(refused.value.details()), time.monotonic() - begun_s


@asynccontextmanager
async def hostile(swarm: ScriptedSwarm) -> AsyncIterator[Hostile]:
    """In the plan, and against the last engine, which the first one sends its microbatches to."""
    (identity,) = swarm.strangers
    victim = next(e for e in swarm.engines if e.span == Span(1, 1))
    async with channels.peer_channel(victim.addresses[0], victim.id, identity) as channel:
        yield Hostile(swarm, data_pb2_grpc.DataStub(channel), identity.id, victim)


async def test_pushes_that_stand_still_or_drip_end_in_time_while_others_train(swarm: ScriptedSwarm) -> None:
    async with hostile(swarm) as peer:
        chunk = data_pb2.Frame(chunk=bytes(SMALLEST_CHUNK_BYTES))
        size = 256 << 10
        pushes = {
            "nothing at all": peer.push([]),
            "a header and then nothing": peer.push([peer.header(2, 0, size)]),
            "a body that stops in the middle": peer.push([peer.header(2, 1, size), *([chunk] * 30)]),
            "the least chunks, too slowly": peer.push(
                [peer.header(2, 2, size), *([chunk] * 60)], every_s=0.4
            ),
            "a byte a second": peer.push(
                [peer.header(2, 3, size), data_pb2.Frame(chunk=b"x")] * 2, every_s=1.0
            ),
        }
        under_way = asyncio.gather(*pushes.values())
        loss, _ = await swarm.step(1)
        assert 0 < loss < 100
        outcomes = dict(zip(pushes, await asyncio.wait_for(under_way, 60), strict=True))
    for name, (refusal, words, seconds) in outcomes.items():
        drips = name == "a byte a second"
        assert refusal is (Refusal.MALFORMED if drips else Refusal.LIMIT), (name, words)
        whole_s = PACE.grace_s + size / PACE.least_bytes_per_s
        assert seconds < (whole_s if name.startswith("the least") else PACE.between_s) + LATE_S, (
            name,
            seconds,
        )


async def test_what_one_peer_has_under_way_is_bounded_and_others_are_served(swarm: ScriptedSwarm) -> None:
    """Follows the test before."""
    limit = 2 * swarm.profile.tensor_limit_bytes(swarm.job.train.microbatch)
    async with hostile(swarm) as peer:
        size = (limit - 64) // 4 * 4
        process = psutil.Process(peer.victim.process.pid)
        before = process.memory_info().rss
        pushes = [asyncio.create_task(peer.push([peer.header(3, n, size)])) for n in range(12)]
        loss, _ = await swarm.step(2)
        assert 0 < loss < 100
        outcomes = await asyncio.wait_for(asyncio.gather(*pushes), 60)
        # Memory grows with what arrives, not with what was announced.
        assert process.memory_info().rss - before < 16 << 20
    busy = [words for refusal, words, _ in outcomes if refusal is Refusal.BUSY]
    assert len(busy) == 4, outcomes
    assert all(peer.id in words and "under way" in words for words in busy)
    assert [refusal for refusal, _, _ in outcomes].count(Refusal.LIMIT) == 8


async def test_readers_of_state_that_do_not_read_are_given_up_and_cost_no_memory(
    swarm: ScriptedSwarm,
) -> None:
    """Follows: as many as are served at once, of 400 blocks each."""
    honest = swarm.new_identity()
    metadata = assignment_metadata(swarm.signed(honest.id, None))
    async with hostile(swarm) as peer:
        victim = peer.victim
        block = swarm.job.description.blocks[3]
        greedy = data_pb2.StateRequest(version=1, blocks=[block] * 400, optimizer=True)
        process = psutil.Process(victim.process.pid)
        before, begun_s = process.memory_info().rss, time.monotonic()
        calls = [peer.stub.FetchState(greedy, metadata=peer.metadata) for _ in range(TRANSFERS_AT_ONCE)]
        for call in calls:
            await call.initial_metadata()
        peak, tries = before, 0
        async with channels.peer_channel(victim.addresses[0], victim.id, honest) as channel:
            stub = data_pb2_grpc.DataStub(channel)
            request = data_pb2.StateRequest(version=1, blocks=[block], optimizer=True)
            while True:
                assert time.monotonic() - begun_s < UNREAD_S + LATE_S
                peak, tries = max(peak, process.memory_info().rss), tries + 1
                read, refusal = await _fetched(stub.FetchState(request, metadata=metadata))
                if refusal is None:
                    break
                assert refusal is Refusal.BUSY
                await asyncio.sleep(0.05)
        assert tries > 1
        assert sum(len(frame.chunk) for frame in read) > 100_000
        loss, _ = await swarm.step(3)
        assert 0 < loss < 100
        assert max(peak, process.memory_info().rss) - before < 16 << 20
        for call in calls:
            _, refusal = await _fetched(call)
            assert refusal is Refusal.LIMIT


async def _fetched(call: Any) -> tuple[list[data_pb2.Frame], Refusal | None]:
    """What a call gives until its end, and the refusal that it ends with."""
    frames: list[data_pb2.Frame] = []
    try:
        async with asyncio.timeout(20):
            async for frame in call:
                frames.append(frame)
    except grpc.aio.AioRpcError as error:
        return frames, refusal_of(error)
    return frames, None
