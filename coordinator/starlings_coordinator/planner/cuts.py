"""Where a model may be cut into stages: few candidates per number of stages, balanced by time and by memory."""

from __future__ import annotations

from collections.abc import Sequence

from starlings_protos.messages import Stage

# Every count up to here is tried, then each by this factor more, up to the number of blocks.
COUNTS_DENSE = 12
COUNTS_FACTOR = 1.3
COUNTS_MOST = 256


def stage_counts(block_count: int) -> list[int]:
    """The numbers of stages worth trying, ascending: dense while each one matters, then geometric."""
    counts = list(range(1, min(block_count, COUNTS_DENSE) + 1))
    while counts[-1] < min(block_count, COUNTS_MOST):
        counts.append(min(block_count, COUNTS_MOST, max(counts[-1] + 1, int(counts[-1] * COUNTS_FACTOR))))
    return counts


def balanced_cut(costs: Sequence[float], stage_count: int) -> tuple[Stage, ...]:
    """Blocks 0..n-1 in exactly `stage_count` contiguous runs whose largest sum of costs is least (to 1e-9).

    Bisection on the largest sum, greedy fill for each try: O(n log) instead of the exact O(n^2) programme.

    Raises:
        ValueError: more stages than blocks, or none.
    """
    if not 1 <= stage_count <= len(costs):
        raise ValueError(f"{len(costs)} blocks cannot be cut into {stage_count} stages")
    low, high = max(costs), sum(costs)
    for _ in range(60):
        if high - low <= 1e-9 * high:
            break
        middle = (low + high) / 2
        if len(_fill(costs, middle)) <= stage_count:
            high = middle
        else:
            low = middle
    runs = _fill(costs, high)
    while len(runs) < stage_count:
        # Splitting never raises the largest sum; the costliest run that can be split, the first of equals.
        index = max(
            (i for i, run in enumerate(runs) if run[1] > run[0]), key=lambda i: (_sum(costs, runs[i]), -i)
        )
        runs[index : index + 1] = _halves(costs, runs[index])
    return tuple(Stage(first, last) for first, last in runs)


def _fill(costs: Sequence[float], most: float) -> list[tuple[int, int]]:
    """Runs filled from the left, none above `most` (a single block is always a run)."""
    runs: list[tuple[int, int]] = []
    first, total = 0, 0.0
    for block, cost in enumerate(costs):
        if block > first and total + cost > most * (1 + 1e-12):
            runs.append((first, block - 1))
            first, total = block, 0.0
        total += cost
    runs.append((first, len(costs) - 1))
    return runs


def _sum(costs: Sequence[float], run: tuple[int, int]) -> float:
    return sum(costs[run[0] : run[1] + 1])


def _halves(costs: Sequence[float], run: tuple[int, int]) -> list[tuple[int, int]]:
    first, last = run
    cut = min(
        range(first, last),
        key=lambda c: (max(_sum(costs, (first, c)), _sum(costs, (c + 1, last))), c),
    )
    return [(first, cut), (cut + 1, last)]


def candidate_cuts(
    times: Sequence[float], sizes: Sequence[float], *, thorough: bool = True, wanted: int = 0
) -> list[tuple[Stage, ...]]:
    """Cuts to compare, fewest stages first, without repeats.

    Args:
        times: seconds per block, of a typical worker.
        sizes: bytes per block while it is trained.
        thorough: balance by time and by memory too, not only by both.
        wanted: exactly so many stages; 0 for every count worth trying.
    """
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    mixed = [t / mean_time + s / mean_size for t, s in zip(times, sizes, strict=True)]
    cuts: dict[tuple[Stage, ...], None] = {}
    for count in [wanted] if wanted else stage_counts(len(times)):
        for costs in (mixed, times, sizes) if thorough else (mixed,):
            cuts.setdefault(balanced_cut(costs, count))
    return list(cuts)
