"""Planted defects around an attempt that outlives a lost worker: each is found within some seeds.

See test_simulation_mutants.py. Before a commit the coordinator compares what each worker accumulated with the routes of
what is done, and begins another attempt if they differ. That would hide most of these defects, so they come without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from starlings_coordinator.core.ledger import StepLedger
from starlings_coordinator.core.stepping import Stepping
from starlings_protos.messages import WorkerId
from starlings_worker.core import flow, table
from starlings_worker.core.losses import Fate, fate_of
from starlings_worker.core.microbatches import Held
from support.simulated import first_that_notices, losing, seeds_from

Patch = Callable[[pytest.MonkeyPatch], None]


def without_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepLedger, "_coverage", lambda *_: None)


def keep_the_attempt_although_its_gradient_is_counted_on(patch: pytest.MonkeyPatch) -> None:
    """The lost worker is on a route of what is done, and the attempt goes on."""
    patch.setattr(StepLedger, "passed", lambda *_: False)


def keep_the_attempt_in_the_exchange(patch: pytest.MonkeyPatch) -> None:
    """The lost worker is a member of the exchange that was opened, and the attempt goes on."""
    whole = Stepping.counts_on

    def counts_on(self: Stepping, worker_id: WorkerId) -> bool:
        ledger = self._core.ledger
        if ledger is None or ledger.opened_at_s is None:
            return whole(self, worker_id)
        return ledger.passed(worker_id)

    patch.setattr(Stepping, "counts_on", counts_on)


def keep_the_leases_of_the_lost(patch: pytest.MonkeyPatch) -> None:
    """What was leased to the lost worker is leased to nobody else."""

    def leave_out(self: StepLedger, worker_id: WorkerId) -> list[int]:
        self.gone.add(worker_id)
        return []

    patch.setattr(StepLedger, "leave_out", leave_out)


def say_nothing_of_gradient_through_the_lost(patch: pytest.MonkeyPatch) -> None:
    """Who accumulated what came through the lost worker keeps it, and takes the same microbatch from another."""
    without_comparison(patch)
    whole = table.MicrobatchTable._admit_forward

    def admit(self: table.MicrobatchTable, *arguments: Any) -> Any:
        routes, self.routes = self.routes, {}
        answer = whole(self, *arguments)
        self.routes = routes
        return answer

    def accumulate(self: table.MicrobatchTable, held: Held) -> None:
        self.routes.pop(held.key.index, None)
        accumulate_once(self, held)

    accumulate_once = table.MicrobatchTable.accumulate
    patch.setattr(flow.Flow, "_void", lambda *_: None)
    patch.setattr(table.MicrobatchTable, "_admit_forward", admit)
    patch.setattr(table.MicrobatchTable, "accumulate", accumulate)


def send_again_although_accumulated(patch: pytest.MonkeyPatch) -> None:
    """What went to the lost worker goes to another, and so does what has come back from it already."""
    without_comparison(patch)

    def fate(held: Held, present: frozenset[WorkerId]) -> Fate:
        verdict = fate_of(held, present)
        again = verdict is Fate.FAILED and held.next_worker is not None and held.next_worker not in present
        return Fate.SENT_AGAIN if again else verdict

    patch.setattr(table, "fate_of", fate)


def take_what_comes_through_the_lost(patch: pytest.MonkeyPatch) -> None:
    """Pushes on a route through a worker that is in the plan no more are taken like others, and nothing is dropped."""
    without_comparison(patch)
    patch.setattr(table, "absent", lambda *_: [])
    patch.setattr(flow.Flow, "leave_out_absent", lambda *_: None)


def never_send_again(patch: pytest.MonkeyPatch) -> None:
    """The hop before a lost worker waits for a gradient that never comes."""

    def fate(held: Held, present: frozenset[WorkerId]) -> Fate:
        verdict = fate_of(held, present)
        return Fate.STAYS if verdict is Fate.SENT_AGAIN else verdict

    patch.setattr(table, "fate_of", fate)


# Each with a seed that finds it at once, at present.
MUTANTS: Mapping[Patch, int] = {
    keep_the_attempt_although_its_gradient_is_counted_on: 1,
    keep_the_attempt_in_the_exchange: 16,
    keep_the_leases_of_the_lost: 0,
    say_nothing_of_gradient_through_the_lost: 1,
    send_again_although_accumulated: 8,
    take_what_comes_through_the_lost: 72,
    never_send_again: 105,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_defect_is_found(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert first_that_notices(map(losing, seeds_from(MUTANTS[mutant]))) is not None
