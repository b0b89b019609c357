"""Connections through relays, for who opens channels: a local port per (relay, worker), and a tunnel behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from starlings_protos.identity import Identity
from starlings_protos.reach_messages import RelayPlace
from starlings_protos.relay.tunnel import SOCKET_BYTES, Stream, Tunnel

# Until a tunnel is up; then its next address is tried.
UP_WITHIN_S = 5.0


class Dialer:
    """Tunnels are opened when first needed and shared by all connections through one relay."""

    def __init__(self, identity: Callable[[], Identity]) -> None:
        self._identity = identity
        self._tunnels: dict[str, Tunnel] = {}
        self._tasks: set[asyncio.Task[str]] = set()
        self._ports: dict[tuple[str, str], asyncio.Server] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def local_address(self, relay: RelayPlace, worker_id: str) -> str:
        """ "host:port" on this machine: what connects there is connected to that worker through the relay.

        Raises:
            ConnectionError: the relay cannot be reached.
        """
        await self._tunnel(relay)
        key = (relay.relay_id, worker_id)
        if key not in self._ports:
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            listening.bind(("127.0.0.1", 0))

            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._connected(relay.relay_id, worker_id, (reader, writer))

            self._ports[key] = await asyncio.start_server(connected, sock=listening)
        host, port = self._ports[key].sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def is_up(self, relay_id: str) -> bool:
        tunnel = self._tunnels.get(relay_id)
        return tunnel is not None and tunnel.up.is_set()

    async def close(self) -> None:
        for server in self._ports.values():
            server.close()
        self._ports.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, relay_id: str, worker_id: str, stream: Stream) -> None:
        tunnel = self._tunnels.get(relay_id)
        if tunnel is None:
            stream[1].transport.abort()
        else:
            await tunnel.carry(worker_id, stream)

    async def _tunnel(self, relay: RelayPlace) -> Tunnel:
        async with self._locks.setdefault(relay.relay_id, asyncio.Lock()):
            known = self._tunnels.get(relay.relay_id)
            if known is not None and known.up.is_set():
                return known
            for address in relay.addresses:
                tunnel = Tunnel(relay.relay_id, address, self._identity())
                task = asyncio.create_task(tunnel.run())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if await came_up(tunnel):
                    self._tunnels[relay.relay_id] = tunnel
                    return tunnel
                task.cancel()
            raise ConnectionError(
                f"the relay {relay.relay_id} cannot be reached at {', '.join(relay.addresses)}"
            )


async def came_up(tunnel: Tunnel, within_s: float = UP_WITHIN_S) -> bool:
    """Whether a tunnel that was just started is up within the time."""
    waits = [asyncio.create_task(tunnel.up.wait()), asyncio.create_task(tunnel.ended.wait())]
    try:
        await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return tunnel.up.is_set()
