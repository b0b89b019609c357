"""The workers as the planner sees them: seconds and bytes per run of blocks, read off the request once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlings_job.memory import slots_that_fit, stage_memory
from starlings_job.profile import Profile
from starlings_protos.messages import PlanRequest, PlanWorker, Stage, WorkerId

# Microbatches that a worker holds at once at most: enough to keep it busy while others are on their way.
SLOTS_MOST = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """How a worker would hold a run of blocks."""

    slots: int
    recompute: bool
    memory_bytes: int


class Fleet:
    """Answers: how long does worker w take for a block, and how could it hold blocks a..b?"""

    def __init__(self, request: PlanRequest, profile: Profile) -> None:
        self.request = request
        self.profile = profile
        # Sorted, so that the answer does not depend on who joined first.
        self.workers: tuple[PlanWorker, ...] = tuple(sorted(request.workers, key=lambda w: w.worker_id))
        self._seconds = {w.worker_id: self._block_seconds(w) for w in self.workers}
        self._holdings: dict[tuple[WorkerId, int, int], Holding | None] = {}

    def _block_seconds(self, worker: PlanWorker) -> tuple[float, ...]:
        """Forward plus backward of one microbatch, per block; a kind not measured is scaled by its arithmetic."""
        measured = {
            kind: worker.forward_seconds[kind] + worker.backward_seconds.get(kind, 0.0)
            for kind in worker.forward_seconds
        }
        flops = {block.kind: max(1, block.flops_per_sample) for block in self.profile.blocks}
        known = [measured[kind] / flops[kind] for kind in measured if kind in flops and measured[kind] > 0]
        per_flop = sum(known) / len(known) if known else 1e-12
        return tuple(
            max(measured.get(block.kind, 0.0), 1e-9)
            if block.kind in measured
            else per_flop * flops[block.kind]
            for block in self.profile.blocks
        )

    def stage_seconds(self, worker_id: WorkerId, stages: Sequence[Stage]) -> tuple[float, ...]:
        seconds = self._seconds[worker_id]
        return tuple(sum(seconds[b] for b in stage.blocks) for stage in stages)

    def whole_seconds(self, worker_id: WorkerId) -> float:
        return sum(self._seconds[worker_id])

    def holding(self, worker: PlanWorker, first_block: int, last_block: int) -> Holding | None:
        """None when not even one microbatch fits beside the blocks, also with recomputation."""
        key = (worker.worker_id, first_block, last_block)
        if key not in self._holdings:
            self._holdings[key] = self._find_holding(worker, first_block, last_block)
        return self._holdings[key]

    def _find_holding(self, worker: PlanWorker, first_block: int, last_block: int) -> Holding | None:
        request = self.request
        wanted = min(SLOTS_MOST, max(2, request.microbatches_per_step))
        found: Holding | None = None
        # Recomputation costs a second forward: only where fewer than two microbatches fit without.
        for recompute in (False, True):
            slots = slots_that_fit(
                self.profile,
                first_block,
                last_block,
                per_parameter=request.bytes_per_parameter,
                microbatch=request.microbatch,
                memory_bytes=worker.memory_bytes,
                slots_wanted=wanted,
                recompute=recompute,
            )
            if slots > (found.slots if found is not None else 0):
                found = Holding(slots, recompute, self.need_bytes(first_block, last_block, slots, recompute))
            if slots >= min(2, wanted):
                break
        return found

    def need_bytes(self, first_block: int, last_block: int, slots: int = 1, recompute: bool = False) -> int:
        return stage_memory(
            self.profile,
            first_block,
            last_block,
            per_parameter=self.request.bytes_per_parameter,
            microbatch=self.request.microbatch,
            slots=slots,
            recompute=recompute,
        ).total
