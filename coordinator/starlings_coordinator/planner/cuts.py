"""Where a model may be cut: for each number of stages, the cut whose costliest stage is cheapest."""

from __future__ import annotations

from collections.abc import Sequence

from starlings_protos.messages import Stage


def balanced_cut(costs: Sequence[float], stage_count: int) -> tuple[Stage, ...]:
    """Blocks 0..n-1 in `stage_count` contiguous runs, minimising the largest sum of costs; the earliest cut on ties.

    Dynamic programming over prefixes, O(n^2 * stage_count).
    """
    count = len(costs)
    if not 1 <= stage_count <= count:
        raise ValueError(f"{count} blocks cannot be cut into {stage_count} stages")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(stage_count + 1)]
    begins = [[0] * (count + 1) for _ in range(stage_count + 1)]
    best[0][0] = 0.0
    for stages in range(1, stage_count + 1):
        for end in range(stages, count + 1):
            for begin in range(stages - 1, end):
                largest = max(best[stages - 1][begin], prefix[end] - prefix[begin])
                if largest < best[stages][end] - 1e-15:
                    best[stages][end], begins[stages][end] = largest, begin
    cut: list[Stage] = []
    end = count
    for stages in range(stage_count, 0, -1):
        begin = begins[stages][end]
        cut.append(Stage(begin, end - 1))
        end = begin
    return tuple(reversed(cut))
