"""The keeper's part: version 0 and the checkpoints, by block; pulls what is saved, serves what was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from starlings_coordinator.core.effects import SaveCheckpoint
from starlings_coordinator.core.events import CheckpointFailed, CheckpointSaved
from starlings_protos.messages import WorkerId
from starlings_simulator.checker import Checker
from starlings_simulator.symbolic import require

DISK_FULL_EXIT_CODE = 9

# (donor, version, block) -> the state that it serves, None when it does not answer or has none.
Snapshot = Callable[[WorkerId, int, int], str | None]


@dataclass(slots=True)
class SimulatedKeeper:
    """Its disk outlives everything. `full`: nothing more can be written now."""

    block_names: tuple[str, ...]
    snapshot: Snapshot
    checker: Checker
    saved: dict[int, dict[int, str]] = field(default_factory=dict)
    full: bool = False

    def __post_init__(self) -> None:
        self.saved[0] = {block: f"initial:{name}" for block, name in enumerate(self.block_names)}

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self.saved))

    def save(self, effect: SaveCheckpoint) -> CheckpointSaved | CheckpointFailed:
        """Pull each block from the first donor that has it; all of them, or nothing is written."""
        states: dict[int, str] = {}
        for name, donors, digest in effect.donors:
            block = self.block_names.index(name)
            for donor in donors:
                state = self.snapshot(donor.worker_id, effect.version, block)
                if state is None:
                    continue
                require(
                    not digest or digest == state, f"{name}: {donor.worker_id} offers {state}, not {digest}"
                )
                states[block] = state
                break
        if len(states) < len(self.block_names):
            return CheckpointFailed(effect.version, "a donor is gone")
        if self.full:
            reason = "no space left on device"
            return CheckpointFailed(effect.version, reason, DISK_FULL_EXIT_CODE)
        self.checker.saved(effect.version, states)
        self.saved[effect.version] = states
        return CheckpointSaved(effect.version, f"checkpoints/{effect.version}", 1)
