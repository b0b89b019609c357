"""What workers and the keeper give each other: blocks of a version, updates of a step. What is served is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlings_protos.messages import KEEPER, Assignment, WorkerId
from starlings_simulator.checker import Checker
from starlings_simulator.history import History
from starlings_simulator.host import Host
from starlings_simulator.network import Network
from starlings_simulator.symbolic import Piece


@dataclass(slots=True)
class Donations:
    """Who can be reached by whom, and what they have."""

    hosts: Mapping[WorkerId, Host]
    saved: Mapping[int, dict[int, str]]
    network: Network
    checker: Checker
    keeper_is_up: Callable[[], bool]

    def blocks(self, assignment: Assignment, worker_id: WorkerId) -> dict[int, str]:
        """Of the assignment's span and version, each from the first donor that answers; what nobody has is missing."""
        wanted = {block for stage in assignment.span.stages for block in assignment.stages[stage].blocks}
        found: dict[int, str] = {}
        for donor in assignment.donors:
            for block in sorted(wanted - found.keys()):
                state = self._block(donor.worker_id, worker_id, assignment.version, block)
                if state is not None:
                    found[block] = state
        return found

    def _block(self, donor: WorkerId, to: WorkerId, version: int, block: int) -> str | None:
        if donor == KEEPER:
            # It is the coordinator's child.
            up = self.keeper_is_up() and not self.network.is_cut(to, "coordinator")
            return self.saved.get(version, {}).get(block) if up else None
        return self.snapshot(donor, version, block, to)

    def snapshot(self, donor: WorkerId, version: int, block: int, to: str = "coordinator") -> str | None:
        """What a worker's data plane answers to another worker, or to the keeper."""
        history = self._history(donor, to)
        state = history.snapshots.get(version, {}).get(block) if history is not None else None
        if state is not None:
            self.checker.served(donor, version, block, state)
        return state

    def update(self, donor: WorkerId, to: WorkerId, step: int, group: str) -> Piece | None:
        """What a group exchanged in a step.

        Raises:
            NotYet: the donor will have it soon.
        """
        history = self._history(donor, to)
        if history is None:
            return None
        engine = self.hosts[donor].engine
        assert engine is not None
        piece = history.update(step, group, engine.device.version if engine.device is not None else 0)
        if piece is not None:
            self.checker.served_update(donor, step, group, piece)
        return piece

    def _history(self, donor: WorkerId, to: str) -> History | None:
        host = self.hosts.get(donor)
        engine = host.engine if host is not None else None
        if engine is None or engine.device is None or not engine.process.alive or engine.process.frozen:
            return None
        return engine.history if not self.network.is_cut(donor, to) else None
