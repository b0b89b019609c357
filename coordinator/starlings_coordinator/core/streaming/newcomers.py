"""Joining an `async` job: a newcomer loads a copy of its donors' weights, and is a holder as soon as it has it.

There is nothing to replay: replicas of a stage differ, and what its donor trained meanwhile comes with the next
exchange. For the same reason a stage comes from one donor: blocks of two replicas, or of one and of a checkpoint, would
be a state that nobody ever had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlings_coordinator.core.joining import Joining
from starlings_coordinator.core.members import MemberState
from starlings_coordinator.core.observers import Observer, stage_words
from starlings_protos.messages import Peer, WorkerId

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core


class StreamJoining(Joining):
    donors_per_stage = 1

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        # Whose copies the placed workers wait for: worker -> donor -> incarnation.
        self._chosen: dict[WorkerId, dict[WorkerId, int]] = {}

    def wanted_donors(self) -> set[WorkerId]:
        """Who should keep a copy now for those that are placed."""
        self._chosen.clear()
        if not self.placing.is_worthwhile(self._core.state.step):
            return set()
        for worker_id in sorted(self.placing.placed):
            member = self._core.members.get(worker_id)
            if member is not None and member.usable:
                donors = self.choose_donors(self.placing.placed[worker_id].span, worker_id)
                if donors:
                    self._chosen[worker_id] = donors
        return {donor for donors in self._chosen.values() for donor in donors}

    def copied(self, version: int, donors: dict[WorkerId, int]) -> None:
        """The copy of that name is there."""
        core, placed = self._core, self.placing.placed
        chosen, self._chosen = self._chosen, {}
        for worker_id, wanted in sorted(chosen.items()):
            member = core.members.get(worker_id)
            there = all(donors.get(donor) == life for donor, life in wanted.items())
            if worker_id not in placed or member is None or not member.usable or not there:
                continue
            observer = Observer(
                placed.pop(worker_id),
                member.session,
                version,
                core.state.attempt,
                wanted,
                core.now.monotonic_s,
            )
            self.observers[worker_id] = observer
            member.state = MemberState.OBSERVING
            words = stage_words(observer.placed.span)
            member.reason = f"joins {words}: loading a copy of step {version}"
            core.desk.announce(
                "observing", f"{worker_id} copies {words} of step {version} from {', '.join(sorted(wanted))}"
            )
        self.tell_donors()
        for worker_id in sorted(chosen):
            if worker_id in self.observers:
                self.assign(core.members[worker_id], self.observers[worker_id])

    def sources_of(self, worker_id: WorkerId, base: int) -> tuple[Peer, ...]:
        return self.donors_of(worker_id)

    def reached(self, worker_id: WorkerId, observer: Observer) -> None:
        if not self._core.training_is_over:
            self.admit({worker_id: observer})
            # It has all that it needs of its donors.
            self._admitted.pop(worker_id, None)
            self.tell_donors()
