"""This worker's part in being reached: says where it listens, and holds tunnels to relays when it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from starlings_protos import control_pb2, convert
from starlings_protos.identity import Identity
from starlings_protos.messages import WorkerId
from starlings_protos.reach_messages import ReachOrder, ReachReport, Route, Routes
from starlings_protos.relay.listener import Listener
from starlings_protos.relay.tunnel import Stream
from starlings_worker.addresses import WILDCARDS
from starlings_worker.narrator import Narrator
from starlings_worker.own_relay import OwnRelay

# With those of the data port no more than the coordinator takes.
RELAY_ADDRESSES_LIMIT = 8


class WorkerReach:
    """Lives in the supervisor, so that neither an engine's end nor its load touches the tunnels."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        listen_host: str,
        addresses: Callable[[], tuple[str, ...]],
        say: Callable[[ReachReport], object],
        narrator: Narrator,
        rng: random.Random,
        own_relay: tuple[float, Path] | None = None,
    ) -> None:
        """
        Args:
            addresses: of the data port, as peers are told; empty while there is none.
            say: puts a report on the control stream.
            own_relay: bytes/s and log of a relay for others; None where nobody agreed to one.
        """
        self._listen_host = "127.0.0.1" if listen_host in WILDCARDS else listen_host.strip("[]")
        self._addresses = addresses
        self._say = say
        self._narrator = narrator
        self._listener = Listener(identity, self._accept, self.report, rng)
        self._routes: dict[WorkerId, Route] = {}
        self._told: bool | None = None
        # Where this worker relays for others; 0 = nowhere.
        self._relay_port = 0
        self._own_relay: OwnRelay | None = None
        if own_relay is not None:
            self._own_relay = OwnRelay(identity, listen_host, *own_relay, self._relay_at)
        self._relaying: asyncio.Task[None] | None = None

    def report(self) -> None:
        """After each Welcome, and whenever something changed."""
        if self._own_relay is not None and self._relaying is None:
            self._relaying = asyncio.create_task(self._own_relay.run())
        addresses = self._addresses()
        hosts = dict.fromkeys(address.rpartition(":")[0] for address in addresses)
        relay = tuple(f"{host}:{self._relay_port}" for host in hosts) if self._relay_port else ()
        self._say(ReachReport(addresses, relay[:RELAY_ADDRESSES_LIMIT], self._listener.attached))

    def _relay_at(self, port: int) -> None:
        self._relay_port = port
        self.report()

    async def renewed(self) -> None:
        """The worker has a new certificate."""
        if self._own_relay is not None:
            await self._own_relay.renewed()

    def heard(self, message: control_pb2.ToWorker) -> bool:
        """A message of the control stream; True when it is for nobody but this."""
        match message.WhichOneof("body"):
            case "reach_order":
                self._ordered(message.reach_order)
                return True
            case "routes":
                self._learnt(message.routes)
        return False

    def _ordered(self, message: control_pb2.ReachOrder) -> None:
        """The coordinator has dialled back."""
        order = convert.from_proto(message, ReachOrder)
        self._listener.hold(order.relays)
        reachable = not order.relays
        if reachable is self._told:
            return
        before, self._told = self._told, reachable
        if not reachable:
            ways = ", ".join(relay.relay_id for relay in order.relays[:2])
            self._narrator.tell(
                "reach",
                f"Others cannot reach this machine from outside ({order.why or 'it did not answer'}): connections to "
                f"it go through a relay ({ways}), encrypted end to end. Forwarding the data port at the router makes "
                "them direct.",
                {"reachable": False, "seen_host": order.seen_host, "why": order.why},
            )
        elif before is not None:
            text = "Others reach this machine directly now."
            self._narrator.tell("reach", text, {"reachable": True, "seen_host": order.seen_host})

    def _learnt(self, message: control_pb2.Routes) -> None:
        """How others are reached: kept for the next engine."""
        for route in convert.from_proto(message, Routes).routes:
            self._routes[route.worker_id] = route

    @property
    def kept(self) -> tuple[control_pb2.ToWorker, ...]:
        """What a new engine must be told."""
        if not self._routes:
            return ()
        message = control_pb2.ToWorker()
        convert.body_to_proto(Routes(tuple(self._routes.values())), message)
        return (message,)

    async def close(self) -> None:
        if self._relaying is not None:
            self._relaying.cancel()
            await asyncio.gather(self._relaying, return_exceptions=True)
        await self._listener.close()

    async def _accept(self, worker_id: str) -> Stream:
        """To the data port of whoever serves it now: the engine, or what serves the state that it left behind."""
        addresses = self._addresses()
        if not addresses:
            raise OSError("no engine listens here at present")
        return await asyncio.open_connection(self._listen_host, int(addresses[0].rpartition(":")[2]))
