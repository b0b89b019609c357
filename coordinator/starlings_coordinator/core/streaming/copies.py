"""Copies of the weights on the way, while training goes on: some holders of each stage keep what they have just now.

Weights of an `async` job have no common version. A copy is called by the step that the job had reached when it was
asked for, and no step names two copies. One copy is made at a time; what it is for is decided when it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member
from starlings_protos.messages import StateReport, StateWanted, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core
    from starlings_coordinator.core.streaming.contributions import Contributions
    from starlings_coordinator.core.streaming.newcomers import StreamJoining


@dataclass(slots=True)
class _Copy:
    version: int
    # Who keeps it, and their incarnations.
    donors: dict[WorkerId, int]
    # Of these the keeper pulls it, if it is to be saved.
    for_keeper: frozenset[WorkerId]
    since_s: float
    reports: dict[WorkerId, StateReport] = field(default_factory=dict)


class Copies:
    def __init__(
        self,
        core: Core,
        joining: StreamJoining,
        contributions: Contributions,
        may_go: Callable[[Member], bool],
    ) -> None:
        """`may_go`: whether somebody who leaves, and is no last holder, has nothing left to do."""
        self._core = core
        self._joining = joining
        self._contributions = contributions
        self._may_go = may_go
        self._copy: _Copy | None = None
        # The newest copy for the keeper: its name, and what is in replicas that are not in it.
        self.beside = (-1, 0)
        # The newest step that names a copy, or a saved version.
        self.last_version = 0
        # Which step a checkpoint was last looked for at, and what was saved because a last holder leaves.
        self._looked_at = 0
        self._parting_version = -1

    def begin(self) -> None:
        state = self._core.state
        self._copy = None
        self._parting_version = -1
        self.last_version = max((v for v in state.checkpoints if v <= state.step), default=0)
        self._looked_at = state.step

    def go_on(self) -> None:
        core = self._core
        self._let_go()
        if not core.plan_is_live:
            return
        if self._copy is not None:
            self._watch(self._copy)
        elif core.state.step > self.last_version:
            self._begin()

    def _begin(self) -> None:
        core, version = self._core, self._core.state.step
        parting = {h.worker_id for h in core.finishing.last_holders() if core.finishing.saving is None}
        for_keeper = core.finishing.donors() if self._is_checkpoint_due() or parting else frozenset()
        donors = set(for_keeper) | self._joining.wanted_donors()
        members = {w: core.members[w] for w in donors if core.members[w].here}
        if not donors or len(members) < len(donors):
            return
        self.last_version = version
        if for_keeper:
            self._looked_at = version
        if parting:
            self._parting_version = version
        lives = {w: m.incarnation for w, m in members.items()}
        self._copy = _Copy(version, lives, for_keeper, core.now.monotonic_s)
        for _, member in sorted(members.items()):
            core.desk.send(member, StateWanted(version, snapshot=True))

    def _is_checkpoint_due(self) -> bool:
        core, finishing, every = self._core, self._core.finishing, self._core.config.job.checkpoint.every
        due = every > 0 and (finishing.pace.overdue or core.state.step // every > self._looked_at // every)
        if not due:
            return False
        if finishing.saving is None and finishing.pace.may_begin(core.now.monotonic_s):
            return True
        finishing.pace.overdue = True
        return False

    def _watch(self, copy: _Copy) -> None:
        core = self._core
        here = {w for w, life in copy.donors.items() if self._keeps(w, life)}
        late_s = core.now.monotonic_s - copy.since_s
        if here != copy.donors.keys() or late_s > core.config.timings.digest_s:
            # The next step names another one.
            self._copy = None
            core.finishing.pace.overdue |= bool(copy.for_keeper)

    def _keeps(self, worker_id: WorkerId, incarnation: int) -> bool:
        member = self._core.members.get(worker_id)
        return (
            member is not None and member.incarnation == incarnation and worker_id in self._core.state.spans
        )

    def state_reported(self, member: Member, message: StateReport) -> bool:
        copy = self._copy
        if copy is None or message.version != copy.version or member.worker_id not in copy.donors:
            self._core.dropped_messages += 1
            return True
        copy.reports[member.worker_id] = message
        if copy.reports.keys() == copy.donors.keys():
            self._copy = None
            self._complete(copy)
        return True

    def remind(self, member: Member) -> None:
        """Ask again whoever may have lost the question, or whose answer was lost."""
        copy = self._copy
        if copy is not None and member.worker_id in copy.donors and member.worker_id not in copy.reports:
            self._core.desk.send(member, StateWanted(copy.version, snapshot=True))

    def _complete(self, copy: _Copy) -> None:
        core, state, names = self._core, self._core.state, self._core.config.profile.block_names
        if copy.for_keeper:
            digests: dict[str, str] = {}
            for index, stage in enumerate(state.stages):
                holder = next(w for w in core.holders_of(index) if w in copy.for_keeper)
                blocks = {names[b] for b in stage.blocks}
                digests |= {b: d for b, d in copy.reports[holder].block_digests.items() if b in blocks}
            self.beside = (copy.version, self._contributions.beside(copy.for_keeper))
            core.finishing.save(copy.version, digests, copy.for_keeper)
        self._joining.copied(copy.version, copy.donors)

    def _let_go(self) -> None:
        """A last holder may go when what it has is saved; others when they have no work left."""
        core = self._core
        last = core.finishing.last_holders()
        for holder in core.holders:
            if holder.leaving is None or not core.plan_is_live:
                continue
            if holder in last:
                ready = self._parting_version >= 0 and core.planning.is_saved(self._parting_version)
            else:
                ready = self._may_go(holder)
            if ready:
                core.membership.release(holder)
