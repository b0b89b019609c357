"""The last steps' updates, as they were exchanged: what a late joiner replays.

An update is the encoded aggregate of every part of a group's vector, in the very bytes that all members decoded. It is
kept when its step is *applied*, so a round that was given up leaves nothing here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlings_protos.state_transfer import ServedBlock, StateTensor
from starlings_worker.core.observing import STEPS_BEHIND_AT_MOST
from starlings_worker.serving import NotHeld, NotYet

PREFIX = "update/"
# After the last observer has become a holder it may still need the step at which it did.
_STEPS_KEPT_ON = 2

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [begin, end) of a group's vector, or of what a pass of its exchange sums up, encoded."""

    begin: int
    end: int
    codec: str
    data: Buffer
    pass_number: int = 0

    @property
    def name(self) -> str:
        return f"{self.pass_number}:{self.begin}:{self.end}:{self.codec}"


def parse_part(name: str) -> tuple[int, int, int, str]:
    """(pass, begin, end, codec spec).

    Raises:
        ValueError: not a part's name.
    """
    number, begin, end, codec = name.split(":", 3)
    return int(number), int(begin), int(end), codec


class History:
    """By step and group, bounded in steps and bytes: the oldest step goes first. Written by the compute thread, read by
    the event loop: whole dictionaries are exchanged, never changed.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, ServedBlock]] = {}
        self._from: int | None = None
        # Steps still to be recorded after nobody asked for more; None: as long as somebody does.
        self._left: int | None = None
        # The version of the weights here: updates of later steps will come.
        self._version = 0

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._steps))

    def keep(self, updates_from: int | None) -> None:
        """Record from that step on; None: nobody needs more than what is about to be applied."""
        if updates_from is not None:
            self._from, self._left = updates_from, None
            self._steps = {step: groups for step, groups in self._steps.items() if step >= updates_from}
        elif self._from is not None and self._left is None:
            self._left = _STEPS_KEPT_ON

    def wants(self, step: int) -> bool:
        return self._from is not None and step >= self._from and self._left != 0

    def record(self, step: int, updates: Mapping[str, Sequence[Part]], limit_bytes: int) -> None:
        """The updates of a step that is being applied; only if `wants` says so. At most `limit_bytes` are kept."""
        groups = {}
        for group, parts in updates.items():
            tensors = [StateTensor(p.name, "U8", (len(p.data),), memoryview(p.data)) for p in parts]
            groups[group] = ServedBlock(step + 1, PREFIX + group, tensors)
        kept = {**self._steps, step: groups}
        total = sum(map(_size, kept.values()))
        for oldest in sorted(kept):
            if len(kept) <= STEPS_BEHIND_AT_MOST and total <= limit_bytes:
                break
            total -= _size(kept.pop(oldest))
        self._steps = kept

    def applied(self, version: int) -> None:
        """The step before `version` has been applied."""
        self._version = version
        if self._left is None:
            return
        if self._left == 0:
            self.clear()
            return
        self._left -= 1

    def clear(self) -> None:
        self._steps, self._from, self._left = {}, None, None

    def serve(self, version: int, group: str) -> ServedBlock:
        """The update that made `version`.

        Raises:
            NotHeld: not kept (any more). NotYet: a step that is still to come.
        """
        found = self._steps.get(version - 1, {}).get(group)
        if found is not None:
            return found
        if version > self._version and self._from is not None:
            raise NotYet(f"step {version - 1} is not applied here yet; version {self._version} is here")
        have = f"{min(self._steps)} to {max(self._steps)}" if self._steps else "none"
        raise NotHeld(f"the update of {group[:40]} in step {version - 1} is not kept here; there are: {have}")


def _size(groups: Mapping[str, ServedBlock]) -> int:
    return sum(t.data.nbytes for block in groups.values() for t in block.tensors)
