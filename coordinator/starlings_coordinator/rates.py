"""Token buckets: how often something may happen, at most. The clock is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, then `per_s` each second. Raising either lets more load through from one source."""

    burst: float
    per_s: float

    def __post_init__(self) -> None:
        if not (self.burst >= 1 and self.per_s > 0):
            raise ValueError(f"a rate needs burst >= 1 and per_s > 0, not {self}")


@dataclass(frozen=True, slots=True)
class Bucket:
    level: float
    at_s: float


def refilled(bucket: Bucket, rate: Rate, now_s: float) -> Bucket:
    """The bucket at `now_s`; a clock that steps back refills nothing."""
    passed_s = max(0.0, now_s - bucket.at_s)
    return Bucket(min(rate.burst, bucket.level + passed_s * rate.per_s), max(now_s, bucket.at_s))


def wait_s(bucket: Bucket, rate: Rate, now_s: float, amount: float = 1.0) -> float:
    """Seconds until `amount` may be taken; 0 = now."""
    return max(0.0, (amount - refilled(bucket, rate, now_s).level) / rate.per_s)


def taken(bucket: Bucket, rate: Rate, now_s: float, amount: float = 1.0) -> Bucket:
    """`amount` less, never below 0."""
    full = refilled(bucket, rate, now_s)
    return Bucket(max(0.0, full.level - amount), full.at_s)


class Throttle:
    """One source that is slowed down, never refused: each take says how long to wait before the next. The arithmetic is
    that of `refilled`, on plain numbers: every message of every stream comes by here.
    """

    __slots__ = ("_at_s", "_level", "_rate")

    def __init__(self, rate: Rate, now_s: float) -> None:
        self._rate, self._level, self._at_s = rate, rate.burst, now_s

    def take(self, amount: float, now_s: float) -> float:
        """Takes `amount` (at most a burst) and returns the seconds until the source is within its rate again."""
        rate = self._rate
        if now_s > self._at_s:
            self._level = min(rate.burst, self._level + (now_s - self._at_s) * rate.per_s)
            self._at_s = now_s
        self._level -= min(amount, rate.burst)
        if self._level >= 0:
            return 0.0
        # What is not there yet is paid for by the pause.
        self._at_s -= self._level / rate.per_s
        self._level = 0.0
        return self._at_s - now_s


class SourceLimiter:
    """A bucket per source, for at most `source_limit` sources: the one seen longest ago is forgotten first."""

    def __init__(self, rate: Rate, source_limit: int = 4096) -> None:
        self._rate = rate
        self._limit = source_limit
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, source: str, now_s: float) -> float:
        """Seconds until the source may go on; 0 = now. Takes nothing."""
        bucket = self._buckets.get(source)
        return 0.0 if bucket is None else wait_s(bucket, self._rate, now_s)

    def take(self, source: str, now_s: float) -> None:
        bucket = self._buckets.pop(source, None) or Bucket(self._rate.burst, now_s)
        self._buckets[source] = taken(bucket, self._rate, now_s)
        while len(self._buckets) > self._limit:
            self._buckets.popitem(last=False)
