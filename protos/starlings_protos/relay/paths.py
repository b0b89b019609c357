"""A channel to a peer by whichever way answers: direct addresses first and all at once, relays a moment later.

Addresses are hints and the peer's certificate decides, so who answers there is who was looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from starlings_protos import channels
from starlings_protos.identity import Identity
from starlings_protos.messages import Peer, WorkerId
from starlings_protos.reach_messages import RelayPlace, Route
from starlings_protos.relay.dialer import Dialer

# A connection (TCP and TLS) that takes longer is given up.
CONNECT_S = 5.0
# Further addresses of a peer are tried so long after the one before (RFC 8305).
STAGGER_S = 0.25
# Relays are tried when no direct address has answered for this long; at once when none did lately.
RELAY_AFTER_S = 1.0
LATELY_S = 60.0
# How often peers with a relayed link try the direct ways anew.
UPGRADE_EVERY_S = 20.0
_NO_ROUTE = Route(WorkerId(""))


class NoPath(Exception):
    """No way leads to the peer; the message names each and why."""


@dataclass(frozen=True, slots=True)
class Path:
    """An open channel. `address` is the peer's own, or this machine's port into a tunnel of `relay_id`."""

    channel: grpc.aio.Channel
    address: str
    relay_id: str = ""


class Paths:
    """Who is where. Plans say it, routes add to it, and what failed lately is remembered."""

    def __init__(self, identity: Callable[[], Identity], clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._clock = clock
        self._dialer = Dialer(identity)
        self._planned: dict[WorkerId, tuple[str, ...]] = {}
        self._routes: dict[WorkerId, Route] = {}
        self._failed_at_s: dict[WorkerId, float] = {}

    def plan(self, peers: Iterable[Peer]) -> None:
        """The peers of a new plan, in place of those before."""
        self._planned = {peer.worker_id: peer.addresses for peer in peers}

    def reroute(self, routes: Iterable[Route]) -> None:
        """What the coordinator says of some workers; holds for present and later plans."""
        for route in routes:
            self._routes[route.worker_id] = route
            self._failed_at_s.pop(route.worker_id, None)

    def addresses(self, worker_id: WorkerId) -> tuple[str, ...]:
        """The direct ones, in the order to try."""
        if worker_id not in self._planned:
            return ()
        route = self._routes.get(worker_id, _NO_ROUTE)
        return tuple(dict.fromkeys((*route.addresses, *self._planned[worker_id])))

    def relays(self, worker_id: WorkerId) -> tuple[RelayPlace, ...]:
        return self._routes.get(worker_id, _NO_ROUTE).relays if worker_id in self._planned else ()

    async def open(self, worker_id: WorkerId) -> Path:
        """Raises:
        NoPath: none answers.
        """
        direct, relays = self.addresses(worker_id), self.relays(worker_id)
        lately = self._clock() - self._failed_at_s.get(worker_id, float("-inf")) < LATELY_S
        if relays and lately:
            try:
                return await self._race(worker_id, (), relays)
            except NoPath:
                pass
        path = await self._race(worker_id, direct, relays)
        if path.relay_id:
            self._failed_at_s[worker_id] = self._clock()
        else:
            self._failed_at_s.pop(worker_id, None)
        return path

    async def open_direct(self, worker_id: WorkerId) -> Path:
        """For an upgrade: without relays. Raises NoPath."""
        path = await self._race(worker_id, self.addresses(worker_id), ())
        self._failed_at_s.pop(worker_id, None)
        return path

    async def close(self) -> None:
        await self._dialer.close()

    # ---------------------------------------------------------------- the race

    async def _race(self, worker_id: WorkerId, direct: Sequence[str], relays: Sequence[RelayPlace]) -> Path:
        # Set when no direct address is left to wait for.
        hurry = asyncio.Event()
        if not direct:
            hurry.set()
        failures: dict[str, str] = {}
        ways: dict[asyncio.Task[Path], str] = {}
        for position, address in enumerate(direct):
            task = asyncio.create_task(self._direct(worker_id, address, position * STAGGER_S))
            ways[task] = address
        for position, relay in enumerate(relays):
            further_s = 2 * position * STAGGER_S
            task = asyncio.create_task(self._relayed(worker_id, relay, hurry, further_s))
            ways[task] = f"through {relay.relay_id}"
        left = set(ways)
        opened: list[Path] = []
        try:
            while left and not opened:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                # In the order of preference, where several answer at once.
                for task in (task for task in ways if task in done):
                    if (error := task.exception()) is None:
                        opened.append(task.result())
                    else:
                        failures[ways[task]] = str(error) or type(error).__name__
                if all(address in failures for address in direct):
                    hurry.set()
        finally:
            for task in ways:
                task.cancel()
            outcomes = await asyncio.gather(*ways, return_exceptions=True)
            kept = opened[0] if opened else None
            spare = [o.channel.close() for o in outcomes if isinstance(o, Path) and o is not kept]
            await asyncio.gather(*spare)
        if kept is not None:
            return kept
        told = "; ".join(f"{way}: {failures[way]}" for way in ways.values() if way in failures)
        raise NoPath(told or "no address is known")

    async def _direct(self, worker_id: WorkerId, address: str, after_s: float) -> Path:
        await asyncio.sleep(after_s)
        return await self._dial(worker_id, address, "")

    async def _relayed(
        self, worker_id: WorkerId, relay: RelayPlace, hurry: asyncio.Event, further_s: float
    ) -> Path:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELAY_AFTER_S):
                await hurry.wait()
        await asyncio.sleep(further_s)
        address = await self._dialer.local_address(relay, worker_id)
        return await self._dial(worker_id, address, relay.relay_id)

    async def _dial(self, worker_id: WorkerId, address: str, relay_id: str) -> Path:
        channel = channels.peer_channel(address, worker_id, self._identity())
        try:
            async with asyncio.timeout(CONNECT_S):
                await _ready(channel)
        except TimeoutError:
            await channel.close()
            raise ConnectionError(f"no answer within {CONNECT_S:.0f} s") from None
        except BaseException:
            await channel.close()
            raise
        return Path(channel, address, relay_id)


async def _ready(channel: grpc.aio.Channel) -> None:
    """Until the connection stands. Raises ConnectionError as soon as it is clear that it will not."""
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise ConnectionError("nobody of the job answers there")
        await channel.wait_for_state_change(state)
