"""A checkpoint is pulled from donors that lie, break off or die, and is written whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from starlings_coordinator.keeper.library import StateLibrary
from starlings_coordinator.keeper.process import Keeper
from starlings_coordinator.keeper.pull import Puller
from starlings_coordinator.keeper.saving import BlockSource, SaveFailed, SaveOrder, Written, save
from starlings_coordinator.signing import AssignmentSigner
from starlings_job.checkpoint import load_manifest, read_block, versions
from starlings_job.checkpoint_owner import Owner
from starlings_job.prepared import JOB_FILE, load_profile, weights_url
from starlings_job.spec import load_job
from starlings_job.state import block_digest
from starlings_protos import pipes, process_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.convert import to_proto
from starlings_protos.identity import KEEPER, Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.messages import Peer, WorkerId
from starlings_protos.state_transfer import ServedBlock, StateTensor
from support.coordinator_harness import FakeDonor, open_donor, until
from support.prepared_job import block_names, block_state, write_prepared_job

KEY = new_key()
OWNER = Owner("test", "a" * 43)


@dataclass
class Desk:
    directory: Path
    authority: CertificateAuthority
    library: StateLibrary
    puller: Puller
    donors: list[tuple[Peer, FakeDonor]]

    @property
    def url(self) -> str:
        return str(self.directory / "checkpoints")

    async def donor(self, spoil: Callable[[ServedBlock], ServedBlock] = lambda block: block) -> Peer:
        key = new_key()
        peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
        pem = self.authority.issue(key.public_key(), peer, time.time())
        identity = Identity(peer, key_to_pem(key), pem, self.authority.certificate_pem)
        opened = await open_donor(identity, "test", AssignmentSigner(KEY, "test").key_der)
        opened.library.spoil = spoil
        self.donors.append((Peer(WorkerId(peer.id), (opened.address,)), opened))
        return self.donors[-1][0]

    async def save(
        self, *peers: Peer, version: int = 4, digests: bool = True, keep: int = 2, owner: Owner = OWNER
    ) -> Written:
        blocks = tuple(
            BlockSource(b, peers, block_digest(block_state(b, version)) if digests else "")
            for b in block_names()
        )
        return await save(
            SaveOrder(version, 100, blocks, owner, "digest"),
            puller=self.puller,
            library=self.library,
            profile=load_profile(self.directory),
            directory=self.directory / "elsewhere",
            url=self.url,
            keep=keep,
        )

    def start(self) -> process_pb2.StartKeeper:
        """What the keeper's process is told."""
        identity = self.authority.issue_identity(KEEPER, time.time())
        start = process_pb2.StartKeeper(
            key_pem=identity.key_pem,
            certificate_pem=identity.certificate_pem,
            ca_pem=identity.ca_pem,
            assignment_key_der=AssignmentSigner(KEY, "test").key_der,
            job_directory=str(self.directory),
            listen_host="127.0.0.1",
            advertise_hosts=["127.0.0.1"],
            checkpoint_url=self.url,
            keep=2,
            job="test",
            wall_time_s=time.time(),
        )
        to_proto(AssignmentSigner(KEY, "test").sign_keeper(time.time()), start.assignment)
        return start

    def order(self, version: int, donor: Peer) -> process_pb2.ToKeeper:
        job = load_job(self.directory / JOB_FILE).to_json()
        order = process_pb2.SaveCheckpoint(version=version, tokens=version, job_json=job)
        for block in block_names():
            to_proto(donor, order.donors.add(block=block).peers.add())
        return process_pb2.ToKeeper(save=order)

    def saved(self, version: int = 4) -> dict[str, dict[str, bytes]]:
        return {
            b: {n: bytes(t.data) for n, t in read_block(self.url, version, b).items()} for b in block_names()
        }


def _right(version: int = 4) -> dict[str, dict[str, bytes]]:
    return {b: {n: bytes(t.data) for n, t in block_state(b, version).items()} for b in block_names()}


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    directory = write_prepared_job(tmp_path / "job")
    authority = CertificateAuthority.create("test", time.time())
    identity = authority.issue_identity(KEEPER, time.time())
    signed = AssignmentSigner(KEY, "test").sign_keeper(time.time())
    library = StateLibrary(Path(weights_url(directory)), str(directory / "checkpoints"))
    async with Puller(lambda: identity, lambda: signed, stalled_after_s=2.0) as puller:
        desk = Desk(directory, authority, library, puller, [])
        yield desk
    await asyncio.gather(*(donor.close() for _, donor in desk.donors))


def _flipped(block: ServedBlock) -> ServedBlock:
    """Wrong bytes under right hashes of the wrong bytes: only the digest tells."""
    first, *rest = block.tensors
    data = bytearray(first.data)
    data[0] ^= 1
    return ServedBlock(block.version, block.block, (replace(first, data=memoryview(data)), *rest))


def _bad_hash(block: ServedBlock) -> ServedBlock:
    """Right header, wrong bytes behind it: a byte flipped in transit."""
    header = block.header()
    return ServedBlock(block.version, block.block, _flipped(block).tensors, _header=header)


def _renamed(block: ServedBlock) -> ServedBlock:
    first, *rest = block.tensors
    return ServedBlock(block.version, block.block, (replace(first, name="param:other"), *rest))


def _reshaped(block: ServedBlock) -> ServedBlock:
    tensors = tuple(
        replace(t, shape=tuple(reversed(t.shape))) if len(t.shape) == 2 else t for t in block.tensors
    )
    return ServedBlock(block.version, block.block, tensors)


def _enlarged(block: ServedBlock) -> ServedBlock:
    huge = StateTensor("param:more", "U8", (1 << 24,), memoryview(bytes(1 << 24)))
    return ServedBlock(block.version, block.block, (*block.tensors, huge))


def _halved(block: ServedBlock) -> ServedBlock:
    """Without the optimizer's tensors half of the state is lost, and the digest tells."""
    parameters = tuple(t for t in block.tensors if t.name.startswith("param:"))
    return ServedBlock(block.version, block.block, parameters)


LIES = [_flipped, _bad_hash, _renamed, _reshaped, _enlarged, _halved]


async def test_good_donor_one_block_after_the_other(desk: Desk) -> None:
    peer = await desk.donor()
    written = await desk.save(peer)
    assert desk.saved() == _right()
    assert written.path == f"{desk.url}/00000004"
    assert written.byte_count == load_manifest(desk.url, 4).byte_count
    assert load_manifest(desk.url, 4).facts == {"tokens": 100, "job_digest": "digest", **OWNER.facts}
    assert desk.donors[0][1].library.served_blocks == [(4, b) for b in block_names()]


async def test_how_many_steps_each_optimizer_made_is_written_down(desk: Desk) -> None:
    steps = {block: 40 + number for number, block in enumerate(block_names())}
    peer = await desk.donor(lambda block: replace(block, optimizer_steps=steps[block.block], _header=None))
    await desk.save(peer)
    written = load_manifest(desk.url, 4).blocks
    assert {block: entry.optimizer_steps for block, entry in written.items()} == steps
    # And it is what whoever loads this version is told.
    for block in block_names():
        assert desk.library.served(4, block, optimizer=True).optimizer_steps == steps[block]
        assert desk.library.served(4, block, optimizer=False).optimizer_steps == 0


@pytest.mark.parametrize("lie", LIES)
async def test_lying_donor_is_found_out_and_another_one_asked(desk: Desk, lie: Any) -> None:
    liar, honest = await desk.donor(lie), await desk.donor()
    await desk.save(liar, honest)
    assert desk.saved() == _right()


async def test_only_liars_leave_the_previous_checkpoint(desk: Desk) -> None:
    await desk.save(await desk.donor(), version=2)
    with pytest.raises(SaveFailed, match=r"block embed: .*digest is"):
        await desk.save(await desk.donor(_flipped))
    assert versions(desk.url) == (2,)
    assert [p.name for p in Path(desk.url).iterdir()] == ["00000002"]


async def test_dead_donors_are_passed_over(desk: Desk) -> None:
    nobody = Peer(WorkerId("w" + "0" * 16), ("127.0.0.1:1",))
    homeless = Peer(WorkerId("w" + "1" * 16), ())
    alive = await desk.donor()
    # The first of its addresses is stale.
    moved = replace(alive, addresses=("127.0.0.1:1", *alive.addresses))
    await desk.save(nobody, homeless, moved)
    assert desk.saved() == _right()


async def test_donor_that_dies_in_the_middle_is_replaced_where_it_stopped(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second donor is asked only for the bytes that the first one did not send."""
    offsets: list[int] = []
    real = Puller._frames

    def broken(self: Puller, peer: Peer, request: Any) -> Any:
        offsets.append(request.offset)
        if peer.worker_id != first.worker_id:
            return real(self, peer, request)
        return _until_chunk(real(self, peer, request))

    monkeypatch.setattr(Puller, "_frames", broken)
    monkeypatch.setattr("starlings_protos.state_transfer.CHUNK_BYTES", 4096)
    first, second = await desk.donor(), await desk.donor()
    await desk.save(first, second)
    assert desk.saved() == _right()
    assert any(offset > 0 for offset in offsets)


async def _until_chunk(frames: AsyncIterator[Any]) -> AsyncIterator[Any]:
    count = 0
    async for frame in frames:
        yield frame
        count += 1
        if count == 3:
            raise ConnectionResetError("the donor died")


async def test_donor_that_stalls_is_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.puller, "_stalled_after_s", 0.3)
    stalled, honest = await desk.donor(), await desk.donor()
    library = desk.donors[0][1].library
    monkeypatch.setattr(library, "served", lambda *args, **kwargs: time.sleep(2.0))
    await desk.save(stalled, honest)
    assert desk.saved() == _right()


async def test_impostor_at_a_donors_address_is_not_believed(desk: Desk) -> None:
    """TLS expects the donor's very id; whoever else answers there is a stranger."""
    honest, other = await desk.donor(), await desk.donor()
    disguised = replace(other, addresses=honest.addresses)
    with pytest.raises(SaveFailed):
        await desk.save(disguised)


async def test_full_disk_keeps_the_previous_version_and_says_so(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await desk.donor()
    await desk.save(peer, version=2)
    real, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveFailed, match="disk is full") as failed:
        await desk.save(peer, version=4)
    assert failed.value.exit_code == 9
    assert versions(desk.url) == (2,)
    assert desk.saved(2) == _right(2)


async def test_retention_forgets_the_oldest(desk: Desk) -> None:
    peer = await desk.donor()
    for version in (1, 2, 3):
        await desk.save(peer, version=version, keep=2)
    assert versions(desk.url) == (2, 3)
    assert desk.library.versions() == (0, 2, 3)


async def test_order_that_lacks_a_block_is_refused(desk: Desk) -> None:
    order = SaveOrder(4, 0, (BlockSource("embed", (), ""),), OWNER, "digest")
    with pytest.raises(SaveFailed, match=r"missing: head"):
        await save(
            order,
            puller=desk.puller,
            library=desk.library,
            profile=load_profile(desk.directory),
            directory=desk.directory,
            url=desk.url,
            keep=2,
        )
    assert versions(desk.url) == ()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Owner("other", "a" * 43), "of the job 'other'"),
        (Owner("test", "b" * 43), "of another job that is called 'test' too"),
    ],
)
async def test_the_checkpoints_of_another_job_are_left_alone(desk: Desk, other: Owner, says: str) -> None:
    peer = await desk.donor()
    await desk.save(peer, version=2, owner=other)
    before = _right(2)
    for version in (2, 4):
        with pytest.raises(SaveFailed, match=says) as failed:
            await desk.save(peer, version=version)
        assert failed.value.exit_code == 2
    assert versions(desk.url) == (2,)
    assert load_manifest(desk.url, 2).facts["authority"] == other.authority
    assert desk.saved(2) == before
    assert desk.donors[0][1].library.served_blocks == [(2, b) for b in block_names()], (
        "nobody was asked in vain"
    )


def _reports(said: io.BytesIO) -> list[tuple[str | None, Any]]:
    """What a keeper has said so far after its first word, by kind."""
    spoken = io.BytesIO(said.getvalue())
    messages = list(iter(lambda: pipes.read_blocking(spoken, process_pb2.FromKeeper), None))
    return [(m.WhichOneof("body"), getattr(m, m.WhichOneof("body") or "")) for m in messages[1:]]


async def test_a_save_that_runs_is_finished_and_the_newest_order_follows(desk: Desk) -> None:
    """Orders come faster than one can be carried out."""
    donor = await desk.donor()
    held = threading.Event()

    def hold(block: ServedBlock) -> ServedBlock:
        assert held.wait(20)
        return block

    desk.donors[0][1].library.spoil = hold
    said = io.BytesIO()
    keeper = Keeper(desk.start(), said)
    await keeper.open()
    try:
        for version in (1, 2, 3):
            keeper.handle(desk.order(version, donor))
        library = desk.donors[0][1].library
        await until(lambda: library.served_blocks, "the first order is under way")
        keeper.handle(desk.order(4, donor))
        held.set()
        await until(lambda: len(_reports(said)) == 4, "every order has its answer")
    finally:
        held.set()
        await keeper.close()
    found = _reports(said)
    assert versions(desk.url) == (3, 4)
    assert [(kind, body.version) for kind, body in found if kind == "saved"] == [("saved", 3), ("saved", 4)]
    assert [body.version for kind, body in found if kind == "failed"] == [1, 2]
    assert found[0][1].reason == "version 2 is to be saved instead"
