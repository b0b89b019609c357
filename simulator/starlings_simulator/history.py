"""What a donor keeps for others: snapshots of a few versions, and what was exchanged in the last steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlings_simulator.symbolic import Piece

# After the last observer has become a holder it may still need the step at which it did.
STEPS_KEPT_ON = 2
NEWEST_KEPT = 2


class NotYet(Exception):
    """A step that the donor has not applied yet."""


@dataclass(slots=True)
class History:
    """What a donor keeps: snapshots of a few versions, and the updates of at most `steps_most` steps."""

    steps_most: int
    snapshots: dict[int, dict[int, str]] = field(default_factory=dict)
    updates: dict[int, dict[str, Piece]] = field(default_factory=dict)
    _retained: frozenset[int] = frozenset()
    _from: int | None = None
    _left: int | None = None

    def keep(self, versions: tuple[int, ...], updates_from: int | None) -> None:
        self._retained = frozenset(versions)
        self._forget_snapshots()
        if updates_from is not None:
            self._from, self._left = updates_from, None
            self.updates = {step: kept for step, kept in self.updates.items() if step >= updates_from}
        elif self._from is not None and self._left is None:
            self._left = STEPS_KEPT_ON

    def snapshot(self, version: int, states: dict[int, str]) -> None:
        self.snapshots[version] = dict(states)
        self._forget_snapshots()

    def _forget_snapshots(self) -> None:
        newest = sorted(self.snapshots)[-NEWEST_KEPT:]
        keep = self._retained.union(newest)
        self.snapshots = {version: states for version, states in self.snapshots.items() if version in keep}

    def applied(self, step: int, aggregates: Mapping[str, Piece]) -> None:
        if self._from is None or step < self._from:
            return
        if self._left is not None:
            if self._left == 0:
                self.updates, self._from, self._left = {}, None, None
                return
            self._left -= 1
        self.updates[step] = dict(aggregates)
        while len(self.updates) > self.steps_most:
            del self.updates[min(self.updates)]

    def update(self, step: int, group: str, version: int) -> Piece | None:
        """None: not kept (any more)."""
        if step not in self.updates and step >= version and self._from is not None:
            raise NotYet
        return self.updates.get(step, {}).get(group)
