"""How long to wait for the next piece of what somebody sends: pure, the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """What a sender must keep to. Every sum of pauses is bounded, so that bytes that drip cannot hold a place for long.

    A transfer of n bytes is over after `grace_s + n / least_bytes_per_s` at the latest.
    """

    # Between two pieces, and before the first. Lowering it finds frozen senders sooner and cuts off stuttering links.
    between_s: float
    # For the whole, on top of what the least rate gives.
    grace_s: float = 30.0
    # Four transfers at once still fit through an uplink of 128 kbit/s.
    least_bytes_per_s: float = 4096.0

    def wait_s(self, elapsed_s: float, received_bytes: int) -> float:
        """How long the next piece may take, `elapsed_s` after the beginning; 0 = no longer."""
        allowed_s = self.grace_s + received_bytes / self.least_bytes_per_s
        return max(0.0, min(self.between_s, allowed_s - elapsed_s))
