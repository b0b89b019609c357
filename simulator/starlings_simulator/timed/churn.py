"""When workers are there: from a trace of joins and leaves, or from their expected lifetimes. Pure, by seed."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlings_job.errors import JobError
from starlings_protos.messages import WorkerId
from starlings_simulator.timed.machines import Stay

FILE_LIMIT_BYTES = 32 << 20
# After its lifetime a volunteer's machine is away for this part of it, on average: BOINC hosts are available for about
# two thirds of the time (Javadi, Kondo, Vincent, Anderson 2011, IEEE TPDS 22(11), section 4, on SETI@home).
AWAY_SHARE = 0.5


class TraceError(JobError):
    """A trace file that cannot be read, or that says what cannot be."""


def by_lifetimes(
    lifetimes_s: Mapping[WorkerId, float], seconds: float, seed: int, *, away_share: float = AWAY_SHARE
) -> tuple[Stay, ...]:
    """Alternating exponential periods of being there and away (as BOINC's client simulator has them).

    Args:
        lifetimes_s: mean time of being there; infinite: all the time.
        away_share: mean time of being away, in parts of that.
    """
    stays = []
    for worker_id, lifetime_s in sorted(lifetimes_s.items()):
        if math.isinf(lifetime_s):
            stays.append(Stay(worker_id))
            continue
        rng = random.Random(f"churn:{seed}:{worker_id}")
        # It is somewhere in the middle of a period.
        now_s = 0.0
        there = rng.random() < 1 / (1 + away_share)
        while now_s < seconds:
            period_s = (
                rng.expovariate(1 / lifetime_s) if there else rng.expovariate(1 / (away_share * lifetime_s))
            )
            if there:
                stays.append(Stay(worker_id, now_s, now_s + period_s, vanishes=rng.random() < 0.5))
            now_s += period_s
            there = not there
    return tuple(stays)


def load_trace(path: str | Path) -> list[tuple[float, int, str]]:
    """Of a JSON file: joins and leaves as (second, +1 or -1, node), or, with another node per change, numbers of live
    nodes as [second, live]. Both also below a key "events", "points" or "trace" of an object.

    Raises:
        TraceError
    """
    path = Path(path)
    try:
        if path.stat().st_size > FILE_LIMIT_BYTES:
            raise TraceError(f"{path}: a trace of more than {FILE_LIMIT_BYTES} bytes")
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: cannot read the trace ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise TraceError(
            f"{path}: no JSON; a trace is a list of [second, +1 or -1, node] or [second, live]"
        ) from None
    if isinstance(record, dict):
        found = [record[key] for key in ("events", "points", "trace") if isinstance(record.get(key), list)]
        record = found[0] if found else None
    if not isinstance(record, list) or not record:
        raise TraceError(f"{path}: a trace is a list of [second, +1 or -1, node] or of [second, live]")
    rows = []
    for number, row in enumerate(record):
        numbers = row[:2] if isinstance(row, list) else []
        fine = len(numbers) == 2 and all(
            isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers
        )
        if not fine:
            raise TraceError(
                f"{path}: entry {number} is {str(row)[:60]}, not [second, +1 or -1, node] or [second, live]"
            )
        rows.append(row)
    if all(len(row) >= 3 for row in rows):
        return [(float(at_s), 1 if change > 0 else -1, str(node)) for at_s, change, node, *_ in rows]
    return _changes([(float(at_s), int(live)) for at_s, live, *_ in rows])


def _changes(points: Sequence[tuple[float, int]]) -> list[tuple[float, int, str]]:
    """Who came first is lost first: nothing is known of which node it was."""
    changes: list[tuple[float, int, str]] = []
    live: deque[str] = deque()
    made = 0
    for at_s, wanted in points:
        while len(live) < wanted:
            live.append(f"node{made}")
            changes.append((at_s, 1, live[-1]))
            made += 1
        while len(live) > max(0, wanted):
            changes.append((at_s, -1, live.popleft()))
    return changes


def by_trace(
    trace: Sequence[tuple[float, int, str]],
    workers: Sequence[WorkerId],
    seconds: float,
    *,
    notice_s: float = 0.0,
) -> tuple[Stay, ...]:
    """Each node of the trace is played by a worker that is free, the one that was away longest; nodes for which there
    is none are left out. The trace begins with its first event, and again from its beginning when it is over.

    Args:
        notice_s: how long before its end a node is told (spot markets do; volunteers do not).
    """
    ordered = sorted(trace, key=lambda event: event[0])
    begun_s = ordered[0][0]
    length_s = max(1.0, ordered[-1][0] - begun_s)
    free, playing = deque(workers), dict[str, tuple[WorkerId, float]]()
    stays = []
    turn = 0
    while turn * length_s < seconds:
        for at_s, change, node in ordered:
            now_s = turn * length_s + at_s - begun_s
            if now_s >= seconds:
                break
            if change > 0 and node not in playing and free:
                playing[node] = (free.popleft(), now_s)
            elif change < 0 and node in playing:
                worker_id, since_s = playing.pop(node)
                stays.append(Stay(worker_id, since_s, now_s, notice_s=notice_s))
                free.append(worker_id)
        turn += 1
    stays += [Stay(worker_id, since_s) for worker_id, since_s in playing.values()]
    return tuple(stays)
