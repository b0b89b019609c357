"""One cut of a model on one swarm, as arrays: what linear programme, bounds and search compute with.

Rates are microbatches per second, seconds are those of one microbatch forward and backward, bytes are on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from starlings_coordinator.planner.fleet import Fleet
from starlings_job.codecs import boundary_bytes
from starlings_protos.messages import PlanWorker, Span, Stage, WorkerId

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Of a choice: this worker holds nothing.
IDLE = -1
UNLIMITED = math.inf


@dataclass(frozen=True, eq=False)
class Problem:
    """`seconds[m, w, s]`: worker w at stage s when it holds its span in mode m (plainly, with recomputation, ...).

    Options are the spans that a worker's memory allows, those of worker w at `starts[w]` to `starts[w + 1]`; a
    *choice* is an array with one of them per worker, or IDLE. Sites share their rates among their workers, and what
    stays within a site costs nothing. A microbatch that passes boundary s (behind stage s) takes `forward_bytes[s]` up
    at the sender and down at the receiver, and `backward_bytes[s]` the other way when it comes back.
    """

    worker_ids: tuple[WorkerId, ...]
    seconds: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    # Per worker, the index of its site.
    site: Ints
    site_names: tuple[str, ...]
    # Per site, bytes/s; UNLIMITED where nothing is known to bind.
    up: Floats
    down: Floats
    # Bytes per worker, and per stage the least that anybody keeps of it while training.
    memory: Floats
    state: Floats
    starts: Ints
    first: Ints
    last: Ints
    mode: Ints

    @property
    def workers(self) -> int:
        return len(self.worker_ids)

    @property
    def stages(self) -> int:
        return int(self.seconds.shape[2])

    @property
    def sites(self) -> int:
        return len(self.site_names)

    @cached_property
    def owner(self) -> Ints:
        """The worker of each option."""
        return np.repeat(np.arange(self.workers), np.diff(self.starts))

    @cached_property
    def site_sizes(self) -> Ints:
        return np.bincount(self.site, minlength=self.sites)

    @cached_property
    def holdable(self) -> Bools:
        """[w, s]: whether any option of w has stage s."""
        return np.isfinite(self.least_seconds)

    @cached_property
    def least_seconds(self) -> Floats:
        """[w, s]: the seconds of stage s in the fastest option that has it; infinite where there is none."""
        least = np.full((self.workers, self.stages), np.inf)
        for mode in np.unique(self.mode):
            own = self.mode == mode
            change = np.zeros((self.workers, self.stages + 1))
            np.add.at(change, (self.owner[own], self.first[own]), 1)
            np.add.at(change, (self.owner[own], self.last[own] + 1), -1)
            there = np.cumsum(change, axis=1)[:, :-1] > 0
            least = np.where(there, np.minimum(least, self.seconds[mode]), least)
        return least

    @cached_property
    def reach(self) -> Ints:
        """[w, a]: the last stage of the longest run from stage a on that w could hold; below a where there is none."""
        reach = np.full((self.workers, self.stages), -1)
        np.maximum.at(reach, (self.owner, self.first), self.last)
        return np.asarray(np.maximum.accumulate(reach, axis=1))

    @cached_property
    def limited(self) -> Bools:
        """[g]: sites whose links could bind: not if all their workers, each at its fastest stage, could send it all."""
        if not len(self.forward_bytes):
            return np.zeros(self.sites, bool)
        fastest = np.min(np.where(self.holdable, self.least_seconds, np.inf), axis=1, initial=np.inf)
        rate = np.bincount(self.site, 1 / np.maximum(fastest, 1e-12), minlength=self.sites)
        # Entering at one boundary and leaving at the next, and the same again on the way back.
        heaviest = 2 * np.max(np.maximum(self.forward_bytes, self.backward_bytes))
        return np.asarray(np.minimum(self.up, self.down) < rate * heaviest)

    @cached_property
    def run_rates(self) -> tuple[Floats, ...]:
        """Per mode [w, a, b]: microbatches/s that could pass through just stages a..b of w, at what it has least of.

        What workers share (the links of sites of several) is left out; where b < a the figure means nothing.
        """
        up, down = self.link_bytes
        alone = self.site_sizes[self.site] == 1
        tables = []
        for seconds in self.run_seconds:
            scarcest = seconds.copy()
            for rates, size in ((self.up, up), (self.down, down)):
                scarcest[alone] = np.maximum(scarcest[alone], size / rates[self.site[alone], None, None])
            tables.append(1 / np.maximum(scarcest, 1e-12))
        return tuple(tables)

    @cached_property
    def run_seconds(self) -> tuple[Floats, ...]:
        """Per mode [w, a, b]: seconds of one microbatch through stages a..b."""
        nothing = np.zeros((self.workers, 1))
        sums = [np.concatenate([nothing, np.cumsum(table, axis=1)], axis=1) for table in self.seconds]
        return tuple(elapsed[:, None, 1:] - elapsed[:, :-1, None] for elapsed in sums)

    @cached_property
    def link_bytes(self) -> tuple[Floats, Floats]:
        """[a, b]: bytes up and down of one microbatch that enters at stage a and leaves after stage b."""
        nothing = np.zeros(1)
        enter_forward = np.concatenate([nothing, self.forward_bytes])
        enter_backward = np.concatenate([nothing, self.backward_bytes])
        leave_forward = np.concatenate([self.forward_bytes, nothing])
        leave_backward = np.concatenate([self.backward_bytes, nothing])
        return (
            enter_backward[:, None] + leave_forward[None, :],
            enter_forward[:, None] + leave_backward[None, :],
        )

    def covered(self, choice: Ints) -> Ints:
        """[s]: how many workers hold each stage."""
        chosen = choice[choice >= 0]
        change = np.bincount(self.first[chosen], minlength=self.stages + 1)
        change -= np.bincount(self.last[chosen] + 1, minlength=self.stages + 1)
        return np.cumsum(change)[: self.stages]

    def span_of(self, option: int) -> Span:
        return Span(int(self.first[option]), int(self.last[option]))


# How a span is held, (recompute, one slot) by mode; the fastest that its memory allows.
MODES = ((False, False), (True, False), (False, True), (True, True))


def build_problem(
    fleet: Fleet,
    stages: Sequence[Stage],
    codec: str,
    *,
    needs: Floats | None = None,
    movable: bool = False,
) -> Problem:
    """The problem of a cut.

    Args:
        codec: what boundaries travel in (`[pipeline] codec`).
        needs: `need_table` of this cut, where it is known already.
        movable: whoever holds a span may take another one; else it has that one only.
    """
    blocks, microbatch = fleet.profile.blocks, fleet.request.microbatch
    shapes = [(microbatch, blocks[stage.last_block].boundary_bytes_per_sample // 4) for stage in stages[:-1]]
    names, site, up, down = _sites(fleet.workers)
    starts, first, last, mode = _options(fleet, stages, needs, movable=movable)
    return Problem(
        worker_ids=tuple(worker.worker_id for worker in fleet.workers),
        seconds=np.stack([fleet.seconds_table(stages, *mode) for mode in MODES]),
        forward_bytes=np.array([boundary_bytes(codec, shape) for shape in shapes], dtype=float),
        backward_bytes=np.array(
            [boundary_bytes(codec, shape, backward=True) for shape in shapes], dtype=float
        ),
        site=site,
        site_names=names,
        up=up,
        down=down,
        memory=np.array([worker.memory_bytes for worker in fleet.workers], dtype=float),
        state=np.array([fleet.state_bytes(s.first_block, s.last_block) for s in stages], dtype=float),
        starts=starts,
        first=first,
        last=last,
        mode=mode,
    )


def need_table(
    fleet: Fleet, stages: Sequence[Stage], most_bytes: float = UNLIMITED, longest: int = 0
) -> Floats:
    """[mode, a, b]: bytes of stages a..b in each of `MODES`; 0 where b < a.

    Args:
        most_bytes: what lies beyond a run that needs more in every mode is not looked at, and infinite.
        longest: runs up to this many stages further than their first are looked at all the same.
    """
    count = len(stages)
    needs = np.full((len(MODES), count, count), np.inf)
    needs[:, np.tri(count, k=-1, dtype=bool)] = 0.0
    for a in range(count):
        for b in range(a, count):
            for number, (recompute, one_slot) in enumerate(MODES):
                needs[number, a, b] = fleet.need_bytes(
                    stages[a].first_block, stages[b].last_block, 1 if one_slot else 2, recompute
                )
            if needs[:, a, b].min() > most_bytes and b - a >= longest:
                break
    return needs


def _options(
    fleet: Fleet, stages: Sequence[Stage], needs: Floats | None, *, movable: bool
) -> tuple[Ints, Ints, Ints, Ints]:
    """For each worker the longest spans at full speed and the longest in any mode; `Fleet.options` for all at once."""
    count = len(stages)
    memory = np.array([worker.memory_bytes for worker in fleet.workers], dtype=float)
    if needs is None:
        longest_held = max(
            (w.held.last_stage - w.held.first_stage for w in fleet.workers if w.held), default=-1
        )
        needs = need_table(fleet, stages, memory.max(initial=0.0), longest_held)
    fastest = np.maximum.accumulate(needs[0], axis=1)
    fitting = np.maximum.accumulate(needs.min(axis=0), axis=1)
    starts = [0]
    first: list[int] = []
    last: list[int] = []
    mode: list[int] = []
    reaches = []
    for table in (fastest, fitting):
        reach = np.stack([np.searchsorted(table[a], memory, side="right") - 1 for a in range(count)], axis=1)
        longest = np.maximum.accumulate(
            np.concatenate([np.full((len(memory), 1), -1), reach], axis=1), axis=1
        )
        # What ends where an earlier start ended too is only a part of that.
        reaches.append(np.where((reach > longest[:, :-1]) & (reach >= np.arange(count)), reach, -1))
    for number, worker in enumerate(fleet.workers):
        spans = {(int(a), int(r[number, a])) for r in reaches for a in np.flatnonzero(r[number] >= 0)}
        if worker.held is not None:
            held = {(worker.held.first_stage, worker.held.last_stage)}
            spans = spans | held if movable else held
        for a, b in sorted(spans):
            first.append(a)
            last.append(b)
            mode.append(
                next((m for m in range(len(MODES)) if needs[m, a, b] <= memory[number]), len(MODES) - 1)
            )
        starts.append(len(first))
    arrays = [np.array(values, dtype=np.int64) for values in (starts, first, last, mode)]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def _sites(workers: Sequence[PlanWorker]) -> tuple[tuple[str, ...], Ints, Floats, Floats]:
    """A site is a name that several workers gave, else a host, else the worker alone.

    Each of a site's workers measured the site's link, one after the other: the best figure is what the link gives. What
    nobody measured is taken to be without limit.
    """
    index: dict[str, int] = {}
    site, up, down = [], [], []
    for worker in workers:
        name = worker.site or worker.host_id or worker.worker_id
        if name not in index:
            index[name] = len(index)
            up.append(0.0)
            down.append(0.0)
        number = index[name]
        site.append(number)
        up[number] = max(up[number], worker.uplink_bytes_per_s)
        down[number] = max(down[number], worker.downlink_bytes_per_s)
    rates = [np.array([r if r > 0 else UNLIMITED for r in side]) for side in (up, down)]
    return tuple(index), np.array(site, dtype=np.int64), rates[0], rates[1]
