"""The workers as the planner sees them: how long a run of blocks takes each, and how each could hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from starlings_job.memory import HEADROOM, MemoryUse, stage_memory
from starlings_job.profile import Profile
from starlings_protos.messages import PlanRequest, PlanWorker, Span, Stage, WorkerId

# Microbatches that a worker holds at once at most, where memory lets it: enough for pipelines with long ways. How many
# are under way is the workers' to find (in_flight.py), since nobody knows the links yet when a plan is made.
SLOTS_MOST = 64
# With a single slot a worker waits for every transfer instead of working meanwhile.
ONE_SLOT_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Holding:
    """How a worker would hold a run of blocks."""

    slots: int
    recompute: bool
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Option:
    """A span that a worker could take. `seconds`: forward plus backward of one microbatch, per stage of the span."""

    span: Span
    seconds: tuple[float, ...]
    holding: Holding

    def second_of(self, stage: int) -> float:
        return self.seconds[stage - self.span.first_stage]


class Fleet:
    """Reads everything off the request once. Workers are sorted, so that nothing depends on who joined first.

    A worker whose measurements are unusable has no options (`unmeasured` says what is wrong with them).
    """

    def __init__(self, request: PlanRequest, profile: Profile) -> None:
        self.request = request
        self.profile = profile
        self.unmeasured: dict[WorkerId, str] = {}
        self._forward: dict[WorkerId, list[float]] = {}
        self._both: dict[WorkerId, list[float]] = {}
        self._needs: dict[tuple[int, int, bool], tuple[int, int]] = {}
        workers = []
        for worker in sorted(request.workers, key=lambda w: w.worker_id):
            flaw = self._read(worker)
            if flaw:
                self.unmeasured[worker.worker_id] = flaw
            else:
                workers.append(worker)
        self.workers: tuple[PlanWorker, ...] = tuple(workers)

    def _read(self, worker: PlanWorker) -> str:
        """Prefix sums of the seconds per block; why the measurements cannot be used, or ""."""
        forward, both = [], []
        for block in self.profile.blocks:
            ahead, back = worker.forward_seconds.get(block.kind), worker.backward_seconds.get(block.kind)
            if ahead is None or back is None:
                return f"its probe did not measure blocks of kind {block.kind!r}"
            if not (math.isfinite(ahead) and math.isfinite(back) and ahead >= 0 and back >= 0):
                return f"its probe reports impossible seconds for blocks of kind {block.kind!r}"
            # A clock too coarse for a small block must not make it free.
            forward.append(max(ahead, 1e-7))
            both.append(max(ahead, 1e-7) + max(back, 1e-7))
        self._forward[worker.worker_id] = [0.0, *accumulate(forward)]
        self._both[worker.worker_id] = [0.0, *accumulate(both)]
        return ""

    # ------------------------------------------------------------------ time

    def whole_seconds(self, worker_id: WorkerId) -> float:
        return self._both[worker_id][-1]

    @property
    def bound(self) -> float:
        """Microbatches/s if everybody held everything: no plan is faster."""
        return sum(1 / self.whole_seconds(w.worker_id) for w in self.workers)

    def typical_block_seconds(self) -> list[float]:
        """Seconds per block of a worker of median speed."""
        ranked = sorted(self.workers, key=lambda w: (self.whole_seconds(w.worker_id), w.worker_id))
        sums = self._both[ranked[len(ranked) // 2].worker_id]
        return [after - before for before, after in pairwise(sums)]

    def stage_seconds(
        self, worker_id: WorkerId, stage: Stage, recompute: bool = False, one_slot: bool = False
    ) -> float:
        """Forward and backward of one microbatch through `stage`."""
        return self.run_seconds(worker_id, stage.first_block, stage.last_block, recompute, one_slot)

    def run_seconds(
        self, worker_id: WorkerId, first: int, last: int, recompute: bool = False, one_slot: bool = False
    ) -> float:
        """The same through blocks first..last."""
        end = last + 1
        seconds = self._both[worker_id][end] - self._both[worker_id][first]
        if recompute:
            seconds += self._forward[worker_id][end] - self._forward[worker_id][first]
        return seconds * (ONE_SLOT_FACTOR if one_slot else 1.0)

    def seconds_table(
        self, stages: Sequence[Stage], recompute: bool = False, one_slot: bool = False
    ) -> npt.NDArray[np.float64]:
        """[w, s]: `stage_seconds` of all workers and stages at once."""
        first = [stage.first_block for stage in stages]
        end = [stage.last_block + 1 for stage in stages]
        seconds = np.zeros((len(self.workers), len(stages)))
        for sums in (self._both, self._forward)[: 1 + recompute]:
            table = np.array([sums[w.worker_id] for w in self.workers]).reshape(len(self.workers), -1)
            seconds += table[:, end] - table[:, first]
        return seconds * (ONE_SLOT_FACTOR if one_slot else 1.0)

    # ------------------------------------------------------------------ memory

    def block_bytes(self) -> list[float]:
        """Bytes per block while it is trained, one microbatch in flight."""
        return [float(self.need_bytes(b, b)) for b in range(len(self.profile.blocks))]

    def state_bytes(self, first_block: int, last_block: int) -> float:
        """What the blocks take without any microbatch: no holder has less for them."""
        use = self._memory(first_block, last_block, 1, False)
        return (use.weights + use.training) * (1 + HEADROOM)

    def need_bytes(self, first_block: int, last_block: int, slots: int = 1, recompute: bool = False) -> int:
        return self._memory(first_block, last_block, slots, recompute).total

    def _memory(self, first_block: int, last_block: int, slots: int, recompute: bool) -> MemoryUse:
        return stage_memory(
            self.profile,
            first_block,
            last_block,
            per_parameter=self.request.bytes_per_parameter,
            microbatch=self.request.microbatch,
            slots=slots,
            recompute=recompute,
        )

    def least_bytes(self, first_block: int, last_block: int) -> int:
        """The least with which anybody could hold the blocks."""
        return min(self.need_bytes(first_block, last_block, 1, again) for again in (False, True))

    def holding(self, memory_bytes: int, first_block: int, last_block: int, stages: int) -> Holding | None:
        """How a device of `memory_bytes` holds the blocks as `stages` stages; None when not even one microbatch fits.

        Recomputation costs a second forward: only where fewer than two microbatches fit without.
        """
        whole = (first_block, last_block) == (0, len(self.profile.blocks) - 1)
        wanted = 2 if whole and stages == 1 else SLOTS_MOST
        wanted = min(wanted, max(2, self.request.microbatches_per_step))
        best = (0, False)
        for recompute in (False, True):
            least, each = self._need(first_block, last_block, recompute)
            fitting = 0 if least > memory_bytes else min(wanted, 1 + (memory_bytes - least) // each)
            if fitting > best[0]:
                best = (fitting, recompute)
            if fitting >= 2:
                break
        if best[0] == 0:
            return None
        slots, recompute = useful_slots(best[0], stages), best[1]
        least, each = self._need(first_block, last_block, recompute)
        return Holding(slots, recompute, least + (slots - 1) * each)

    def _need(self, first_block: int, last_block: int, recompute: bool) -> tuple[int, int]:
        """Bytes with one microbatch in flight, and for each further one (rounded up): the account is linear in them."""
        key = (first_block, last_block, recompute)
        known = self._needs.get(key)
        if known is None:
            one, two = (self.need_bytes(first_block, last_block, slots, recompute) for slots in (1, 2))
            known = self._needs[key] = (one, max(1, two - one + 1))
        return known

    # ------------------------------------------------------------------ options

    def options(self, worker: PlanWorker, stages: Sequence[Stage]) -> tuple[Option, ...]:
        """The longest spans from each stage on: holding more stages never slows a plan down.

        Per first stage at most two: as far as it goes at full speed, and farther with recomputation or a single slot.
        Whoever holds a span already has that option only.
        """
        if worker.held is not None:
            return (self._option(worker, stages, worker.held),)
        found: dict[Span, Option] = {}
        for full_speed in (True, False):
            end = -1
            for first in range(len(stages)):
                # What ends where an earlier start ended too is only a part of that.
                last = self._furthest(worker.memory_bytes, stages, first, end, full_speed)
                if last > end:
                    end = last
                    found.setdefault(Span(first, last), self._option(worker, stages, Span(first, last)))
        return tuple(found.values())

    def _furthest(
        self, memory_bytes: int, stages: Sequence[Stage], first: int, known: int, full_speed: bool
    ) -> int:
        """The last stage of the longest span from `first` on if it goes beyond `known`, else `known`."""
        last = known
        while last + 1 < len(stages):
            following = max(last + 1, first)
            holding = self.holding(
                memory_bytes,
                stages[first].first_block,
                stages[following].last_block,
                following - first + 1,
            )
            if holding is None or (full_speed and (holding.recompute or holding.slots == 1)):
                break
            last = following
        return last

    def _option(self, worker: PlanWorker, stages: Sequence[Stage], span: Span) -> Option:
        first, last = stages[span.first_stage].first_block, stages[span.last_stage].last_block
        holding = self.holding(worker.memory_bytes, first, last, len(span.stages))
        if holding is None:
            # It holds the span all the same, so the account of its memory is a little too high.
            holding = Holding(1, True, self.need_bytes(first, last, 1, recompute=True))
        seconds = tuple(
            self.stage_seconds(worker.worker_id, stages[s], holding.recompute, holding.slots == 1)
            for s in span.stages
        )
        return Option(span, seconds, holding)


def useful_slots(slots: int, stages: int) -> int:
    """Slots worth having of those that fit.

    The worker keeps one slot free per deeper stage as soon as it has as many slots as stages (against deadlock), so
    that with barely as many only one microbatch could enter; with one slot fewer than stages there is no reserve, and
    all of them are of use.
    """
    entering = slots - (stages - 1)
    return stages - 1 if slots >= stages and stages - 1 > max(1, entering) else slots
