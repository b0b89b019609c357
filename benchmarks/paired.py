"""What paired runs say: the mean of their differences, its interval at 95 %; and runs that are kept, to go on later."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Quantiles of Student's t at 0.975, by degrees of freedom from 1 on; beyond them, that of 30 (a little too wide).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a mean lies with 95 % confidence; infinitely wide from fewer than two values."""

    mean: float
    low: float
    high: float
    count: int


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of independent values, such as one difference per seed.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("there is nothing to average")
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    half = _T_975[min(count - 1, len(_T_975)) - 1] * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


class Results:
    """Finished runs, one JSON object per line. A run that was broken off is not in it, and is done again."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """`settings`: all that a run depends on beside its key; runs under other settings stay in the file unread."""
        self._file = file
        self._settings = json.loads(json.dumps(dict(settings)))
        self._runs: dict[str, dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
        if lines and not lines[-1].endswith("\n"):
            # Broken off while it was written.
            lines.pop()
            file.write_text("".join(lines), "utf-8")
        for record in map(json.loads, lines):
            if record["settings"] == self._settings:
                self._runs[record["key"]] = record["run"]

    def get(self, key: str) -> dict[str, Any] | None:
        return self._runs.get(key)

    def add(self, key: str, run: Mapping[str, Any]) -> None:
        self._runs[key] = dict(run)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "settings": self._settings, "run": self._runs[key]}) + "\n")
