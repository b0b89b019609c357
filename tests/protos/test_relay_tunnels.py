"""Real tunnels through a real relay: end-to-end TLS that the relay cannot read, failover, and a way back to direct."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from starlings_protos import channels, data_pb2, frames
from starlings_protos.identity import RELAY, Identity
from starlings_protos.messages import (
    LeaseKind,
    MicrobatchHeader,
    MicrobatchKey,
    Peer,
    Receipt,
    WorkerId,
)
from starlings_protos.reach_messages import RelayPlace, Route
from starlings_protos.relay.core import RelayLimits
from starlings_protos.relay.dial_back import dial_back
from starlings_protos.relay.frames import BytesCarried, TunnelFrame
from starlings_protos.relay.listener import Listener, wanted_relays
from starlings_protos.relay.server import RelayServer, make_relay_server
from starlings_worker.links import Links, PushError
from starlings_worker.meters import Meters
from support.peer_servers import Certificates, peer_server, read_all, take

WITHIN_S = 30.0
SECRET = b"weights that are nobody's business " * 100


async def until(condition: Callable[[], object], within_s: float = WITHIN_S) -> float:
    """Waits; returns the seconds it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s, "it did not happen"
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


class Recording(RelayServer):
    """Keeps all that it passes on."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        super().__init__(limits)
        self.seen = bytearray()
        inner = self.core.received

        def received(number: int, frame: TunnelFrame, now_s: float) -> None:
            if isinstance(frame, BytesCarried):
                self.seen += frame.chunk
            inner(number, frame, now_s)

        self.core.received = received  # type: ignore[method-assign]


@dataclass
class Running:
    service: Recording
    place: RelayPlace
    kill: Callable[[], Any]


@asynccontextmanager
async def relay(certificates: Certificates, identity: Identity | None = None) -> AsyncIterator[Running]:
    """The coordinator's relay, or a worker's."""
    identity = identity or certificates.authority.issue_identity(RELAY, time.time())
    service = Recording()
    server = make_relay_server(service)
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identity))
    await server.start()
    beating = asyncio.create_task(service.beat())
    place = RelayPlace(identity.id, (f"127.0.0.1:{port}",))
    try:
        yield Running(service, place, lambda: server.stop(None))
    finally:
        beating.cancel()
        await server.stop(None)


def listener(identity: Identity, address: str, on_change: Callable[[], None] = lambda: None) -> Listener:
    host, _, port = address.rpartition(":")

    async def accept(worker_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(host, int(port))

    return Listener(lambda: identity, accept, on_change, random.Random(1))


def links_to(certificates: Certificates, peer: Identity, *relays: RelayPlace, direct: str = "") -> Links:
    links = Links(certificates.worker(), Meters(), upgrade_every_s=0.3)
    links.update([Peer(WorkerId(peer.id), (direct or "127.0.0.1:1",), incarnation=1)])
    links.reroute([Route(WorkerId(peer.id), (), relays)])
    return links


async def push(links: Links, to: Identity, body: bytes = SECRET) -> Receipt:
    key = MicrobatchKey(LeaseKind.TRAIN, 0, 0, 0)
    tensor = frames.tensor_header("gradient", data_pb2.DATA_TYPE_UINT8, (len(body),), len(body))
    header = frames.make_header(MicrobatchHeader(key, 1, (), 1.0, 1), [tensor])
    return await links.push(WorkerId(to.id), "Forward", header, [body], kind="forward")


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


async def test_a_transfer_goes_through_and_the_relay_sees_only_ciphertext(certificates: Certificates) -> None:
    peer = certificates.worker()
    got: list[bytes] = []

    async def keep(frames_: AsyncIterator[data_pb2.Frame], context: Any) -> data_pb2.Receipt:
        got.append(b"".join([frame.chunk async for frame in frames_]))
        return data_pb2.Receipt(queued=1)

    async with relay(certificates) as running, peer_server(peer, keep) as address:
        behind = listener(peer, address)
        behind.hold([running.place])
        await until(lambda: behind.attached == ("relay",))
        links = links_to(certificates, peer, running.place)
        body = SECRET + random.Random(0).randbytes(3 << 20)
        assert (await push(links, peer, body)).queued == 1
        assert links.relayed == {peer.id: "relay"}
        assert got == [body]
        assert len(running.service.seen) > len(body)
        for part in (SECRET[:35], body[-64:], b"gradient", b"starlings-assignment"):
            assert part not in running.service.seen
        running.service.core.validate()
        await links.close()
        await behind.close()
        await until(lambda: running.service.core.tunnel_count == 0)
        assert running.service.core.connections == 0


async def test_somebody_else_behind_the_tunnel_is_refused(certificates: Certificates) -> None:
    """A relay, or a worker, that answers in another's place fails by the certificate."""
    peer, impostor = certificates.worker(), certificates.worker()
    async with relay(certificates) as running, peer_server(impostor, take) as address:
        behind = listener(peer, address)
        behind.hold([running.place])
        await until(lambda: behind.attached)
        links = links_to(certificates, peer, running.place)
        with pytest.raises(PushError) as failed:
            await push(links, peer)
        assert failed.value.certain
        await links.close()
        await behind.close()


async def test_a_stranger_gets_no_tunnel(certificates: Certificates) -> None:
    stranger = Certificates("another").worker()
    async with relay(certificates) as running:
        behind = listener(stranger, "127.0.0.1:1")
        behind.hold([running.place])
        await until(lambda: behind.last_failure)
        assert running.service.core.tunnel_count == 0
        await behind.close()


async def test_who_was_shut_out_loses_its_tunnels(certificates: Certificates) -> None:
    peer = certificates.worker()
    async with relay(certificates) as running:
        behind = listener(peer, "127.0.0.1:1")
        behind.hold([running.place])
        await until(lambda: behind.attached)
        running.service.shut_out(peer.id)
        await until(lambda: "shut out" in behind.last_failure)
        assert not behind.attached
        await behind.close()


async def test_links_move_to_the_other_relay_when_one_dies(certificates: Certificates) -> None:
    peer, helper = certificates.worker(), certificates.worker()
    async with (
        relay(certificates) as first,
        relay(certificates, helper) as second,
        peer_server(peer, take) as address,
    ):
        behind = listener(peer, address)
        behind.hold([first.place, second.place])
        await until(lambda: behind.attached == ("relay", helper.id))
        links = links_to(certificates, peer, first.place, second.place)
        await push(links, peer)
        used = links.relayed[WorkerId(peer.id)]
        dying, left = (first, helper.id) if used == "relay" else (second, "relay")
        began_s = time.monotonic()
        await dying.kill()
        while links.relayed != {peer.id: left}:
            assert time.monotonic() - began_s < 10.0
            with contextlib.suppress(PushError):
                await push(links, peer)
        await until(lambda: behind.attached == (left,))
        await links.close()
        await behind.close()


async def test_a_direct_way_that_appears_is_used_and_nothing_breaks(certificates: Certificates) -> None:
    peer = certificates.worker()
    async with relay(certificates) as running, peer_server(peer, take) as address:
        behind = listener(peer, address)
        behind.hold([running.place])
        await until(lambda: behind.attached)
        links = links_to(certificates, peer, running.place)
        await push(links, peer)
        assert links.relayed
        holding = asyncio.Event()

        async def slow() -> None:
            async with links._using(WorkerId(peer.id)) as link:
                await holding.wait()
                assert link.usable

        call = asyncio.create_task(slow())
        await asyncio.sleep(0)
        links.reroute([Route(WorkerId(peer.id), (address,), (running.place,))])
        await until(lambda: not links.relayed)
        assert (await links.connect(WorkerId(peer.id))).address == address
        holding.set()
        await call
        await until(lambda: running.service.core.connections == 0)
        await push(links, peer)
        await links.close()
        await behind.close()


async def test_a_slow_receiver_fills_no_memory(certificates: Certificates) -> None:
    peer = certificates.worker()
    reading = asyncio.Event()

    async def late(frames_: AsyncIterator[data_pb2.Frame], context: Any) -> data_pb2.Receipt:
        await context.send_initial_metadata((("starlings-admitted", "1"),))
        await reading.wait()
        return data_pb2.Receipt(queued=await read_all(frames_) % 1000)

    async with relay(certificates) as running, peer_server(peer, late) as address:
        behind = listener(peer, address)
        behind.hold([running.place])
        await until(lambda: behind.attached)
        links = links_to(certificates, peer, running.place)
        pushing = asyncio.create_task(push(links, peer, bytes(20 << 20)))
        await until(lambda: running.service.core.carried_bytes > 100_000)
        core, last = running.service.core, -1
        while core.carried_bytes != last:
            last = core.carried_bytes
            await asyncio.sleep(0.3)
        assert core.waiting_bytes <= 2 << 20
        assert last < 16 << 20, "all of it went somewhere although nobody reads"
        reading.set()
        await pushing
        await links.close()
        await behind.close()


async def test_dialling_back_tells_who_answers(certificates: Certificates) -> None:
    peer, other = certificates.worker(), certificates.worker()
    async with peer_server(peer, take) as address:
        reached, failure = await dial_back(peer.id, (address, "127.0.0.1:1"), other)
        assert reached == (address,)
        assert "127.0.0.1:1" in failure
        assert "refused" in failure
        reached, failure = await dial_back(other.id, (address,), other)
        assert reached == ()
        assert peer.id in failure
        reached, failure = await dial_back(peer.id, (address,), Certificates("another").worker())
        assert "something else" in failure


def test_relays_that_fail_are_wanted_last() -> None:
    a, b, c = (RelayPlace(name, ("h:1",)) for name in "abc")
    assert wanted_relays((a, b, c), frozenset()) == (a, b)
    assert wanted_relays((a, b, c), frozenset("a")) == (b, c)
    assert wanted_relays((a, b, c), frozenset("ab")) == (a, b, c)
    assert wanted_relays((), frozenset()) == ()
