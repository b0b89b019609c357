"""What one call of `handle` writes down and asks for. Records are folded at once, so later code sees their effect."""

from __future__ import annotations

from collections.abc import Callable

from starlings_coordinator.core.effects import Announce, CloseSession, Effect, Send
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.records import Record
from starlings_protos.messages import Refusal, ToWorker


class Desk:
    def __init__(self, fold: Callable[[Record], None], announce: Callable[[str, str], None]) -> None:
        self._fold = fold
        self._announce = announce
        self._records: list[Record] = []
        self._effects: list[Effect] = []

    def record(self, record: Record) -> None:
        self._fold(record)
        self._records.append(record)

    def ask(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, member: Member, message: ToWorker) -> None:
        """To nobody when the stream is down: whoever comes back is told the whole present state."""
        if member.session is not None:
            self._effects.append(Send(member.session, member.worker_id, message))

    def close(self, member: Member, refusal: Refusal | None, message: str) -> None:
        if member.session is not None:
            self._effects.append(CloseSession(member.session, member.worker_id, refusal, message))
            member.session = None

    def announce(self, kind: str, text: str) -> None:
        self._announce(kind, text)
        self._effects.append(Announce(kind, text))

    def take(self) -> tuple[tuple[Record, ...], tuple[Effect, ...]]:
        taken = tuple(self._records), tuple(self._effects)
        self._records.clear()
        self._effects.clear()
        return taken
