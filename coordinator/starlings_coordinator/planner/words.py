"""What the planner says to people: what binds, why a worker stands by, what is missing. With figures."""

from __future__ import annotations

from collections.abc import Sequence

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.search import Found
from starlings_coordinator.planner.throughput import Choice
from starlings_protos.messages import PlanWorker, Stage

# A plan that reaches this part of the bound is bound by nothing else.
NEAR_THE_BOUND = 0.97


def human_bytes(count: float) -> str:
    """Such as "3.1 GB"; decimal units, as memory is sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{max(0, round(count))} B"


def stage_words(stages: Sequence[int]) -> str:
    first, last = stages[0], stages[-1]
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def binding_words(found: Found, bound: float) -> str:
    """What to add to make the plan faster."""
    if found.flow.microbatches_per_s >= NEAR_THE_BOUND * bound:
        return "compute of all workers"
    prices = found.flow.prices
    top = max(prices)
    tight = [s for s, price in enumerate(prices) if price >= 0.5 * top]
    last = 0
    while last + 1 < len(tight) and tight[last + 1] == tight[last] + 1:
        last += 1
    idle = sorted(w for w, load in found.flow.load.items() if load < 0.9)
    text = f"compute of the workers that hold {stage_words(tight[: last + 1])}"
    if idle:
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        text += f"; {', '.join(idle[:3])}{more} could do more with memory for them"
    return text


def idle_words(fleet: Fleet, worker: PlanWorker, stages: Sequence[Stage]) -> str:
    """Why `worker` holds nothing of this cut."""
    needs = [fleet.least_bytes(stage.first_block, stage.last_block) for stage in stages]
    stage = min(range(len(stages)), key=lambda s: needs[s])
    missing = max(1, needs[stage] - worker.memory_bytes)
    return (
        f"needs {human_bytes(missing)} more memory for stage {stage}, the smallest of {len(stages)} "
        f"({human_bytes(needs[stage])}; it offers {human_bytes(worker.memory_bytes)})"
    )


def shortage_words(fleet: Fleet, tried: Sequence[tuple[Sequence[Stage], Choice]]) -> str:
    """What would have to be there: memory for a block that fits nowhere, else for the stages that stay bare."""
    roomiest = max(w.memory_bytes for w in fleet.workers)
    fixed = bool(fleet.request.stages or fleet.request.stages_wanted)
    pieces: Sequence[Stage] = [Stage(b, b) for b in range(len(fleet.profile.blocks))]
    if fixed:
        # Of several cuts into as many stages, the one whose largest stage is smallest.
        pieces = min(
            (stages for stages, _ in tried),
            key=lambda cut: max(fleet.least_bytes(s.first_block, s.last_block) for s in cut),
        )
    for index, piece in enumerate(pieces):
        need = fleet.least_bytes(piece.first_block, piece.last_block)
        if need > roomiest:
            what = f"stage {index}" if fixed else "block"
            return (
                f"needs {human_bytes(need - roomiest)} more on one worker for {what} "
                f"{'(' * fixed}{_blocks(fleet, piece, piece)}{')' * fixed} "
                f"({human_bytes(need)}; the largest offers {human_bytes(roomiest)})"
            )
    answers = []
    for stages, choice in tried:
        bare = [s for s in range(len(stages)) if not any(s in o.span for o in choice.values())]
        if not bare:
            continue
        runs = _runs(bare)
        need = sum(fleet.least_bytes(stages[a].first_block, stages[b].last_block) for a, b in runs)
        names = ", ".join(stage_words((a, b)) for a, b in runs)
        span = _blocks(fleet, stages[runs[0][0]], stages[runs[-1][1]])
        answers.append((need, f"needs {human_bytes(need)} more for {names} of {len(stages)} ({span})"))
    return min(answers)[1] if answers else "no worker can hold a stage"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _blocks(fleet: Fleet, first: Stage, last: Stage) -> str:
    names = fleet.profile.block_names
    ends = (names[first.first_block], names[last.last_block])
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
