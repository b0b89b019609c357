"""A group's exchange among worker processes on loopback, beside what it could cost at least.

For each size and number of workers, in turns within one run, forwards and backwards, medians over the rounds of the
slowest worker:
- `exact` and `int8:128`: the worker's own buffers and links, over mTLS channels between processes;
- the *floor* of each: as many bytes through the same channels in the same two legs, without codec and sums;
- `gloo`: torch.distributed's all_reduce of the same tensor, without encryption.

Where the time goes: encode, push (gRPC and TLS, both legs), reduce, assemble, and the rest, which is waiting for
others. CPU seconds are those of all workers together.

    python benchmarks/exchange.py [--quick] [--json FILE] [--rounds N] [--eager]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import Claim, environment, show, write_json

CODECS = ("exact", "int8:128")
# Of the floor with as many bytes.
BOUNDS = {"exact": 1.4, "int8:128": 1.8}
GLOO_AIM = 1.5
GROUP = "stage:0"
ROUND_LIMIT_S = 120.0
SHORT_ELEMENTS = 16 << 20


# ---------------------------------------------------------------------- one worker process


class Worker:
    """One member: buffers, links and a server for both legs; commands come on stdin, answers go to stdout."""

    def __init__(self, start: dict[str, Any]) -> None:
        import torch

        from starlings_compression.compiled import prepare
        from starlings_protos.identity import Identity
        from starlings_protos.messages import WorkerId
        from starlings_worker.exchange import ExchangeBuffers
        from starlings_worker.flat import Entry, FlatVector, keeps
        from starlings_worker.links import Links
        from starlings_worker.meters import Meters

        torch.set_num_threads(1)
        self.why_eager = "it was asked for" if start["eager"] else prepare("int8:128")
        pems = [base64.b64decode(pem) for pem in start["identity"]]
        self.identity = Identity.from_pem(*pems)
        self.own, self.ids = start["own"], [WorkerId(i) for i in start["ids"]]
        self.elements = start["elements"]
        self.vector = FlatVector(GROUP, [Entry("b", "p", (self.elements,))], keeps(), torch.device("cpu"))
        self.source = torch.randn(self.elements, generator=torch.Generator().manual_seed(self.own))
        vectors = {GROUP: self.vector}
        self.buffers = {c: ExchangeBuffers(self.ids[self.own], c, vectors) for c in CODECS}
        self.links = Links(self.identity, Meters())
        self.current: ExchangeBuffers | None = None
        self.arrived: dict[tuple[str, int], int] = {}
        self.changed = asyncio.Condition()
        self.gloo_file = start["gloo"]

    async def serve(self) -> int:
        from starlings_protos import channels, data_pb2, data_pb2_grpc, frames
        from starlings_protos.peers import DATA_POLICY, RoleGuard, peer_identity
        from starlings_worker.core.events import Leg

        worker = self

        class Service(data_pb2_grpc.DataServicer):
            async def _take(self, leg: Leg, source: Any, context: Any) -> data_pb2.Receipt:
                header = await frames.read_header(
                    source, limit_bytes=8 * worker.elements + 4096, subject_limits=frames.EXCHANGE
                )
                subject: Any = frames.subject_of(header)
                (data,) = await frames.read_body(header, source)
                sender = peer_identity(context).id
                if worker.current is not None:
                    worker.current.keep(leg, subject, sender, data)
                async with worker.changed:
                    key = (leg.value, subject.step)
                    worker.arrived[key] = worker.arrived.get(key, 0) + 1
                    worker.changed.notify_all()
                return data_pb2.Receipt()

            async def Contribute(self, request_iterator: Any, context: Any) -> data_pb2.Receipt:
                return await self._take(Leg.CONTRIBUTION, request_iterator, context)

            async def Aggregate(self, request_iterator: Any, context: Any) -> data_pb2.Receipt:
                return await self._take(Leg.AGGREGATE, request_iterator, context)

        self.server = channels.make_server(channels.DATA, [RoleGuard(DATA_POLICY)])
        data_pb2_grpc.add_DataServicer_to_server(Service(), self.server)
        port = channels.bind(self.server, "127.0.0.1", 0, channels.server_credentials(self.identity))
        await self.server.start()
        return port

    def meet(self, ports: list[int]) -> None:
        from starlings_protos.messages import Peer

        self.links.update(Peer(i, (f"127.0.0.1:{p}",)) for i, p in zip(self.ids, ports, strict=True))

    async def _all_here(self, leg: str, step: int) -> None:
        async with asyncio.timeout(ROUND_LIMIT_S), self.changed:
            await self.changed.wait_for(lambda: self.arrived.get((leg, step), 0) == len(self.ids) - 1)

    async def _push(
        self, method: str, step: int, part: int, to: int, codec: str, count: int, data: Any
    ) -> int:
        from starlings_protos import data_pb2, frames
        from starlings_protos.messages import ExchangeHeader

        kind = data_pb2.DATA_TYPE_FLOAT32 if codec != "bytes" else data_pb2.DATA_TYPE_UINT8
        tensor = frames.tensor_header(
            "part", kind, (count,), len(data), codec=codec.replace("bytes", "exact")
        )
        header = frames.make_header(ExchangeHeader(step, 0, GROUP, part, 1), [tensor])
        await self.links.push(self.ids[to], method, header, [data], kind="exchange")
        return len(data)

    async def exchange(self, step: int, codec: str) -> dict[str, float]:
        """One round of the real thing."""
        from starlings_protos.messages import ExchangeGroup, ExchangeHeader, ExchangeMember, ExchangePurpose
        from starlings_worker.core.events import Leg

        buffers = self.buffers[codec]
        n, others = len(self.ids), [i for i in range(len(self.ids)) if i != self.own]
        group = ExchangeGroup(GROUP, tuple(ExchangeMember(i, 1.0, 1 / n) for i in self.ids))
        spent: dict[str, float] = {}

        async def timed(name: str, work: Coroutine[Any, Any, Any]) -> Any:
            begin = time.perf_counter()
            result = await work
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
            return result

        def sends(leg: Leg, method: str) -> Coroutine[Any, Any, Any]:
            async def run() -> int:
                work = []
                for to in others:
                    part = to if leg is Leg.CONTRIBUTION else self.own
                    out = buffers.outgoing(leg, ExchangeHeader(step, 0, GROUP, part, 1))
                    assert out is not None
                    work.append(self._push(method, step, part, to, out[0], out[1], out[2]))
                return sum(await asyncio.gather(*work))

            return run()

        def thread(work: Callable[..., Any], *arguments: Any) -> Coroutine[Any, Any, Any]:
            def run() -> Any:
                begin = time.thread_time()
                result = work(*arguments)
                name = f"{work.__name__} cpu"
                spent[name] = spent.get(name, 0.0) + time.thread_time() - begin
                return result

            return asyncio.to_thread(run)

        await timed("encode", thread(buffers.open, step, 0, group, ExchangePurpose.GRADIENT, self.own))
        sent = await timed("push", sends(Leg.CONTRIBUTION, "Contribute"))
        await self._all_here("contribution", step)
        await timed("reduce", thread(buffers.reduce, step, 0, GROUP))
        sent += await timed("push", sends(Leg.AGGREGATE, "Aggregate"))
        await self._all_here("aggregate", step)
        digest, _ = await timed("assemble", thread(buffers.assemble, step, 0, GROUP))
        return {**spent, "bytes": sent, "digest": digest}

    async def floor(self, step: int, codec: str) -> dict[str, float]:
        """As many bytes in the same two legs."""
        from starlings_compression.sizes import size_estimate

        n, others = len(self.ids), [i for i in range(len(self.ids)) if i != self.own]
        part = self.elements // n
        size = 4 * part if codec == "exact" else size_estimate(codec, (part,)).most_bytes
        # Memory that was written before: fresh zeros would all be one page of a cache.
        data = memoryview(self.source.numpy()).cast("B")[:size]
        sent = 0
        for leg, method in (("contribution", "Contribute"), ("aggregate", "Aggregate")):
            work = [self._push(method, step, self.own, to, "bytes", size, data) for to in others]
            sent += sum(await asyncio.gather(*work))
            await self._all_here(leg, step)
        return {"bytes": sent, "digest": 0}

    async def gloo(self) -> dict[str, float]:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{self.gloo_file}", rank=self.own, world_size=len(self.ids)
            )
            await asyncio.to_thread(dist.barrier)
        await asyncio.to_thread(dist.all_reduce, self.vector.gradient)
        return {"bytes": 0, "digest": 0}

    async def round(self, step: int, kind: str, codec: str) -> dict[str, float]:
        self.vector.gradient.copy_(self.source)
        cpu, begin = time.process_time(), time.perf_counter()
        match kind:
            case "exchange":
                found = await self.exchange(step, codec)
            case "floor":
                found = await self.floor(step, codec)
            case _:
                found = await self.gloo()
        found |= {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        if self.current is not None:
            self.current.commit(step)
        return found


async def work() -> None:
    """The life of a worker process: JSON lines in and out, until stdin ends."""
    loop = asyncio.get_running_loop()

    async def line() -> Any:
        text = await loop.run_in_executor(None, sys.stdin.readline)
        return json.loads(text) if text else None

    def say(record: Any) -> None:
        print(json.dumps(record), flush=True)

    worker = Worker(await line())
    say([await worker.serve(), worker.why_eager])
    worker.meet(await line())
    say("met")
    while (command := await line()) is not None:
        if "next" in command:
            kind, codec = command["next"]
            worker.current = worker.buffers[codec] if kind == "exchange" else None
            say("ready")
        else:
            say(await worker.round(command["step"], command["kind"], command["codec"]))
    await worker.links.close()
    await worker.server.stop(0.1)


# ---------------------------------------------------------------------- the conductor


class Swarm:
    def __init__(self, count: int, elements: int, scratch: Path, eager: bool) -> None:
        from starlings_protos.authority import CertificateAuthority
        from starlings_protos.identity import PeerIdentity, Role, key_id, key_to_pem, new_key

        authority = CertificateAuthority.create("bench", time.time())
        people = []
        for _ in range(count):
            key = new_key()
            peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
            pem = authority.issue(key.public_key(), peer, time.time())
            people.append((peer.id, (key_to_pem(key), pem, authority.certificate_pem)))
        people.sort()
        # As an engine sets it.
        environ = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
            )
            for _ in people
        ]  # fmt: skip
        starts = [
            {
                "own": own,
                "ids": [name for name, _ in people],
                "identity": [base64.b64encode(pem).decode() for pem in pems],
                "elements": elements,
                "eager": eager,
                "gloo": str(scratch / f"gloo-{count}-{elements}"),
            }
            for own, (_, pems) in enumerate(people)
        ]
        answers = self.ask(starts)
        self.ask([[port for port, _ in answers]] * count)
        # Why int8 is not compiled here; None: it is.
        self.why_eager: str | None = answers[0][1]
        self.step = 0

    def ask(self, records: list[Any]) -> list[Any]:
        for process, record in zip(self.processes, records, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(record) + "\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            text = process.stdout.readline()
            if not text:
                raise RuntimeError(f"a worker ended with status {process.wait()}; see above")
            answers.append(json.loads(text))
        return answers

    def round(self, kind: str, codec: str) -> dict[str, float]:
        """The slowest worker's seconds and account; CPU seconds and bytes of all."""
        self.step += 1
        everybody = len(self.processes)
        self.ask([{"next": [kind, codec]}] * everybody)
        answers = self.ask([{"step": self.step, "kind": kind, "codec": codec}] * everybody)
        assert len({a["digest"] for a in answers}) == 1, "members decoded different aggregates"
        slowest = max(answers, key=lambda a: a["seconds"])
        return {**slowest, "cpu": sum(a["cpu"] for a in answers), "bytes": sum(a["bytes"] for a in answers)}

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(count: int, elements: int, rounds: int, scratch: Path, eager: bool) -> list[dict[str, Any]]:
    """Rows of one size; the kinds take turns, the first turn warms up and does not count.

    Every other turn goes backwards: whoever comes after a larger transfer finds colder caches. Short vectors take more
    turns, as single ones say less.
    """
    kinds = [(kind, codec) for codec in CODECS for kind in ("exchange", "floor")] + [("gloo", "exact")]
    found: dict[tuple[str, str], list[dict[str, float]]] = {kind: [] for kind in kinds}
    swarm = Swarm(count, elements, scratch, eager)
    if swarm.why_eager is not None:
        print(f"int8 is not compiled: {swarm.why_eager}", file=sys.stderr)
    try:
        for turn in range(rounds * (4 if elements <= SHORT_ELEMENTS else 1) + 1):
            for kind in kinds if turn % 2 else reversed(kinds):
                result = swarm.round(*kind)
                if turn:
                    found[kind].append(result)
    finally:
        swarm.close()

    def median(kind: tuple[str, str], what: str) -> float:
        return statistics.median(result.get(what, 0.0) for result in found[kind])

    rows = []
    gloo = median(("gloo", "exact"), "seconds")
    for kind, codec in kinds:
        key = (kind, codec)
        row: dict[str, Any] = {
            "what": f"{elements >> 20} M x {count}",
            "kind": codec if kind == "exchange" else "gloo" if kind == "gloo" else f"floor of {codec}",
            "seconds": median(key, "seconds"),
            "CPU s": median(key, "cpu"),
            "MB sent": median(key, "bytes") / 1e6,
            "to gloo": median(key, "seconds") / gloo,
            "compiled": swarm.why_eager is None,
        }
        if kind == "exchange":
            row["to floor"] = median(key, "seconds") / median(("floor", codec), "seconds")
            parts = {name: median(key, name) for name in ("encode", "push", "reduce", "assemble")}
            row |= parts | {"wait": max(0.0, row["seconds"] - sum(parts.values()))}
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="1 M values, 2 workers, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument(
        "--eager", action="store_true", help="without compiled code, as a machine without a compiler"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of 64 M values; four times as many of fewer")
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work())
        return 0
    environ = environment()
    cases = [(2, 1 << 20)] if options.quick else [(n, m << 20) for m in (4, 64) for n in (2, 4)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="starlings-exchange-") as scratch:
        for count, elements in cases:
            print(f"{elements >> 20} M values, {count} workers", file=sys.stderr)
            rows += measure(
                count, elements, 2 if options.quick else options.rounds, Path(scratch), options.eager
            )
    claims = [
        Claim(f"{row['what']}, {row['kind']}: seconds to its floor's", row["to floor"], BOUNDS[row["kind"]],
              row["to floor"] <= BOUNDS[row["kind"]])
        for row in rows if "to floor" in row
    ]  # fmt: skip
    claims += [
        Claim(f"{row['what']}, int8:128: seconds to gloo's (aim)", row["to gloo"], GLOO_AIM, row["to gloo"] <= GLOO_AIM)
        for row in rows if row["kind"] == "int8:128"
    ]  # fmt: skip
    show("Exchange of a vector", rows, claims, hidden={"compiled"})
    write_json(options.json, "exchange", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims if "aim" not in claim.name) else 1


if __name__ == "__main__":
    sys.exit(main())
