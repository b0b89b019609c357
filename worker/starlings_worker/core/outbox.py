"""Messages to the coordinator: held back while the stream is down, and repeated when it is up again.

A stream that breaks may have swallowed the last messages. Whatever the coordinator needs for its present
decision is therefore remembered until it is out of date, and said again after every reconnection; the
coordinator treats a second copy as the first. Advice (an unreachable peer) is only queued, and bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from starlings_protos.messages import (
    ExchangeFailed,
    Leaving,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    Prepared,
    Ready,
    StateReport,
    ToCoordinator,
)

# Facts kept for repetition at most: microbatches of a step or of an evaluation that this worker reported.
FACTS_AT_MOST = 16384
ADVICE_AT_MOST = 256

Slot = tuple[object, ...]


def _slot(message: ToCoordinator) -> Slot | None:
    """Where a message is remembered; a newer one in the same slot replaces the older.

    None: not remembered.
    """
    match message:
        case MicrobatchDone() | MicrobatchFailed():
            return ("microbatch", message.key)
        case Ready() | Prepared() | StateReport() | Leaving():
            return (type(message).__name__,)
        case ExchangeFailed():
            return ("exchange", message.group)
        case _:
            return None


class Outbox:
    """`send` is called for each message that goes out now."""

    def __init__(self, send: Callable[[ToCoordinator], None]) -> None:
        self._send = send
        self.up = True
        self.facts: dict[Slot, ToCoordinator] = {}
        self.advice: deque[ToCoordinator] = deque(maxlen=ADVICE_AT_MOST)

    def say(self, message: ToCoordinator) -> None:
        slot = _slot(message)
        if slot is not None:
            # To the end: facts are repeated in the order in which they became true.
            self.facts.pop(slot, None)
            self.facts[slot] = message
            while len(self.facts) > FACTS_AT_MOST:
                del self.facts[next(iter(self.facts))]
        elif not self.up:
            self.advice.append(message)
        if self.up:
            self._send(message)

    def lost(self) -> None:
        self.up = False

    def restored(self) -> None:
        """Say everything that still matters once more, then the advice that waited."""
        self.up = True
        for message in list(self.facts.values()):
            self._send(message)
        while self.advice:
            self._send(self.advice.popleft())

    def forget_step(self) -> None:
        """A step ended or began anew, or evaluation did: what was said of it is out of date."""
        for slot, message in list(self.facts.items()):
            match message:
                case MicrobatchDone() | MicrobatchFailed() | Prepared() | ExchangeFailed():
                    del self.facts[slot]
                case _:
                    pass

    def forget_microbatch(self, key: MicrobatchKey) -> None:
        """What was said of it is known for certain, or too old to matter."""
        self.facts.pop(("microbatch", key), None)

    def forget(self, kind: type[Ready] | type[StateReport]) -> None:
        self.facts.pop((kind.__name__,), None)

    def forget_all(self) -> None:
        """A new plan: only the wish to leave outlives it."""
        self.facts = {slot: message for slot, message in self.facts.items() if isinstance(message, Leaving)}
        self.advice.clear()
