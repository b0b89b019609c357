"""Numbers as people read them, and a loss curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def count(value: float) -> str:
    """1234567 -> "1.23 M"; below 10,000 with thousands separators."""
    if abs(value) < 1e4:
        return f"{value:,.0f}"
    for limit, suffix in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        scaled = value / limit
        if abs(scaled) < 999.5 or suffix == "T":
            break
    return f"{scaled:.3g} {suffix}"


def size(byte_count: float) -> str:
    """Bytes with decimal units, as networks and disks are sold: 1536000 -> "1.54 MB"."""
    for limit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(byte_count) >= limit:
            return f"{byte_count / limit:.3g} {suffix}"
    return f"{byte_count:.0f} B"


def duration(seconds: float) -> str:
    """ "0:07", "12:30", "3:05:00"."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` averaged into at most `width` bars, scaled between their least and greatest; "" without finite
    values.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    means = []
    for column in range(columns):
        part = finite[column * len(finite) // columns : (column + 1) * len(finite) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return _BARS[3] * columns
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in means)
