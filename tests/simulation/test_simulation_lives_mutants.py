"""Planted defects around lives, joins, restarts and saved states: each is found within some seeds.

See test_simulation_mutants.py. Where the defect is one of a shell (what a data plane serves, what the keeper writes),
it is planted in the simulated shell: what is under test then is whether anybody would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from starlings_coordinator.core.core import Core
from starlings_coordinator.core.events import WorkerSaid
from starlings_coordinator.core.joining import Joining
from starlings_coordinator.core.ledger import StepLedger
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.membership import Membership
from starlings_coordinator.core.records import WorkerAdmitted
from starlings_coordinator.core.stepping import Stepping
from starlings_protos.messages import Hello, Prepared, StepCommitted, WorkerId
from starlings_simulator.clock import Call
from starlings_simulator.control import ControlStream
from starlings_simulator.donations import Donations
from starlings_simulator.history import History
from starlings_simulator.symbolic import Device, Piece
from starlings_worker.core.observing import Observing
from support.simulated import behind_a_partition, first_that_notices, rough, seeds_from

Patch = Callable[[pytest.MonkeyPatch], None]


def drop_the_fencing(patch: pytest.MonkeyPatch) -> None:
    """Every life of a worker has the same incarnation."""
    whole = Core.apply

    def apply(self: Core, record: Any) -> None:
        whole(self, record)
        if isinstance(record, WorkerAdmitted):
            self.state.incarnations[record.worker_id] = 0

    patch.setattr(Core, "apply", apply)


def take_a_new_life_for_the_old_one(patch: pytest.MonkeyPatch) -> None:
    """A worker that was started again within the grace keeps its place, though its state is gone."""

    def goes_on(known: Hello, incarnation: int, hello: Hello) -> bool:
        return True

    patch.setattr(Membership, "_goes_on", staticmethod(goes_on))


def hear_streams_that_are_over(patch: pytest.MonkeyPatch) -> None:
    """The coordinator listens on to streams that it has given up, and takes what an earlier life said for the present
    one's.
    """
    whole = Core._said

    def said(self: Core, event: WorkerSaid) -> None:
        member = self.members.get(event.worker_id)
        session = member.session if member is not None and member.session is not None else event.session
        whole(self, replace(event, session=session))

    def arrive(self: ControlStream, call: Call) -> None:
        if self._stalled_up is not None:
            self._stalled_up.append(call)
        else:
            self._coordinator.process.deliver(call)

    patch.setattr(Core, "_said", said)
    patch.setattr(ControlStream, "_arrive_up", arrive)


def commit_without_the_last_one(patch: pytest.MonkeyPatch) -> None:
    """The coordinator commits when all but one are prepared."""
    whole = Stepping.prepared

    def prepared(self: Stepping, member: Member, message: Prepared) -> None:
        whole(self, member, message)
        ledger = self._core.ledger
        if ledger is not None and len(ledger.prepared) == len(self._core.state.spans) - 1 > 0:
            self._commit(ledger, 1.0)

    patch.setattr(Stepping, "prepared", prepared)


def return_a_lease_twice(patch: pytest.MonkeyPatch) -> None:
    """A new attempt's pool has what was leased before once from the step, and once from the lease."""
    whole = StepLedger.begin.__func__  # type: ignore[attr-defined]

    def begin(cls: type[StepLedger], *arguments: Any, **named: Any) -> StepLedger:
        ledger: StepLedger = whole(cls, *arguments, **named)
        if ledger.attempt > 0:
            ledger.pool.append(ledger.pool[0])
        return ledger

    patch.setattr(StepLedger, "begin", classmethod(begin))
    # The coordinator's own invariants see it at once; here the others must.
    patch.setattr(Core, "validate", lambda _: None)


def serve_an_uncommitted_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A donor names what it is computing as the version that comes next."""
    whole = History.snapshot

    def snapshot(self: History, version: int, states: dict[int, str]) -> None:
        whole(self, version, states)
        self.snapshots[version + 1] = dict(states)

    patch.setattr(History, "snapshot", snapshot)


def mix_versions_in_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    """State is read while the optimizer steps: the first block is still of the version before."""
    snapshot, apply, before = History.snapshot, Device.apply, dict[int, str]()

    def remember(self: Device, step: int, rate: float, clip: float) -> None:
        before.clear()
        before.update(self.states)
        apply(self, step, rate, clip)

    def mixed(self: History, version: int, states: dict[int, str]) -> None:
        first = min(states)
        snapshot(self, version, states | {first: before.get(first, states[first])})

    patch.setattr(Device, "apply", remember)
    patch.setattr(History, "snapshot", mixed)


def mix_versions_in_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """The keeper takes the newest snapshot that a donor has, whatever version it asked for."""
    whole = Donations.snapshot

    def snapshot(
        self: Donations, donor: WorkerId, version: int, block: int, to: str = "coordinator"
    ) -> str | None:
        history = self._history(donor, to)
        newest = max(history.snapshots, default=version) if history is not None else version
        return whole(self, donor, version, block, to) and history and history.snapshots[newest].get(block)

    patch.setattr(Donations, "snapshot", snapshot)


def admit_before_it_has_caught_up(patch: pytest.MonkeyPatch) -> None:
    """An observer becomes a holder at the next commit, wherever it is."""
    whole = Joining.committed

    def committed(self: Joining) -> None:
        for observer in self.observers.values():
            observer.version = self._core.state.step
        whole(self)

    patch.setattr(Joining, "committed", committed)


def replay_an_update_twice(patch: pytest.MonkeyPatch) -> None:
    """A late joiner applies the step at the head of its queue again."""
    whole = Observing.replayed

    def replayed(self: Observing, step: int) -> bool:
        head = self.queue[0] if self.queue else None
        done = whole(self, step)
        if done and head is not None:
            self.queue.appendleft(head)
        return done

    patch.setattr(Observing, "replayed", replayed)


def skip_one_update(patch: pytest.MonkeyPatch) -> None:
    """A late joiner takes the second of the commits that wait for the next one."""
    whole = Observing.committed

    def committed(self: Observing, message: StepCommitted) -> str:
        answer = whole(self, message)
        if len(self.queue) == 2:
            self.queue.popleft()
        return answer

    patch.setattr(Observing, "committed", committed)


def serve_the_update_of_another_step(patch: pytest.MonkeyPatch) -> None:
    """A redo log that is off by one where it has been shortened."""

    def update(self: History, step: int, group: str, version: int) -> Piece | None:
        kept: Mapping[int, Mapping[str, Piece]] = self.updates
        return kept.get(step - 1, kept.get(step, {})).get(group)

    patch.setattr(History, "update", update)


def forget_the_last_commit_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A coordinator that was started again does not say the last commit to holders that may have missed it."""
    whole = Core.restore.__func__  # type: ignore[attr-defined]

    def restore(cls: type[Core], *arguments: Any, **named: Any) -> Core:
        core: Core = whole(cls, *arguments, **named)
        core.schedule.remind = lambda _: None  # type: ignore[method-assign]
        return core

    patch.setattr(Core, "restore", classmethod(restore))


def go_back_to_a_checkpoint_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A coordinator that was started again takes all holders for lost."""
    patch.setattr(Membership, "recall", lambda *_: False)


def never_notice_silence(patch: pytest.MonkeyPatch) -> None:
    """A holder that hangs is waited for."""
    patch.setattr(Membership, "look_at_time", lambda *_, **__: None)


# Each with a seed that finds it at once, at present.
MUTANTS: Mapping[Patch, int] = {
    drop_the_fencing: 2,
    take_a_new_life_for_the_old_one: 57,
    hear_streams_that_are_over: 6,
    commit_without_the_last_one: 3,
    return_a_lease_twice: 0,
    serve_an_uncommitted_snapshot: 22,
    mix_versions_in_a_snapshot: 0,
    mix_versions_in_a_checkpoint: 2,
    admit_before_it_has_caught_up: 12,
    replay_an_update_twice: 12,
    skip_one_update: 12,
    serve_the_update_of_another_step: 75,
    forget_the_last_commit_at_a_restart: 3,
    go_back_to_a_checkpoint_at_a_restart: 110,
    never_notice_silence: 197,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_defect_is_found(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    scenario = behind_a_partition if mutant is hear_streams_that_are_over else rough
    assert first_that_notices(map(scenario, seeds_from(MUTANTS[mutant]))) is not None
