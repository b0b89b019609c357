"""The keeper's data port: what it serves, to whom, and how a stalled reader is treated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from starlings_coordinator.keeper.library import NotHeld, StateLibrary
from starlings_coordinator.keeper.service import Admission, KeeperService
from starlings_coordinator.signing import AssignmentSigner
from starlings_job.checkpoint import CheckpointWriter
from starlings_job.prepared import weights_url
from starlings_protos import data_pb2, data_pb2_grpc
from starlings_protos.assignments import assignment_metadata, sign_assignment
from starlings_protos.authority import CertificateAuthority
from starlings_protos.channels import DATA, bind, make_server, peer_channel, server_credentials
from starlings_protos.errors import refusal_of
from starlings_protos.identity import KEEPER, OWNER, Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.messages import AssignmentClaim, Refusal, Span, WorkerId
from starlings_protos.peers import DATA_POLICY, RoleGuard
from starlings_protos.state_transfer import StateTensor, fetch_block
from support.prepared_job import block_names, block_state, write_prepared_job

KEY = new_key()


@dataclass
class Port:
    authority: CertificateAuthority
    address: str
    library: StateLibrary
    checkpoints: Path

    def worker(self) -> Identity:
        key = new_key()
        peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
        pem = self.authority.issue(key.public_key(), peer, time.time())
        return Identity(peer, key_to_pem(key), pem, self.authority.certificate_pem)

    def metadata(self, identity: Identity, **changes: Any) -> tuple[tuple[str, bytes], ...]:
        now_s = time.time()
        values: dict[str, Any] = {
            "job": "test",
            "worker_id": WorkerId(identity.id),
            "incarnation": 1,
            "plan_version": 1,
            "span": Span(0, 0),
            "not_before_s": now_s - 60,
            "expires_s": now_s + 60,
            "role": "worker",
        }
        key = changes.pop("key", KEY)
        return assignment_metadata(sign_assignment(key, AssignmentClaim(**{**values, **changes})))

    async def fetch(
        self, identity: Identity, request: data_pb2.StateRequest, metadata: Any
    ) -> list[data_pb2.Frame]:
        async with peer_channel(self.address, "keeper", identity) as channel:
            call = data_pb2_grpc.DataStub(channel).FetchState(request, metadata=metadata)
            return [frame async for frame in call]

    async def refusal(self, identity: Identity, metadata: Any, **request: Any) -> Refusal | None:
        wanted = data_pb2.StateRequest(**{"version": 0, "blocks": ["embed"], **request})
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.fetch(identity, wanted, metadata)
        return refusal_of(error.value)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    directory = write_prepared_job(tmp_path / "job")
    authority = CertificateAuthority.create("test", time.time())
    library = StateLibrary(Path(weights_url(directory)), str(directory / "checkpoints"))
    server = make_server(DATA, [RoleGuard(DATA_POLICY)])
    admission = Admission("test", AssignmentSigner(KEY, "test").key_der)
    service = KeeperService(library, admission, now_wall_s=time.time, stalled_after_s=0.5)
    data_pb2_grpc.add_DataServicer_to_server(service, server)
    number = bind(server, "127.0.0.1", 0, server_credentials(authority.issue_identity(KEEPER, time.time())))
    await server.start()
    yield Port(authority, f"127.0.0.1:{number}", library, directory / "checkpoints")
    await server.stop(0)


def _write_checkpoint(port: Port, version: int) -> None:
    with CheckpointWriter(port.checkpoints, version) as writer:
        for block in block_names():
            writer.add_block(block, block_state(block, version), 10 * version)
        writer.finish()
    port.library.changed()


async def test_version_zero_and_checkpoints_arrive_as_they_are(port: Port) -> None:
    _write_checkpoint(port, 2)
    assert port.library.versions() == (0, 2)
    identity = port.worker()
    async with peer_channel(port.address, "keeper", identity) as channel:

        def open_transfer(request: data_pb2.StateRequest) -> Any:
            stub = data_pb2_grpc.DataStub(channel)
            return stub.FetchState(request, metadata=port.metadata(identity))

        for version in (0, 2):
            for block in ("embed", "layers.1"):
                found = await fetch_block(
                    {"keeper": open_transfer},
                    version=version,
                    block=block,
                    optimizer=True,
                    limit_bytes=1 << 20,
                )
                assert _bytes(found.tensors) == _bytes(block_state(block, version))
                assert found.optimizer_steps == 10 * version


def _bytes(tensors: Any) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


async def test_transfer_of_several_blocks_resumes_at_any_byte(port: Port) -> None:
    identity = port.worker()
    blocks = ["embed", "head"]
    whole = await port.fetch(
        identity, data_pb2.StateRequest(version=0, blocks=blocks), port.metadata(identity)
    )
    data = b"".join(frame.chunk for frame in whole)
    sizes = [frame.header.total_bytes for frame in whole if frame.WhichOneof("body") == "header"]
    assert sum(sizes) == len(data)
    for offset in (1, sizes[0] - 1, sizes[0], sizes[0] + 7, len(data)):
        request = data_pb2.StateRequest(version=0, blocks=blocks, offset=offset)
        rest = await port.fetch(identity, request, port.metadata(identity))
        assert b"".join(frame.chunk for frame in rest) == data[offset:]


async def test_only_a_valid_assignment_of_this_very_worker_opens_the_port(port: Port) -> None:
    one, other = port.worker(), port.worker()
    past_s = time.time() - 1000
    for metadata in (
        None,
        ((key := "starlings-assignment-bin", b"junk"),),
        port.metadata(other),
        port.metadata(one, key=new_key()),
        port.metadata(one, job="another"),
        port.metadata(one, not_before_s=past_s, expires_s=past_s + 10),
    ):
        assert await port.refusal(one, metadata) is Refusal.ASSIGNMENT, key
    # The newest life fences the older ones.
    await port.fetch(
        one, data_pb2.StateRequest(version=0, blocks=["embed"]), port.metadata(one, incarnation=5)
    )
    assert await port.refusal(one, port.metadata(one, incarnation=4)) is Refusal.ASSIGNMENT
    owner = port.authority.issue_identity(OWNER, time.time())
    assert await port.refusal(owner, port.metadata(one)) is Refusal.NOT_YOU


async def test_what_is_not_held_or_too_much_is_a_coded_refusal(port: Port) -> None:
    identity = port.worker()
    metadata = port.metadata(identity)
    assert await port.refusal(identity, metadata, version=9) is Refusal.NOT_HELD
    assert await port.refusal(identity, metadata, blocks=["../../etc/passwd"]) is Refusal.NOT_HELD
    assert await port.refusal(identity, metadata, blocks=[]) is Refusal.LIMIT
    assert await port.refusal(identity, metadata, blocks=["embed"] * 5000) is Refusal.LIMIT
    async with peer_channel(port.address, "keeper", identity) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await data_pb2_grpc.DataStub(channel).Forward(iter(()), metadata=metadata)
        assert refusal_of(error.value) is Refusal.NOT_HELD


async def test_stalled_readers_give_their_places_to_others(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More readers than places open a transfer and take nothing; an honest one is served all the same."""
    large = memoryview(bytes(8 << 20))
    huge = {"param:weight": StateTensor("param:weight", "U8", (8 << 20,), large)}
    monkeypatch.setattr(port.library, "tensors", lambda version, block, optimizer: huge)
    identity = port.worker()
    channel = peer_channel(port.address, "keeper", identity)
    stub: Any = data_pb2_grpc.DataStub(channel)
    request = data_pb2.StateRequest(version=0, blocks=["embed"])
    stalled = [stub.FetchState(request, metadata=port.metadata(identity)) for _ in range(9)]
    await asyncio.gather(*(call.initial_metadata() for call in stalled[:1]))
    try:
        async with asyncio.timeout(30):
            frames = await port.fetch(identity, request, port.metadata(identity))
        assert sum(len(frame.chunk) for frame in frames) == 8 << 20
    finally:
        for call in stalled:
            call.cancel()
        await channel.close()


def test_damaged_files_are_not_served(tmp_path: Path) -> None:
    directory = write_prepared_job(tmp_path / "job")
    library = StateLibrary(Path(weights_url(directory)), str(directory / "checkpoints"))
    file = directory / "weights" / "00000000" / "head.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(NotHeld, match="damaged"):
        library.served(0, "head", optimizer=False)
    library.served(0, "embed", optimizer=False)
