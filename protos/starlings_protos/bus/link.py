"""The state of a connection to the broker: what people are told of it, and when it is tried again. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

# The first pause before a new attempt, and the longest; in between they double. Each is shortened at random by up to
# half, so that a swarm does not come back in one moment.
PAUSE_FIRST_S = 0.5
PAUSE_MOST_S = 30.0
# A connection that lasted this long was good: the pauses begin anew, and people are told that the bus is back.
STEADY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Health:
    """What `starlings status` shows of the bus."""

    connected: bool
    # When that began, on the owner's monotonic clock.
    since_s: float
    # Why it is away; empty while it is there.
    reason: str = ""
    # Messages that were dropped so far because the broker was away or slow.
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """One connection over all its attempts. Methods return the next state and the line to log, if any."""

    connected: bool
    since_s: float
    reason: str = "not connected yet"
    # Attempts and short connections in a row.
    failures: int = 0
    # What people were told last; None before anything.
    told_connected: bool | None = None
    # Since when people believe it is away.
    told_since_s: float = 0.0

    def opened(self, now_s: float) -> tuple[Link, str]:
        opened = replace(self, connected=True, since_s=now_s, reason="")
        if self.told_connected is None:
            return replace(opened, told_connected=True, told_since_s=now_s), "connected"
        return opened, ""

    def steady(self, now_s: float) -> tuple[Link, str]:
        """To be called once a connection has lasted `STEADY_AFTER_S`."""
        steady = replace(self, failures=0)
        if self.told_connected:
            return steady, ""
        away_s = self.since_s - self.told_since_s
        return replace(steady, told_connected=True, told_since_s=now_s), f"back after {away_s:.0f} s"

    def closed(self, now_s: float, reason: str) -> tuple[Link, str]:
        """An attempt failed, or the connection ended."""
        since_s = now_s if self.connected else self.since_s
        closed = replace(
            self, connected=False, since_s=since_s, reason=reason, failures=min(self.failures + 1, 64)
        )
        if self.told_connected is False:
            return closed, ""
        return (
            replace(closed, told_connected=False, told_since_s=now_s),
            f"away ({reason}); it is tried again",
        )

    def pause_s(self, rng: random.Random) -> float:
        """How long to wait before the next attempt; `failures` >= 1."""
        longest = min(PAUSE_MOST_S, PAUSE_FIRST_S * 2.0 ** min(self.failures - 1, 16))
        return longest * (1.0 - rng.random() / 2)

    def health(self, dropped: int) -> Health:
        return Health(self.connected, self.since_s, self.reason, dropped)
