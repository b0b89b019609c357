"""Simulated workers for `bus.py`: control streams that heartbeat, and telemetry over gRPC or over MQTT. One process
holds many; each worker has its own certificate, its own stream and, for MQTT, its own connection to the broker.

    grpc     telemetry on the control stream
    mqtt     telemetry to the broker
    listen   subscribes to everybody's telemetry and counts what comes

Standard input: a line of JSON with what to do, then "go", then "stop". Standard output: a line of JSON per stage.
MQTT is spoken by hand (OASIS MQTT 5.0, sections 3.1, 3.3, 3.8): ten thousand clients of a library would measure it.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from coordinator_load import Counted, Worker, line, say, signed_identity

from starlings_protos import control_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_protos.bus.topics import Kind, Topic
from starlings_protos.identity import Identity

# A handshake that a busy machine did not get to in time is tried again, as a real worker would.
JOIN_TRIES = 5
KEEPALIVE_S = 60


def telemetry(worker_id: str, rng: random.Random) -> control_pb2.Telemetry:
    """A worker's counters, about as large as they are after an hour."""
    message = control_pb2.Telemetry(worker_id=worker_id, incarnation=1)
    sample = message.samples.add(wall_time_s=time.time(), progress=rng.getrandbits(20), version=1000)
    for name in ("forward", "backward", "exchange", "state", "control"):
        setattr(sample, f"{name}_bytes", rng.getrandbits(34))
    for name in ("compute", "serialise", "send", "wait"):
        setattr(sample, f"{name}_s", rng.uniform(0, 1e4))
    return message


# ------------------------------------------------------------------ MQTT


def _string(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()


def packet(kind: int, body: bytes) -> bytes:
    length, size = len(body), bytearray()
    while True:
        length, low = divmod(length, 128)
        size.append(low | (0x80 if length else 0))
        if not length:
            return bytes([kind]) + bytes(size) + body


def connect(client_id: str) -> bytes:
    return packet(
        0x10, _string("MQTT") + bytes([5, 2]) + KEEPALIVE_S.to_bytes(2, "big") + b"\0" + _string(client_id)
    )


def publish(topic: str, payload: bytes) -> bytes:
    return packet(0x30, _string(topic) + b"\0" + payload)


PING = packet(0xC0, b"")


def subscribe(topic: str) -> bytes:
    return packet(0x82, b"\0\1" + b"\0" + _string(topic) + b"\0")


async def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Who only waits or listens has to say so, or the broker ends the connection (section 3.1.2.10)."""
    while True:
        await asyncio.sleep(KEEPALIVE_S / 2)
        writer.write(PING)


async def read_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    kind = (await reader.readexactly(1))[0]
    length = shift = 0
    while True:
        low = (await reader.readexactly(1))[0]
        length |= (low & 0x7F) << shift
        shift += 7
        if low < 0x80:
            return kind, await reader.readexactly(length)


async def reach_broker(
    port: int, identity: Identity, scratch: Path
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=identity.ca_pem.decode())
    pair = scratch / identity.id
    pair.write_bytes(identity.key_pem + identity.certificate_pem)
    context.load_cert_chain(pair)
    pair.unlink()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1 << 12)
    writer.write(connect(identity.id))
    kind, body = await read_packet(reader)
    if kind != 0x20 or body[1]:
        raise RuntimeError(f"the broker refused {identity.id}: {body!r}")
    return reader, writer


# ------------------------------------------------------------------ workers


@dataclass
class Sent:
    telemetry: int = 0
    late: int = 0


class TalkingWorker(Worker):
    """One that sends telemetry every `every_s`, here or there."""

    counters_every_s = float("inf")

    def __init__(
        self, identity: Identity, control: str, counted: Counted, number: int, every_s: float, sent: Sent
    ) -> None:
        super().__init__(identity, control, counted, number)
        self.every_s, self.sent = every_s, sent
        self.writer: asyncio.StreamWriter | None = None
        self.waiting: asyncio.Task[None] | None = None

    async def reach(self, port: int, scratch: Path) -> None:
        reader, self.writer = await reach_broker(port, self.identity, scratch)
        self.tasks.append(asyncio.create_task(self.drain(reader)))
        self.waiting = asyncio.create_task(keep_alive(self.writer))
        self.tasks.append(self.waiting)

    async def drain(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 12):
            pass
        self.counted.lost += 1
        self.counted.reasons.add("the broker closed a connection")

    def talk(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
        self.tasks.append(asyncio.create_task(self.tell()))

    async def tell(self) -> None:
        message = telemetry(self.identity.id, self.rng)
        topic = str(Topic("crowd", Kind.TELEMETRY, self.identity.id))
        wrapped = control_pb2.ToCoordinator(telemetry=message)
        next_s = time.monotonic() + self.every_s * self.rng.random()
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            sample = (wrapped.telemetry if self.writer is None else message).samples[0]
            sample.wall_time_s = time.time()
            sample.progress += 1
            if self.writer is None:
                await self.say(wrapped)
            else:
                self.writer.write(publish(topic, message.SerializeToString()))
                await self.writer.drain()
            self.sent.telemetry += 1
            next_s += self.every_s
            if time.monotonic() > next_s:
                self.sent.late += 1
                next_s = time.monotonic()

    async def close(self) -> None:
        await super().close()
        if self.writer is not None:
            self.writer.transport.abort()


async def talk(order: dict[str, Any]) -> None:
    authority = CertificateAuthority.load_or_create(
        Path(order["directory"]) / "ca", order["job"], time.time()
    )
    identities = [signed_identity(authority) for _ in range(order["workers"])]
    say("prepared")
    await line()
    counted, sent, gate = Counted(), Sent(), asyncio.Semaphore(order["connecting_at_once"])

    with tempfile.TemporaryDirectory(prefix="starlings-bus-load-") as scratch:

        async def joined(number: int, identity: Identity) -> TalkingWorker:
            async with gate:
                for left in reversed(range(JOIN_TRIES)):
                    worker = TalkingWorker(
                        identity, order["control"], counted, number, order["every_s"], sent
                    )
                    try:
                        await worker.join()
                        break
                    except grpc.aio.AioRpcError as error:
                        await worker.close()
                        if error.code() is not grpc.StatusCode.UNAVAILABLE or not left:
                            raise
                worker.begin()
                if order["mode"] == "mqtt":
                    await worker.reach(order["broker_port"], Path(scratch))
                return worker

        workers = await asyncio.gather(*(joined(n, i) for n, i in enumerate(identities)))
    say("connected", interval_s=max(w.interval_s for w in workers))
    await line()
    for worker in workers:
        worker.talk()
    while (await line()) == "count":
        say("counted", telemetry=sent.telemetry, beats=counted.beats, late=sent.late, at_s=time.monotonic())
    say("done", lost=counted.lost, reasons=sorted(counted.reasons))
    await asyncio.gather(*(worker.close() for worker in workers))


async def listen(order: dict[str, Any]) -> None:
    """Counts as an observer would hear it."""
    authority = CertificateAuthority.load_or_create(
        Path(order["directory"]) / "ca", order["job"], time.time()
    )
    heard = 0
    with tempfile.TemporaryDirectory(prefix="starlings-bus-load-") as scratch:
        reader, writer = await reach_broker(order["broker_port"], signed_identity(authority), Path(scratch))
    writer.write(subscribe(f"starlings/v1/{order['job']}/worker/+/telemetry"))

    async def hear() -> None:
        nonlocal heard
        while True:
            kind, _ = await read_packet(reader)
            heard += kind & 0xF0 == 0x30

    hearing, waiting = asyncio.create_task(hear()), asyncio.create_task(keep_alive(writer))
    say("listening")
    while (await line()) == "count":
        say("counted", telemetry=heard, at_s=time.monotonic())
    hearing.cancel()
    waiting.cancel()
    writer.transport.abort()


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    asyncio.run(listen(given) if given["mode"] == "listen" else talk(given))
