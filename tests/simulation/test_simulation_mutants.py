"""Planted defects: each breaks one rule that the design leans on, and the simulation finds it within some seeds.

If a mutant survives, the invariants or the faults are too weak, not the mutant too clever.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from starlings_coordinator.core.ledger import StepLedger
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.stepping import Stepping
from starlings_protos.messages import MicrobatchHeader, Prepared, Receipt, StepRestarted, WorkerId
from starlings_worker.core import flow, table
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import ForgetMicrobatch
from starlings_worker.core.events import Direction, Leg, MicrobatchSent
from starlings_worker.core.exchange import GroupRound, Round
from starlings_worker.core.microbatches import Held, Phase
from starlings_worker.core.parts import PartStore
from starlings_worker.core.training import Training
from support.simulated import first_that_notices, rough, seeds_from

Patch = Callable[[pytest.MonkeyPatch], None]


def commit_with_somebody_missing(patch: pytest.MonkeyPatch) -> None:
    """The coordinator commits when the first worker is prepared."""

    def prepared(self: Stepping, member: Member, message: Prepared) -> None:
        ledger = self._core.ledger
        if ledger is None or (message.step, message.attempt) != (ledger.step, ledger.attempt):
            return
        self._commit(ledger, 1.0)

    patch.setattr(Stepping, "prepared", prepared)


def accept_any_coverage(patch: pytest.MonkeyPatch) -> None:
    """The coordinator does not compare who accumulated what, and workers keep gradient over a new attempt."""
    patch.setattr(StepLedger, "_coverage", lambda *_: None)
    keep_gradient_over_a_new_attempt(patch)


def keep_gradient_over_a_new_attempt(patch: pytest.MonkeyPatch) -> None:
    """A worker hears of a new attempt and goes on adding to the old accumulators."""

    def restarted(self: Training, message: StepRestarted) -> None:
        self.raise_attempt(message.step, message.attempt)
        self._device.purge(lambda effect: type(effect).__name__ == "ClearGradients")

    patch.setattr(Training, "restarted", restarted)


def accept_a_stale_attempt(patch: pytest.MonkeyPatch) -> None:
    """A worker takes microbatches of a void attempt as if they were of the present one."""
    whole = table.MicrobatchTable._admit_forward

    def admit(self: table.MicrobatchTable, place: Any, header: MicrobatchHeader, receipt: Receipt) -> Any:
        epoch, self.epoch = self.epoch, min(self.epoch, (header.key.step, header.key.attempt))
        answer = whole(self, place, header, receipt)
        self.epoch = epoch
        return answer

    patch.setattr(table.MicrobatchTable, "_admit_forward", admit)


def forget_who_was_accumulated(patch: pytest.MonkeyPatch) -> None:
    """A second copy of a microbatch is computed again."""

    def admit(self: table.MicrobatchTable, place: Any, header: MicrobatchHeader, receipt: Receipt) -> Any:
        routes, self.routes = self.routes, {}
        answer = whole(self, place, header, receipt)
        self.routes = routes
        return answer

    whole = table.MicrobatchTable._admit_forward
    patch.setattr(table.MicrobatchTable, "_admit_forward", admit)


def send_an_unknown_fate_to_another(patch: pytest.MonkeyPatch) -> None:
    """After a transfer of unknown fate another replica gets the microbatch; the coordinator does not look."""
    whole = flow.Flow._place

    def place(self: flow.Flow, held: Held, now_s: float, rng: random.Random) -> None:
        held.ambiguous = False
        whole(self, held, now_s, rng)

    patch.setattr(flow.Flow, "_place", place)
    patch.setattr(StepLedger, "_coverage", lambda *_: None)


def reduce_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A part's owner reduces before all have contributed."""

    def may_reduce(self: Round, group: GroupRound) -> bool:
        return not group.alone and group.owns_part and not group.reducing

    patch.setattr(Round, "_may_reduce", may_reduce)


def forget_the_first_pass(patch: pytest.MonkeyPatch) -> None:
    """Whoever is in the second pass sends nothing of the first any more, though others may still need it."""
    whole = GroupRound.begin_pass

    def begin_pass(self: GroupRound, pass_number: int) -> None:
        self.transfers.clear()
        whole(self, pass_number)

    patch.setattr(GroupRound, "begin_pass", begin_pass)


def take_a_part_for_any_pass(patch: pytest.MonkeyPatch) -> None:
    """What came in the first pass counts as here in the second."""
    whole = PartStore.here

    def here(
        self: PartStore, leg: Leg, epoch: Any, group: str, number: int, part: int, who: WorkerId
    ) -> bool:
        return whole(self, leg, epoch, group, 0, part, who)

    patch.setattr(PartStore, "here", here)


def compute_the_next_step_early(patch: pytest.MonkeyPatch) -> None:
    """Microbatches of step s + 1 are computed before the optimizer of step s has run."""

    def next_computation(self: flow.Flow, now_s: float, rng: random.Random) -> Any:
        for held in self._table.held.values():
            if held.phase is Phase.QUEUED and held.trains and held.epoch > self._table.epoch:
                epoch, self._table.epoch = self._table.epoch, held.epoch
                found = whole(self, now_s, rng)
                self._table.epoch = epoch
                return found
        return whole(self, now_s, rng)

    whole = flow.Flow.next_computation
    patch.setattr(flow.Flow, "next_computation", next_computation)


def lease_twice(patch: pytest.MonkeyPatch) -> None:
    """The coordinator grants a microbatch and leaves it in the pool."""
    whole = StepLedger.grant

    def grant(self: StepLedger, worker_id: WorkerId, now_s: float) -> int | None:
        index = whole(self, worker_id, now_s)
        if index == 0 and len(self.pool) > 1:
            self.pool.insert(0, index)
        return index

    patch.setattr(StepLedger, "grant", grant)


def forget_what_is_still_needed(patch: pytest.MonkeyPatch) -> None:
    """A hop frees a microbatch as soon as it is sent on, before its backward."""
    whole = flow.Flow.sent

    def sent(self: flow.Flow, event: MicrobatchSent, now_s: float) -> None:
        whole(self, event, now_s)
        if event.direction is Direction.FORWARD:
            self._emit(ForgetMicrobatch(event.key))

    patch.setattr(flow.Flow, "sent", sent)


def never_forget(patch: pytest.MonkeyPatch) -> None:
    """Tensors of finished microbatches are kept for ever."""

    def drop(self: table.MicrobatchTable, held: Held) -> None:
        del self.held[held.key]

    patch.setattr(table.MicrobatchTable, "drop", drop)


def run_two_things_at_once(patch: pytest.MonkeyPatch) -> None:
    """The device is given the next piece of work before it has finished the last."""
    whole = DeviceQueue.push

    def push(self: DeviceQueue, effect: Any) -> None:
        self.running = None
        whole(self, effect)

    patch.setattr(DeviceQueue, "push", push)


def lose_the_pool_on_a_new_attempt(patch: pytest.MonkeyPatch) -> None:
    """After a new attempt nobody is given leases any more: the job hangs."""
    whole = StepLedger.grant

    def grant(self: StepLedger, worker_id: WorkerId, now_s: float) -> int | None:
        if self.attempt > 0:
            self.pool.clear()
            return None
        return whole(self, worker_id, now_s)

    patch.setattr(StepLedger, "grant", grant)


def apply_with_another_clip(patch: pytest.MonkeyPatch) -> None:
    """One worker applies a step with its own clip factor."""

    def apply_if_possible(self: Training) -> None:
        if self.commit is not None and self._worker_id == "w00" and not self.applying:
            self.commit = replace(self.commit, clip_factor=0.123)
        whole_apply(self)

    whole_apply = Training._apply_if_possible
    patch.setattr(Training, "_apply_if_possible", apply_if_possible)


# Each with a seed that finds it at once, at present.
MUTANTS: Mapping[Patch, int] = {
    commit_with_somebody_missing: 3,
    accept_any_coverage: 4,
    accept_a_stale_attempt: 9,
    forget_who_was_accumulated: 11,
    send_an_unknown_fate_to_another: 13,
    reduce_without_waiting: 1,
    forget_the_first_pass: 0,
    take_a_part_for_any_pass: 0,
    compute_the_next_step_early: 38,
    lease_twice: 0,
    forget_what_is_still_needed: 9,
    never_forget: 0,
    run_two_things_at_once: 16,
    lose_the_pool_on_a_new_attempt: 0,
    apply_with_another_clip: 0,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_defect_is_found(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert first_that_notices(map(rough, seeds_from(MUTANTS[mutant]))) is not None


@pytest.mark.slow
def test_without_a_defect_nothing_is_found() -> None:
    assert first_that_notices(map(rough, range(100))) is None
