"""Bytes per second as a token bucket that may go into debt: exact over time, whatever the sizes. Reads no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteRate:
    """`bytes_per_s` on average (0 = without limit), and `burst_bytes` at once after a pause. A larger burst uses idle
    moments better and makes the queue of the router before the uplink longer by burst / rate seconds.
    """

    bytes_per_s: float = 0.0
    burst_bytes: float = 64 << 10


class ByteBucket:
    """In any time t at most `burst_bytes + t * bytes_per_s` and one piece more pass."""

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: ByteRate, now_s: float) -> None:
        self.rate, self._level, self._at_s = rate, rate.burst_bytes, now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next piece may go, of whatever size; 0 = now."""
        if not self.rate.bytes_per_s:
            return 0.0
        if now_s > self._at_s:
            passed_s = now_s - self._at_s
            self._level = min(self.rate.burst_bytes, self._level + passed_s * self.rate.bytes_per_s)
            self._at_s = now_s
        # A fraction of a byte is what rounding leaves.
        return -self._level / self.rate.bytes_per_s if self._level < -0.5 else 0.0

    def take(self, byte_count: int, now_s: float) -> None:
        """A piece goes now."""
        if self.rate.bytes_per_s:
            self.wait_s(now_s)
            self._level -= byte_count
