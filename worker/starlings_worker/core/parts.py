"""Which parts of exchanges are here, or coming in; also those that came before their round was opened
(bounded).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable

from starlings_protos.messages import ExchangeHeader, Receipt, Refusal, Span, WorkerId
from starlings_worker.core.admission import Admission, Duplicate, Rejection
from starlings_worker.core.effects import ForgetPart
from starlings_worker.core.events import Leg

Epoch = tuple[int, int]
# (leg, epoch, group, pass, part, sender)
Key = tuple[Leg, Epoch, str, int, int, WorkerId]


class PartStatus(enum.Enum):
    COMING = "coming"
    HERE = "here"


def _key(leg: Leg, header: ExchangeHeader, sender: WorkerId) -> Key:
    return (leg, (header.step, header.attempt), header.group, header.pass_number, header.part, sender)


def group_is_held(group: str, span: Span, stage_count: int) -> bool:
    """Whether a worker with `span` belongs to `group`: "stage:N", or "tied" (first and last stage)."""
    if group == "tied":
        return span.first_stage == 0 or span.last_stage == stage_count - 1
    kind, _, number = group.partition(":")
    return (
        kind == "stage"
        and number.isascii()
        and number.isdecimal()
        and len(number) < 7
        and int(number) in span
    )


class PartStore:
    """At most `limit` parts are kept for rounds that are not open yet; an open round bounds itself by its
    members.
    """

    def __init__(self, counters: Counter[str], forget: Callable[[ForgetPart], None]) -> None:
        self._counters = counters
        self._forget = forget
        self._parts: dict[Key, tuple[PartStatus, ExchangeHeader]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def epochs(self) -> set[Epoch]:
        return {key[1] for key in self._parts}

    def early(self, open_epoch: Epoch | None) -> int:
        return sum(key[1] != open_epoch for key in self._parts)

    def admit(
        self,
        leg: Leg,
        header: ExchangeHeader,
        sender: WorkerId,
        receipt: Receipt,
        *,
        open_epoch: Epoch | None,
        limit: int,
    ) -> Admission:
        """Judge a part whose epoch and group the caller found sound; on a Receipt it is awaited."""
        key = _key(leg, header, sender)
        known = self._parts.get(key)
        if known is not None:
            if known[0] is PartStatus.HERE:
                return Duplicate(receipt)
            return Rejection(Refusal.BUSY, "a transfer of this part is under way")
        if key[1] != open_epoch and self.early(open_epoch) >= limit:
            return Rejection(Refusal.BUSY, "too many parts of rounds that are not open here yet")
        self._parts[key] = (PartStatus.COMING, header)
        return receipt

    def arrived(self, leg: Leg, header: ExchangeHeader, sender: WorkerId) -> bool:
        key = _key(leg, header, sender)
        if self._parts.get(key) != (PartStatus.COMING, header):
            self._counters["late_parts"] += 1
            if key not in self._parts:
                self._forget(ForgetPart(leg, header, sender))
            return False
        self._parts[key] = (PartStatus.HERE, header)
        return True

    def aborted(self, leg: Leg, header: ExchangeHeader, sender: WorkerId) -> None:
        key = _key(leg, header, sender)
        if self._parts.get(key) == (PartStatus.COMING, header):
            del self._parts[key]
            self._counters["broken_parts"] += 1

    def here(self, leg: Leg, epoch: Epoch, group: str, pass_number: int, part: int, sender: WorkerId) -> bool:
        status = self._parts.get((leg, epoch, group, pass_number, part, sender))
        return status is not None and status[0] is PartStatus.HERE

    def drop(self, unwanted: Callable[[Leg, ExchangeHeader, WorkerId], bool]) -> None:
        """Free parts that no round will use."""
        for key, (status, header) in list(self._parts.items()):
            if unwanted(key[0], header, key[5]):
                del self._parts[key]
                self._counters["parts_dropped"] += 1
                if status is PartStatus.HERE:
                    self._forget(ForgetPart(key[0], header, key[5]))

    def begin_epoch(self, epoch: Epoch) -> None:
        """Forget what belongs to earlier epochs; the shell frees it (ClearGradients, ApplyStep, Load)."""
        self._parts = {key: value for key, value in self._parts.items() if key[1] >= epoch}

    def clear(self) -> None:
        self._parts.clear()
