"""The pace at which this worker sends: the volunteer's cap, or that of an uplink to pretend to be behind.

One per engine. Everything that this worker sends to peers passes: transfers, and state that it serves. Nothing else is
changed, so that what is measured is the real transport's. What a real network does beyond rate and delay (loss, queues
of others) it does not show.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_RATES = {"kbit/s": 1e3 / 8, "mbit/s": 1e6 / 8, "gbit/s": 1e9 / 8}
_DELAYS = {"ms": 1e-3, "s": 1.0}
_PATTERN = re.compile(
    r"\s*(\d+(?:\.\d+)?)\s*([kmg]bit/s)\s*(?:,\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*)?", re.IGNORECASE
)
# What may be sent at once after a pause, as the queue of a home router allows.
BURST_S = 0.02
# What travels for each byte that is sent: headers of TCP and IP in packets of 1400 bytes take 3.7 %, TLS records,
# HTTP/2 and our frames 0.3 %, and acknowledgements of what comes in about 1 %.
HEADERS_FACTOR = 1.05
# A piece of what nobody waits for gives way to the engine's own transfers for this long at most: so a worker whose
# links are never idle still sends 20 MiB/s of state in pieces of 1 MiB, and 1.2 MiB/s of exchanges in those of 64 KiB.
GIVE_WAY_AT_MOST_S = 0.05
_LOOK_AGAIN_S = 0.005


@dataclass(frozen=True, slots=True)
class LinkClass:
    """bytes_per_s: of the uplink; 0 = without limit. delay_s: one way."""

    bytes_per_s: float = 0.0
    delay_s: float = 0.0


NO_LINK = LinkClass()


def parse_link(text: str) -> LinkClass:
    """`RATE[,DELAY]`, the delay one way: "20Mbit/s,40ms".

    Raises:
        ValueError: it is not that; with an example.
    """
    found = _PATTERN.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ValueError("must be a rate and a delay one way, such as 20Mbit/s,40ms")
    rate = float(found[1]) * _RATES[found[2].lower()]
    return LinkClass(rate, float(found[3]) * _DELAYS[found[4].lower()] if found[3] else 0.0)


async def give_way(busy: Callable[[], bool]) -> None:
    """Returns when nothing more urgent is being sent, or after `GIVE_WAY_AT_MOST_S`."""
    waited_s = 0.0
    while busy() and waited_s < GIVE_WAY_AT_MOST_S:
        await asyncio.sleep(_LOOK_AGAIN_S)
        waited_s += _LOOK_AGAIN_S


class Uplink:
    """Paces what leaves; without a class it paces nothing."""

    def __init__(
        self,
        link: LinkClass = NO_LINK,
        cap_bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`cap_bytes_per_s`: what may leave, headers of all layers included; 0 = without limit."""
        self._link, self._clock, self._sleep = link, clock, sleep
        rates = (link.bytes_per_s, cap_bytes_per_s / HEADERS_FACTOR)
        self._bytes_per_s = min((rate for rate in rates if rate), default=0.0)
        # When the uplink has passed on all that was given to it.
        self._free_at_s = 0.0

    async def leaves(self, size_bytes: int) -> None:
        """Before so many bytes are sent: returns when the uplink takes them. In the order of the calls."""
        if not self._bytes_per_s:
            return
        now_s = self._clock()
        begin_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = begin_s + size_bytes / self._bytes_per_s
        if self._free_at_s > now_s:
            await self._sleep(self._free_at_s - now_s)

    async def travels(self) -> None:
        """One way, of a transfer or of its answer."""
        if self._link.delay_s:
            await self._sleep(self._link.delay_s)
