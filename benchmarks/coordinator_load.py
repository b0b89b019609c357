"""Simulated workers for `coordinator.py`: real TLS, real streams, nothing behind them. One process holds many.

    beat    identities signed by the job's authority beforehand, then streams that heartbeat until told to stop
    storm   everybody joins at once as `starlings join` does: pin, token, certificate, control stream, Welcome

Standard input: a line of JSON with what to do, then "go", then "stop". Standard output: a line of JSON per stage.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from starlings_protos import control_pb2, control_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.channels import control_channel
from starlings_protos.identity import Identity, PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.invite import parse_invite
from starlings_protos.telemetry import TELEMETRY_INTERVAL_S
from starlings_worker.enrol import enrol

# As a demo's job has them.
KINDS = ("embed", "layer", "head")
SENT = ("forward_bytes", "backward_bytes", "exchange_bytes", "state_bytes", "control_bytes")
SPENT = ("compute_s", "serialise_s", "send_s", "wait_s")
# Handshakes at once in one generator: more only fight for its core.
CONNECTING_AT_ONCE = 32
JOIN_PATIENCE_S = 60.0


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def line() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


@dataclass
class Counted:
    beats: int = 0
    acks: int = 0
    lost: int = 0
    latencies_s: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)


class Worker:
    """One control stream that says what an idle worker says."""

    # Between two messages with counters on the stream.
    counters_every_s = TELEMETRY_INTERVAL_S

    def __init__(self, identity: Identity, control: str, counted: Counted, number: int) -> None:
        self.identity, self.counted = identity, counted
        self.host_id = f"host-{identity.id}"
        self.channel = control_channel(control, identity)
        self.call: Any = control_pb2_grpc.ControlStub(self.channel).Session()
        self.interval_s = 2.0
        self.sent_at_s: float | None = None
        self.rng = random.Random(number)
        self.tasks: list[asyncio.Task[None]] = []
        # A call takes one message at a time.
        self.writing = asyncio.Lock()

    async def say(self, message: control_pb2.ToCoordinator) -> None:
        async with self.writing:
            await self.call.write(message)

    async def join(self) -> None:
        """From the TCP connection to the Welcome."""
        hello = control_pb2.ToCoordinator()
        hello.hello.worker_id = self.identity.id
        hello.hello.protocol_min = hello.hello.protocol_max = 1
        hello.hello.version = "0.1.0"
        hello.hello.numeric_class = "cpu/avx2/2.10"
        hello.hello.host_id = self.host_id
        hello.hello.device = "cpu"
        hello.hello.wall_time_s = time.time()
        hello.hello.session_nonce = self.rng.getrandbits(60)
        await self.call.write(hello)
        while (message := await self.call.read()).WhichOneof("body") != "welcome":
            pass
        self.interval_s = message.welcome.heartbeat_interval_s
        if message.welcome.probe_now:
            await self.report()

    async def report(self) -> None:
        message = control_pb2.ToCoordinator()
        report = message.probe_report
        for kind in KINDS:
            report.forward_seconds[kind] = report.backward_seconds[kind] = 0.01
        report.memory_bytes = 8 << 30
        report.addresses.append("127.0.0.1:7710")
        await self.say(message)

    def begin(self) -> None:
        self.tasks = [asyncio.create_task(self.read()), asyncio.create_task(self.beat())]

    async def beat(self) -> None:
        message = control_pb2.ToCoordinator()
        heartbeat = message.heartbeat
        counters = control_pb2.ToCoordinator()
        sample = counters.telemetry.samples.add(wall_time_s=time.time())
        counters.telemetry.worker_id = self.identity.id
        for kind in SENT:
            setattr(sample, kind, self.rng.getrandbits(34))
        for kind in SPENT:
            setattr(sample, kind, self.rng.uniform(0, 1e4))
        next_s = time.monotonic() + self.interval_s * self.rng.random()
        counted_s = time.monotonic() - min(self.counters_every_s, 60.0) * self.rng.random()
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            heartbeat.progress += 1
            if time.monotonic() - counted_s >= self.counters_every_s:
                counted_s = time.monotonic()
                await self.say(counters)
            self.sent_at_s = time.monotonic()
            await self.say(message)
            self.counted.beats += 1
            next_s += self.interval_s

    async def read(self) -> None:
        try:
            while isinstance(message := await self.call.read(), control_pb2.ToWorker):
                body = message.WhichOneof("body")
                if body == "heartbeat_ack":
                    self.counted.acks += 1
                    self.interval_s = message.heartbeat_ack.heartbeat_interval_s or self.interval_s
                    if self.sent_at_s is not None:
                        self.counted.latencies_s.append(time.monotonic() - self.sent_at_s)
                    self.sent_at_s = None
                elif body == "welcome" and message.welcome.probe_now:
                    await self.report()
            self.counted.reasons.add("the stream ended")
        except grpc.aio.AioRpcError as error:
            self.counted.reasons.add(f"{error.code().name}: {error.details()}")
        self.counted.lost += 1

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.call.cancel()
        await self.channel.close()


def signed_identity(authority: CertificateAuthority) -> Identity:
    key = new_key()
    peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
    pem = authority.issue(key.public_key(), peer, time.time())
    return Identity(peer, key_to_pem(key), pem, authority.certificate_pem)


async def beat(order: dict[str, Any]) -> None:
    authority = CertificateAuthority.load_or_create(
        Path(order["directory"]) / "ca", order["job"], time.time()
    )
    identities = [signed_identity(authority) for _ in range(order["workers"])]
    say("prepared")
    await line()
    counted, gate = Counted(), asyncio.Semaphore(CONNECTING_AT_ONCE)
    begun_s = time.monotonic()

    async def joined(number: int, identity: Identity) -> Worker:
        async with gate:
            worker = Worker(identity, order["control"], counted, number)
            await worker.join()
            worker.begin()
            return worker

    workers = await asyncio.gather(*(joined(n, i) for n, i in enumerate(identities)))
    say("connected", seconds=time.monotonic() - begun_s, interval_s=max(w.interval_s for w in workers))
    await line()
    middle = counted.latencies_s or [float("nan")]
    say(
        "beaten",
        beats=counted.beats,
        acks=counted.acks,
        lost=counted.lost,
        reasons=sorted(counted.reasons),
        latency_median_s=statistics.median(middle),
        latency_p99_s=sorted(middle)[int(0.99 * (len(middle) - 1))],
    )
    await asyncio.gather(*(worker.close() for worker in workers))


async def storm(order: dict[str, Any]) -> None:
    invite = parse_invite(order["invite"])
    counted, workers = Counted(), []
    with tempfile.TemporaryDirectory(prefix="starlings-storm-") as scratch:
        say("prepared")
        await line()
        begun_s = time.monotonic()
        enrolled_s: list[float] = []
        welcomed_s: list[float] = []

        async def join(number: int) -> None:
            membership = (
                await enrol(invite, Path(scratch) / str(number), patience_s=JOIN_PATIENCE_S)
            ).membership
            enrolled_s.append(time.monotonic() - begun_s)
            worker = Worker(membership.identity, order["control"], counted, number)
            workers.append(worker)
            await worker.join()
            worker.begin()
            welcomed_s.append(time.monotonic() - begun_s)

        outcomes = await asyncio.gather(*(join(n) for n in range(order["workers"])), return_exceptions=True)
        failures = [repr(o) for o in outcomes if isinstance(o, BaseException)]
        say(
            "stormed",
            failures=failures[:5],
            failed=len(failures),
            enrolled_s=max(enrolled_s, default=0.0),
            welcomed_s=max(welcomed_s, default=0.0),
            welcomed_median_s=statistics.median(welcomed_s or [0.0]),
            generator_cpu_s=time.process_time(),
        )
        await line()
        await asyncio.gather(*(worker.close() for worker in workers))


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    asyncio.run(beat(given) if given["mode"] == "beat" else storm(given))
