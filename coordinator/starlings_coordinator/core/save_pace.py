"""When to save, pure: how often at most, when again after a failure, and what people are told meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

# After a save rest three times as long as it took: saving takes a quarter of the time at most, so the bytes of an hour
# are those of a quarter of an hour at full speed, however short the steps are.
REST_PER_SAVE = 3.0
# Failed saves are tried again after `retry_s`, doubling up to this.
RETRY_MOST_S = 120.0
# The last checkpoint of a job is worth waiting for: this long when the disk is full, so that somebody can make room.
FULL_DISK_S = 3600.0
DISK_FULL = 9


@dataclass(slots=True)
class SavePace:
    retry_s: float
    # A checkpoint was due and could not be begun, or failed: the next step makes up for it.
    overdue: bool = False
    # Why the last save failed, in words with the fix; "" when it did not.
    trouble: str = ""
    # How often in a row the newest version that failed has failed, and how often any.
    failures: int = 0
    _failed_version: int = -1
    _in_a_row: int = 0
    _not_before_s: float = float("-inf")
    _failing_since_s: float = 0.0

    def due(self, version: int, every: int) -> bool:
        """Whether this version should be saved, by the job file (`every` steps; 0 = never on the way)."""
        return every > 0 and (self.overdue or version % every == 0)

    def may_begin(self, now_s: float) -> bool:
        return now_s >= self._not_before_s

    def saved(self, began_at_s: float, now_s: float) -> None:
        self.overdue, self.trouble, self.failures, self._in_a_row = False, "", 0, 0
        self._not_before_s = now_s + REST_PER_SAVE * (now_s - began_at_s)

    def failed(self, version: int, reason: str, now_s: float) -> float:
        """When it should be tried again, by the monotonic clock."""
        if version != self._failed_version:
            self._failed_version, self.failures, self._failing_since_s = version, 0, now_s
        self.failures += 1
        self._in_a_row += 1
        self.overdue, self.trouble = True, reason
        self._not_before_s = now_s + min(self.retry_s * 2.0 ** min(self._in_a_row - 1, 16), RETRY_MOST_S)
        return self._not_before_s

    def gives_up(self, exit_code: int, tries: int, now_s: float) -> bool:
        """Whether the end of the job should wait no longer."""
        if exit_code == DISK_FULL:
            return now_s - self._failing_since_s >= FULL_DISK_S
        return self.failures >= tries
