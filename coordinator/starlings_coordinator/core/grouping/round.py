"""One round of a group: from who holds what to what everybody applies. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from starlings_coordinator.core.pairing.rounds import Told
from starlings_protos.group_messages import (
    GroupClosed,
    GroupDecided,
    GroupDropped,
    GroupHeld,
    GroupMatched,
    GroupPart,
    GroupPrepared,
)
from starlings_protos.messages import WorkerId

# Parts of the time from slot to deadline. A member says what it has at 50 % and 85 % of it, by its own clock.
CLOSE_AT = 0.55
DECIDE_AT = 0.9


def quorum_of(seats: int) -> int:
    """A majority: two halves of a group that cannot see each other never both go on."""
    return seats // 2 + 1


@dataclass(slots=True)
class GroupRound:
    match: GroupMatched
    slot_at_s: float
    held: dict[WorkerId, frozenset[WorkerId]] = field(default_factory=dict)
    prepared: dict[WorkerId, GroupPrepared] = field(default_factory=dict)
    gone: set[WorkerId] = field(default_factory=set)
    closed: GroupClosed | None = None
    decided: GroupDecided | None = None
    # Whom owners refused, or who came too late.
    dropped: dict[WorkerId, str] = field(default_factory=dict)

    @property
    def seats(self) -> tuple[WorkerId, ...]:
        return tuple(seat.worker_id for seat in self.match.seats)

    @property
    def quorum(self) -> int:
        return quorum_of(len(self.match.seats))

    def _at(self, part_of_time: float) -> float:
        return self.slot_at_s + part_of_time * self.match.deadline_s

    # ------------------------------------------------------------------ what members say

    def hold(self, worker_id: WorkerId, message: GroupHeld, now_s: float) -> list[Told]:
        if worker_id in self.seats and self.closed is None:
            self.held[worker_id] = frozenset(message.members) & frozenset(self.seats)
        return self.look(now_s)

    def prepare(self, worker_id: WorkerId, message: GroupPrepared, now_s: float) -> list[Told]:
        if worker_id in self.seats and self.closed is not None and self.decided is None:
            self.prepared[worker_id] = message
        return self.look(now_s)

    def leave(self, worker_id: WorkerId) -> None:
        """Its stream, its life or its place in the plan is over. What it has sent may count."""
        if worker_id in self.seats:
            self.gone.add(worker_id)

    # ------------------------------------------------------------------ decisions

    def look(self, now_s: float) -> list[Told]:
        told: list[Told] = []
        if self.closed is None and (self._all_held() or now_s >= self._at(CLOSE_AT)):
            told += self._close()
        open_ = self.closed is not None and self.decided is None
        if open_ and (self._all_prepared() or now_s >= self._at(DECIDE_AT)):
            told += self._decide()
        return told

    def wake_at_s(self) -> float | None:
        if self.decided is not None:
            return None
        return self._at(CLOSE_AT if self.closed is None else DECIDE_AT)

    def _present(self) -> list[WorkerId]:
        return [worker_id for worker_id in self.seats if worker_id not in self.gone]

    def _all_held(self) -> bool:
        present = self._present()
        return all(set(present) <= self.held.get(worker_id, frozenset()) for worker_id in present)

    def _close(self) -> list[Told]:
        """Whose contributions every owner has that said anything."""
        owners = [w for w in self.seats if w in self.held and w not in self.gone]
        members = tuple(w for w in self.seats if owners and all(w in self.held[owner] for owner in owners))
        for worker_id in self.seats:
            if worker_id not in members:
                self.dropped[worker_id] = "its contribution did not come in time"
        match = self.match
        if len(members) < self.quorum:
            self.closed = GroupClosed(match.stage, match.slot, match.round_id)
            return self._to_all(self.closed) + self._conclude(())
        self.closed = GroupClosed(match.stage, match.slot, match.round_id, members)
        return self._to_all(self.closed)

    def _all_prepared(self) -> bool:
        """All who are here have all that can come: an owner that is gone sends nothing any more."""
        present = self._present()
        said = [self.prepared.get(worker_id) for worker_id in present]
        return bool(present) and all(message is not None and message.complete for message in said)

    def _decide(self) -> list[Told]:
        for sender, message in self.prepared.items():
            for dropped in message.dropped:
                if dropped.worker_id in self.seats and dropped.worker_id != sender:
                    self.dropped.setdefault(dropped.worker_id, f"{dropped.reason}, says {sender}")
        digests: dict[int, Counter[str]] = {}
        for worker_id in self._present():
            said = self.prepared.get(worker_id)
            for here in said.parts if said is not None else ():
                if here.part < len(self.seats):
                    digests.setdefault(here.part, Counter())[here.sha256] += 1
        parts = []
        for part, counts in sorted(digests.items()):
            most = max(counts.values())
            found = sorted(digest for digest, count in counts.items() if count == most)
            if len(counts) > 1:
                self.dropped.setdefault(self.seats[part], "its aggregates differ from receiver to receiver")
            # Two digests that as many have are nobody's aggregate.
            if most >= self.quorum and len(found) == 1:
                parts.append(GroupPart(part, found[0]))
        return self._conclude(tuple(parts))

    def _conclude(self, parts: tuple[GroupPart, ...]) -> list[Told]:
        match = self.match
        assert self.closed is not None
        dropped = tuple(GroupDropped(w, reason[:200]) for w, reason in sorted(self.dropped.items()))
        members = self.closed.members if parts else ()
        self.decided = GroupDecided(match.stage, match.slot, match.round_id, parts, members, dropped)
        return self._to_all(self.decided)

    def _to_all(self, message: GroupClosed | GroupDecided) -> list[Told]:
        return [(worker_id, message) for worker_id in self._present()]
