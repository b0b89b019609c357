"""What a leaving worker puts on its disk, and the process without torch that serves it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest

from starlings_job.errors import DiskFull
from starlings_job.state import RawTensor, block_digest
from starlings_protos import channels, control_pb2, data_pb2, data_pb2_grpc, process_pb2
from starlings_protos.assignments import assignment_key_der, assignment_metadata, sign_assignment
from starlings_protos.errors import refusal_of
from starlings_protos.identity import new_key
from starlings_protos.messages import AssignmentClaim, Refusal, StateReport, StateWanted
from starlings_protos.state_transfer import BlockInbox
from starlings_simulator.driver import Driver, assignment
from starlings_worker.core.effects import DigestState, Stop
from starlings_worker.core.events import DrainRequested, StateDigested
from starlings_worker.handing_over import HandingOver
from starlings_worker.left_behind import DiskShelf, leave_behind
from starlings_worker.serving import NotHeld
from support.peer_servers import Certificates


def _blocks() -> dict[str, dict[str, RawTensor]]:
    def tensor(seed: int, count: int) -> RawTensor:
        return RawTensor("F32", (count,), memoryview(bytes((seed * 7 + i) % 251 for i in range(4 * count))))

    names = ("param:w", "exp_avg:w", "exp_avg_sq:w")
    return {
        block: {name: tensor(seed + 10 * k, 70_000) for k, name in enumerate(names)}
        | {"param:b": tensor(seed, 0)}
        for seed, block in enumerate(("embed", "layers.0", "head"))
    }


def test_what_is_on_the_disk_is_what_was_held(tmp_path: Path) -> None:
    blocks = _blocks()
    left = leave_behind(tmp_path, 7, blocks)
    assert left.directory is not None
    assert left.digests == {name: block_digest(tensors) for name, tensors in blocks.items()}
    shelf = DiskShelf(left.directory, 7)
    assert shelf.names == ("embed", "head", "layers.0")
    for name, tensors in blocks.items():
        served = shelf.serve(7, name, optimizer=True)
        assert {t.name: bytes(t.data) for t in served.tensors} == {
            n: bytes(t.data) for n, t in tensors.items()
        }
        only = shelf.serve(7, name, optimizer=False)
        assert [t.name for t in only.tensors] == ["param:b", "param:w"]
    for version, block in ((6, "embed"), (7, "layers.1"), (7, "../07/embed"), (7, "")):
        with pytest.raises(NotHeld):
            shelf.serve(version, block, optimizer=True)


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("starlings_worker.left_behind.os.fsync", full)
    with pytest.raises(DiskFull):
        leave_behind(tmp_path, 7, _blocks())
    assert not list(tmp_path.rglob("*.safetensors"))


def _draining() -> Driver:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {}, stages=1))
    driver.handle(DrainRequested("SIGTERM received", 60.0))
    return driver


def test_a_leaver_of_whom_only_its_state_is_wanted_stops_when_that_is_on_the_disk() -> None:
    driver = _draining()
    driver.hear(StateWanted(0, snapshot=True, hand_over=True))
    assert driver.one(DigestState) == DigestState(0, snapshot=True, hand_over=True)
    driver.handle(StateDigested(0, {"embed": "d"}, left_behind=True))
    stop = driver.one(Stop)
    assert stop.drained
    assert stop.handed_over == StateReport(0, {"embed": "d"}, 0)
    assert not driver.said(), "the report is said when the state can be fetched"


def test_without_room_on_the_disk_the_engine_stays_and_serves_from_memory() -> None:
    driver = _draining()
    driver.hear(StateWanted(0, snapshot=True, hand_over=True))
    driver.handle(StateDigested(0, {"embed": "d"}))
    assert driver.said() == [StateReport(0, {"embed": "d"}, 0)]
    assert not driver.of(Stop)


def test_who_does_not_leave_hands_nothing_over() -> None:
    driver = Driver("me")
    driver.ready(assignment((0, 0), {}, stages=1))
    driver.hear(StateWanted(0, snapshot=True, hand_over=True))
    assert not driver.one(DigestState).hand_over


async def test_the_process_serves_to_members_only_and_what_was_not_fetched_is_said(tmp_path: Path) -> None:
    certificates, key = Certificates(), new_key()
    leaver, heir = certificates.worker(), certificates.worker()
    left = leave_behind(tmp_path / "cache", 7, _blocks())
    record = process_pb2.HandedOver(
        report=control_pb2.StateReport(version=7),
        directory=str(left.directory),
        byte_count=left.byte_count,
        seconds=left.seconds,
    )
    handing = HandingOver(record, tmp_path / "log")
    # Any free port, found by opening one: the engine's would be fixed.
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    failure = await handing.start(
        process_pb2.StartHandover(
            key_pem=leaver.key_pem,
            certificate_pem=leaver.certificate_pem,
            ca_pem=leaver.ca_pem,
            listen_host="127.0.0.1",
            listen_port=port,
            assignment_key_der=assignment_key_der(key),
            job="test",
            wall_time_s=time.time(),
        )
    )
    try:
        assert failure == "", (tmp_path / "log").read_text()
        now_s = time.time()
        claim = AssignmentClaim("test", heir.id, 3, 1, None, now_s - 60, now_s + 900, "worker")
        good = assignment_metadata(sign_assignment(key, claim))
        forged = assignment_metadata(sign_assignment(new_key(), claim))
        async with channels.peer_channel(f"127.0.0.1:{port}", leaver.id, heir) as channel:
            stub = data_pb2_grpc.DataStub(channel)

            async def refusal(metadata: tuple, version: int) -> Refusal | None:
                request = data_pb2.StateRequest(version=version, blocks=["embed"], optimizer=True)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.FetchState(request, metadata=metadata).read()
                return refusal_of(refused.value)

            assert await refusal((), 7) is Refusal.ASSIGNMENT
            assert await refusal(forged, 7) is Refusal.ASSIGNMENT
            assert await refusal(good, 8) is Refusal.NOT_HELD
            for block in ("embed", "head"):
                inbox = BlockInbox(7, block, 1 << 30)
                request = data_pb2.StateRequest(version=7, blocks=[block], optimizer=True)
                inbox.begin_transfer()
                async for frame in stub.FetchState(request, metadata=good):
                    inbox.feed(frame)
                assert block_digest(inbox.tensors()) == left.digests[block]
        async with asyncio.timeout(20):
            while handing.fetched != {"embed", "head"}:
                await asyncio.sleep(0.01)
        assert "1 of 3 blocks were not fetched in time" in handing.account(released=False)
        assert left.directory is not None
        assert left.directory.exists()
        assert "was handed over" in handing.account(released=True)
        assert not left.directory.exists()
    finally:
        await handing.end()
