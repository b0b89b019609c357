"""The coordinator's side whole: its relay as a real child, dialling back, orders and routes to sessions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlings_coordinator.reach.book import Reach
from starlings_coordinator.reach.desk import ReachDesk, RelaySettings
from starlings_coordinator.sessions import SessionTable, WorkerSession
from starlings_protos import control_pb2
from starlings_protos.convert import from_proto
from starlings_protos.messages import WorkerId
from starlings_protos.reach_messages import ReachOrder, ReachReport, Route, Routes
from starlings_protos.relay.listener import Listener
from support.peer_servers import Certificates, peer_server, take

WITHIN_S = 60.0


async def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.02)


class Watched:
    """A worker's session, and what it was told."""

    def __init__(self, table: SessionTable, worker_id: str) -> None:
        self.session: WorkerSession = table.open(WorkerId(worker_id))
        self.orders: list[ReachOrder] = []
        self.routes: dict[str, Route] = {}

    async def read(self) -> None:
        while (message := await self.session.next()) is not None:
            self.hear(message)

    def hear(self, message: control_pb2.ToWorker) -> None:
        match message.WhichOneof("body"):
            case "reach_order":
                self.orders.append(from_proto(message.reach_order, ReachOrder))
            case "routes":
                for route in from_proto(message.routes, Routes).routes:
                    self.routes[route.worker_id] = route


class Bench:
    def __init__(self, certificates: Certificates, tmp_path: Path) -> None:
        self.revoked: set[str] = set()
        self.keeper: list[Routes] = []
        self.told: list[str] = []
        self.desk = ReachDesk(
            RelaySettings("127.0.0.1", 0, ("127.0.0.1",)),
            authority=certificates.authority,
            revoked=lambda: self.revoked,
            log_path=tmp_path / "relay.log",
            tell_keeper=self.keeper.append,
            announce=self.told.append,
        )
        self.table = SessionTable()
        self.tasks: list[asyncio.Task[None]] = []

    def worker(self, worker_id: str) -> Watched:
        watched = Watched(self.table, worker_id)
        self.tasks.append(asyncio.create_task(watched.read()))
        return watched


@asynccontextmanager
async def running(certificates: Certificates, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(certificates, tmp_path)
    bench.tasks += [asyncio.create_task(bench.desk.child.run()), asyncio.create_task(bench.desk.run())]
    try:
        yield bench
    finally:
        await bench.desk.child.stop()
        for task in bench.tasks:
            task.cancel()
        await asyncio.gather(*bench.tasks, return_exceptions=True)


async def test_one_is_reached_and_the_other_gets_a_tunnel(tmp_path: Path) -> None:
    certificates = Certificates()
    open_one, hidden = certificates.worker(), certificates.worker()
    async with (
        running(certificates, tmp_path) as bench,
        peer_server(open_one, take) as address,
        peer_server(hidden, take) as secret_address,
    ):
        host, port = secret_address.rsplit(":", 1)
        reached, unreached = bench.worker(open_one.id), bench.worker(hidden.id)
        bench.desk.reported(reached.session, "127.0.0.1", ReachReport((address,)))
        # It says a port at which nobody is, as a router would show it.
        bench.desk.reported(unreached.session, "127.0.0.1", ReachReport(("127.0.0.1:1",)))
        await until(lambda: reached.orders and unreached.orders)
        assert reached.orders[-1].reached == (address,)
        assert reached.orders[-1].relays == ()
        (place,) = unreached.orders[-1].relays
        assert "127.0.0.1:1" in unreached.orders[-1].why

        listener: Listener

        def changed() -> None:
            report = ReachReport(("127.0.0.1:1",), (), listener.attached)
            bench.desk.reported(unreached.session, "127.0.0.1", report)

        listener = Listener(
            lambda: hidden, lambda _: asyncio.open_connection(host, int(port)), changed, random.Random(1)
        )
        listener.hold([place])
        await until(lambda: reached.routes.get(hidden.id))
        assert reached.routes[hidden.id] == Route(WorkerId(hidden.id), (), (place,))
        assert bench.keeper
        assert bench.desk.book.reach(WorkerId(hidden.id)) is Reach.RELAYED
        assert bench.desk.book.reach(WorkerId(open_one.id)) is Reach.DIRECT
        late = bench.worker(certificates.worker().id)
        bench.desk.reported(late.session, "127.0.0.1", ReachReport((address,)))
        await until(lambda: late.routes.get(hidden.id))

        # The relay dies: it comes back on its port, and so does the tunnel.
        killed = bench.desk.child.process_id
        bench.desk.child.kill()
        await until(lambda: bench.desk.child.process_id not in (None, killed))
        await until(lambda: not reached.routes[hidden.id].relays or bench.told)
        await until(lambda: reached.routes[hidden.id].relays == (place,) and listener.attached)

        bench.revoked.add(hidden.id)
        await until(lambda: "shut out" in listener.last_failure)
        with contextlib.suppress(asyncio.CancelledError):
            await listener.close()
