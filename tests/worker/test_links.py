"""Links: addresses in turn, the certificate decides, and what a failed push says about the receiver."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from starlings_protos import data_pb2, frames
from starlings_protos.errors import abort
from starlings_protos.identity import Identity
from starlings_protos.messages import (
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Peer,
    Receipt,
    Refusal,
    WorkerId,
)
from starlings_worker.links import BACKGROUND_CHUNK_BYTES, AnswerLost, Links, PushError
from starlings_worker.meters import Meters
from starlings_worker.uplink import GIVE_WAY_AT_MOST_S, LinkClass, Uplink
from support.peer_servers import Certificates, never, peer_server, read_all, take


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


def _transfer(size: int) -> tuple[data_pb2.Header, list[bytes]]:
    key = MicrobatchKey(LeaseKind.TRAIN, 0, 0, 0)
    tensor = frames.tensor_header("gradient", data_pb2.DATA_TYPE_UINT8, (size,), size)
    return frames.make_header(MicrobatchHeader(key, 1, (), 1.0, 1), [tensor]), [bytes(size)]


def _links(certificates: Certificates, to: Identity, *addresses: str, stall_s: float = 5.0) -> Links:
    links = Links(certificates.worker(), Meters(), stall_s)
    links.update([Peer(WorkerId(to.id), addresses, incarnation=3)])
    return links


async def _push(links: Links, to: Identity, size: int = 100) -> Receipt:
    header, buffers = _transfer(size)
    return await links.push(WorkerId(to.id), "Forward", header, buffers, kind="forward")


def _closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_the_first_address_that_answers_is_used_and_its_bytes_are_counted(certificates: Certificates):
    peer = certificates.worker()
    async with peer_server(peer, take) as address:
        links = _links(certificates, peer, _closed_port(), address)
        assert await _push(links, peer, 3 << 20) == Receipt(1, 2, 0.0)
        assert (await links.connect(WorkerId(peer.id))).address == address
        assert links._meters.bytes_sent()["forward"] > 3 << 20
        assert links.incarnation_of(WorkerId(peer.id)) == 3
        await links.close()


async def test_nobody_there_is_a_certain_failure(certificates: Certificates):
    peer = certificates.worker()
    links = _links(certificates, peer, _closed_port())
    with pytest.raises(PushError, match="nobody of the job answers there") as failed:
        await _push(links, peer)
    assert failed.value.certain
    with pytest.raises(PushError, match="no address") as failed:
        await links.push(WorkerId("w0123456789abcdef"), "Forward", *_transfer(1), kind="forward")
    assert failed.value.certain
    await links.close()


async def test_whoever_has_another_certificate_gets_nothing(certificates: Certificates):
    peer, impostor = certificates.worker(), certificates.worker()
    reached = []

    async def note(incoming: Any, context: Any) -> data_pb2.Receipt:
        reached.append(await read_all(incoming))
        return data_pb2.Receipt()

    async with peer_server(impostor, note) as address:
        links = _links(certificates, peer, address)
        with pytest.raises(PushError) as failed:
            await _push(links, peer)
        assert failed.value.certain
        assert not reached
        await links.close()


async def test_a_refusal_is_certain_and_keeps_its_number_even_while_the_body_is_under_way(
    certificates: Certificates,
):
    async def refuse(incoming: Any, context: Any) -> data_pb2.Receipt:
        await anext(incoming)
        await abort(context, Refusal.BUSY, "no slot is free")

    peer = certificates.worker()
    async with peer_server(peer, refuse) as address:
        links = _links(certificates, peer, address)
        for size in (10, 40 << 20):
            with pytest.raises(PushError, match="no slot is free") as failed:
                await _push(links, peer, size)
            assert failed.value.certain
            assert failed.value.refusal is Refusal.BUSY
        await links.close()


async def test_a_receiver_that_has_it_already_answers_without_reading(certificates: Certificates):
    async def duplicate(incoming: Any, context: Any) -> data_pb2.Receipt:
        await anext(incoming)
        return data_pb2.Receipt(queued=7)

    peer = certificates.worker()
    async with peer_server(peer, duplicate) as address:
        links = _links(certificates, peer, address)
        assert (await _push(links, peer, 20 << 20)).queued == 7
        await links.close()


async def test_a_frozen_receiver_ends_a_push_in_doubt_within_the_stall_time(certificates: Certificates):
    peer = certificates.worker()
    async with peer_server(peer, never) as address:
        links = _links(certificates, peer, address, stall_s=0.5)
        for size in (10, 40 << 20):
            began = time.monotonic()
            with pytest.raises(PushError, match="did not take or answer") as failed:
                await _push(links, peer, size)
            assert not failed.value.certain
            assert time.monotonic() - began < 10
        await links.close()


async def test_a_lost_answer_leaves_doubt_though_nobody_is_there_any_more(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
):
    peer = certificates.worker()
    async with peer_server(peer, take) as address:
        links = _links(certificates, peer, address)

        async def ended_while_written_to(*_: Any, asks: bool) -> int:
            links.update([Peer(WorkerId(peer.id), (_closed_port(),))])
            raise AnswerLost("it ended the call while it was written to")

        monkeypatch.setattr(links, "_write", ended_while_written_to)
        with pytest.raises(PushError, match="nobody of the job answers there") as failed:
            await _push(links, peer)
        assert not failed.value.certain
        await links.close()


async def test_a_receiver_that_dies_meanwhile_leaves_doubt_and_a_new_one_is_found(certificates: Certificates):
    began = asyncio.Event()

    async def hold(incoming: Any, context: Any) -> data_pb2.Receipt:
        began.set()
        return await never(incoming, context)

    peer = certificates.worker()
    async with peer_server(peer, hold) as address:
        links = _links(certificates, peer, address)
        push = asyncio.create_task(_push(links, peer))
        await began.wait()
    with pytest.raises(PushError) as failed:
        await push
    assert not failed.value.certain
    async with peer_server(peer, take) as address:
        links.update([Peer(WorkerId(peer.id), (address,))])
        assert (await _push(links, peer)).free_slots == 2
        await links.close()


async def test_many_failures_leave_no_task_and_no_channel_behind(certificates: Certificates):
    """Scenario 25: a peer that is never there must not cost memory."""
    peer = certificates.worker()
    links = _links(certificates, peer, _closed_port())
    before = len(asyncio.all_tasks())
    for _ in range(30):
        with pytest.raises(PushError):
            await _push(links, peer)
    assert not links._links
    assert len(asyncio.all_tasks()) <= before + 1
    await links.close()


async def test_what_nobody_waits_for_gives_way_to_what_others_wait_for(certificates: Certificates):
    """Both at once behind a link of 4 MB/s: the urgent one has it nearly for itself, and the other still moves."""
    peer = certificates.worker()
    size = 4 << 20
    moved_at_s: list[float] = []
    async with peer_server(peer, take) as address:
        uplink = Uplink(LinkClass(4e6))
        links = Links(certificates.worker(), Meters(), 20.0, uplink)
        links.update([Peer(WorkerId(peer.id), (address,))])
        await links.connect(WorkerId(peer.id))

        async def background() -> float:
            header, buffers = _transfer(size)
            await links.push(
                WorkerId(peer.id),
                "Forward",
                header,
                buffers,
                kind="exchange",
                background=lambda: moved_at_s.append(time.monotonic()),
            )
            return time.monotonic()

        quiet = asyncio.create_task(background())
        await asyncio.sleep(0.05)
        assert links.pushes == 0  # State that is served does not wait for it either.
        begun_s = time.monotonic()
        await _push(links, peer, 1 << 20)
        urgent_s = time.monotonic() - begun_s
        meanwhile = sum(at_s > begun_s for at_s in moved_at_s)
        assert await quiet > begun_s + urgent_s
        await links.close()
    # In as much time it would have sent some 16 of its pieces, else.
    assert 0 < meanwhile <= urgent_s / GIVE_WAY_AT_MOST_S + 1
    assert len(moved_at_s) >= size / BACKGROUND_CHUNK_BYTES
