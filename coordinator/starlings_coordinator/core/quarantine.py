"""Samples that fail whoever tries them: taken out of training, for good, with their ids.

A microbatch that fails at two workers in a row, or three times where nobody else could try, is believed to be at fault
itself. It is *quarantined*: recorded, told to people, and its samples are never leased again. Wherever they come in the
order of samples, their *stand-ins* do instead, the next ids that are well: so a step has as many samples as ever, and
the ledger counts positions as it always does.

What fails for another reason fails with any samples. So after one quarantine something must succeed before the next,
and there is a limit on all; else the job fails with the reason, as it does when attempt after attempt fails.

| what | counts as |
| --- | --- |
| MicrobatchFailed without a link to blame | a failure of the microbatch at its sender |
| EngineDown with the microbatch that its device was at | the same |
| a link that broke, a worker that fell silent | nothing: nobody knows what it was at |
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlings_coordinator.core.records import SamplesQuarantined
from starlings_coordinator.core.watch import is_single
from starlings_protos.messages import WorkerId
from starlings_protos.status import Quarantined

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

WORKERS_ENOUGH = 2
TRIES_ENOUGH = 3
# Of all samples; at least so many microbatches.
PART_MOST = 0.01
MICROBATCHES_LEAST = 4
# Microbatches whose failures are remembered.
REMEMBERED = 256


class Verdict(enum.Enum):
    # It may be anything: others try.
    AGAIN = "again"
    QUARANTINED = "quarantined"
    # It is not the samples.
    HOPELESS = "hopeless"


def stand_ins(samples: tuple[int, ...], bad: Collection[int], population: int) -> tuple[int, ...]:
    """`samples` with others in the place of those that are `bad`: each by the next id that is well and not among them,
    cyclically. Equal arguments give equal answers. With nobody left who is well, `samples`.
    """
    if not bad or not any(sample in bad for sample in samples):
        return samples
    taken = {sample for sample in samples if sample not in bad}
    found = []
    for sample in samples:
        chosen = sample
        if sample in bad:
            after = ((sample + n) % population for n in range(1, population))
            well = (other for other in after if other not in bad)
            first = next(well, sample)
            chosen = first if first not in taken else next((o for o in well if o not in taken), first)
            taken.add(chosen)
        found.append(chosen)
    return tuple(found)


@dataclass(slots=True)
class _Failures:
    workers: set[WorkerId] = field(default_factory=set)
    count: int = 0


class Quarantine:
    def __init__(self, core: Core) -> None:
        self._core = core
        # Since they succeeded last, the oldest first.
        self._failures: OrderedDict[tuple[int, ...], _Failures] = OrderedDict()
        # Something has succeeded since the last quarantine.
        self._proven = True

    def succeeded(self, samples: tuple[int, ...]) -> None:
        self._proven = True
        self._failures.pop(samples, None)

    def failed(self, samples: tuple[int, ...], worker_id: WorkerId, reason: str) -> Verdict:
        """A microbatch of these samples failed at that worker."""
        known = self._failures.setdefault(samples, _Failures())
        self._failures.move_to_end(samples)
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)
        known.workers.add(worker_id)
        known.count += 1
        # A device that fails at everything must not have samples blamed for it, as long as another can try.
        alone = known.count >= TRIES_ENOUGH and is_single(self._core, worker_id)
        if len(known.workers) < WORKERS_ENOUGH and not alone:
            return Verdict.AGAIN
        if not self._proven or self._is_too_much(samples):
            return Verdict.HOPELESS
        self._proven = False
        del self._failures[samples]
        core = self._core
        at_s = core.now.monotonic_s - core.started_at_s
        core.desk.record(SamplesQuarantined(samples, tuple(sorted(known.workers)), reason, at_s))
        ids, who = ", ".join(map(str, samples)), ", ".join(sorted(known.workers))
        core.desk.announce(
            "quarantined",
            f"samples {ids} are never leased again: they failed {known.count} times, at {who}; the last time: {reason}",
        )
        return Verdict.QUARANTINED

    def _is_too_much(self, samples: tuple[int, ...]) -> bool:
        job, population = self._core.config.job, self._core.config.population
        most = max(PART_MOST * population, MICROBATCHES_LEAST * job.train.microbatch)
        return len(self._core.state.quarantined) + len(samples) > min(most, population - job.train.batch)

    def shown(self) -> tuple[Quarantined, ...]:
        return tuple(
            Quarantined(record.samples, record.workers, record.reason, record.at_s)
            for record in self._core.state.quarantines
        )
