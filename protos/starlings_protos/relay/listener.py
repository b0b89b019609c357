"""Tunnels of who cannot be reached: kept to two relays at once where there are two, so that one may die at any time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from starlings_protos.identity import Identity
from starlings_protos.reach_messages import RelayPlace
from starlings_protos.relay.dialer import came_up
from starlings_protos.relay.tunnel import Accept, Tunnel

KEPT = 2
# A relay that failed is tried again after this; meanwhile others are preferred.
PAUSE_FIRST_S = 0.5
PAUSE_MOST_S = 15.0


def wanted_relays(
    relays: Sequence[RelayPlace], failing: frozenset[str], kept: int = KEPT
) -> tuple[RelayPlace, ...]:
    """Which relays to hold tunnels to: the first that do not fail; all, when there are too few of those."""
    good = tuple(relay for relay in relays if relay.relay_id not in failing)
    return good[:kept] if len(good) >= kept else tuple(relays)


class Listener:
    """Call `hold` with what the coordinator says; `attached` is what to tell it."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        accept: Accept,
        on_change: Callable[[], None],
        rng: random.Random,
    ) -> None:
        """
        Args:
            accept: connects to this worker's data port.
            on_change: `attached` has changed.
        """
        self._identity = identity
        self._accept = accept
        self._on_change = on_change
        self._rng = rng
        self._relays: tuple[RelayPlace, ...] = ()
        self._failing: set[str] = set()
        self._up: dict[str, Tunnel] = {}
        self._tasks: dict[str, tuple[RelayPlace, asyncio.Task[None]]] = {}
        self.last_failure = ""

    @property
    def attached(self) -> tuple[str, ...]:
        """Relays where this worker can be reached, the best first."""
        return tuple(relay.relay_id for relay in self._relays if relay.relay_id in self._up)

    @property
    def connection_count(self) -> int:
        return sum(tunnel.connection_count for tunnel in self._up.values())

    def hold(self, relays: Sequence[RelayPlace]) -> None:
        """From now on, tunnels to the first of these; none when it is empty."""
        self._relays = tuple(relays)
        self._failing &= {relay.relay_id for relay in relays}
        self._arrange()

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arrange(self) -> None:
        wanted = {relay.relay_id: relay for relay in wanted_relays(self._relays, frozenset(self._failing))}
        for relay_id, (relay, task) in list(self._tasks.items()):
            if wanted.get(relay_id) != relay:
                task.cancel()
                del self._tasks[relay_id]
        for relay_id, relay in wanted.items():
            if relay_id not in self._tasks:
                self._tasks[relay_id] = (relay, asyncio.create_task(self._keep(relay)))

    async def _keep(self, relay: RelayPlace) -> None:
        failures = 0
        while True:
            address = relay.addresses[failures % len(relay.addresses)]
            tunnel = Tunnel(relay.relay_id, address, self._identity(), self._accept)
            serving = asyncio.create_task(tunnel.run())
            began_s = time.monotonic()
            try:
                if await came_up(tunnel):
                    self._attached(tunnel)
                    self.last_failure = await serving
                elif tunnel.ended.is_set():
                    self.last_failure = await serving
                else:
                    self.last_failure = f"the relay {relay.relay_id} at {address} does not answer"
            finally:
                serving.cancel()
                self._detached(tunnel)
            self._failing.add(relay.relay_id)
            self._arrange_soon()
            failures = 1 if time.monotonic() - began_s > PAUSE_MOST_S else failures + 1
            pause_s = min(PAUSE_MOST_S, PAUSE_FIRST_S * 2.0 ** (failures - 1))
            await asyncio.sleep(pause_s * (1.0 - self._rng.random() / 2))

    def _attached(self, tunnel: Tunnel) -> None:
        self._up[tunnel.relay_id] = tunnel
        self._failing.discard(tunnel.relay_id)
        self._on_change()
        self._arrange_soon()

    def _detached(self, tunnel: Tunnel) -> None:
        if self._up.get(tunnel.relay_id) is tunnel:
            del self._up[tunnel.relay_id]
            self._on_change()

    def _arrange_soon(self) -> None:
        """Not from within a task that is arranged away."""
        asyncio.get_running_loop().call_soon(self._arrange_if_open)

    def _arrange_if_open(self) -> None:
        if self._tasks:
            self._arrange()
