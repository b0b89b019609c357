"""Workers that fail again and again wait, longer each time, and everybody can see why. Pure; a restart forgives.

Two kinds count. *Harmful*: the worker was dismissed, because what it did failed the others: it waits from the first
time on. *Any*: its engine ended, or it was lost while it held a span: from the fifth time on, because each return
costs the others a copy of the state. Both wait twice as long each time, up to a limit, and an hour without a failure is
forgiven.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.invite import spoken_duration
from starlings_protos.messages import WorkerId

# Failures of any kind before a worker waits.
PATIENCE = 5
FORGIVEN_AFTER_S = 3600.0
# Whoever has not failed for an hour is forgotten when there are more.
REMEMBERED = 20_000


@dataclass(slots=True)
class _Record:
    harmful: int = 0
    count: int = 0
    last_s: float = 0.0
    until_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """`until_s`: by the coordinator's monotonic clock."""

    until_s: float
    words: str


class Failures:
    def __init__(self, first_s: float, most_s: float) -> None:
        """How long the first pause lasts, and the longest."""
        self._first_s = first_s
        self._most_s = most_s
        self._records: dict[WorkerId, _Record] = {}

    def note(self, worker_id: WorkerId, reason: str, now_s: float, *, harmful: bool) -> None:
        record = self._records.get(worker_id)
        if record is None or now_s - record.last_s > FORGIVEN_AFTER_S:
            if len(self._records) >= REMEMBERED:
                self._forget(now_s)
            record = self._records[worker_id] = _Record()
        record.count += 1
        record.harmful += harmful
        record.last_s, record.reason = now_s, reason
        times = max(record.harmful, record.count - PATIENCE + 1)
        if times > 0:
            wait_s = min(self._most_s, self._first_s * 2.0 ** min(times - 1, 32))
            record.until_s = max(record.until_s, now_s + wait_s)

    def _forget(self, now_s: float) -> None:
        kept = {w: r for w, r in self._records.items() if now_s - r.last_s <= FORGIVEN_AFTER_S}
        self._records = kept

    def pause(self, worker_id: WorkerId, now_s: float) -> Pause | None:
        """What it still has to wait; None: nothing."""
        record = self._records.get(worker_id)
        if record is None or record.until_s <= now_s:
            return None
        left = spoken_duration(record.until_s - now_s)
        if record.count < PATIENCE:
            return Pause(record.until_s, f"set aside for {left}: {record.reason}")
        again = f"it has failed {record.count} times of late, the last time because: {record.reason}"
        return Pause(record.until_s, f"set aside for {left}: {again}")

    def count(self, worker_id: WorkerId, now_s: float) -> int:
        """Failures of late."""
        record = self._records.get(worker_id)
        return record.count if record is not None and now_s - record.last_s <= FORGIVEN_AFTER_S else 0
