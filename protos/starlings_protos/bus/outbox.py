"""What waits to be published while the broker is slow or away: bounded, and the least important goes first. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Telemetry of the last minute or so; then messages that are worth an acknowledgement.
UNACKNOWLEDGED_LIMIT = 16
ACKNOWLEDGED_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message. Retained ones say how things are: only the newest of a topic is of interest."""

    topic: str
    payload: bytes
    # 0: sent once, may be lost. 1: sent until it is acknowledged.
    qos: int = 0
    retain: bool = False
    # The broker forgets a retained message after this long; 0 = never.
    expires_s: int = 0


class Outbox:
    """Retained messages by topic, then those with QoS 1, then those with QoS 0. Not thread-safe."""

    def __init__(
        self, unacknowledged: int = UNACKNOWLEDGED_LIMIT, acknowledged: int = ACKNOWLEDGED_LIMIT
    ) -> None:
        self._retained: dict[str, Outgoing] = {}
        self._acknowledged: deque[Outgoing] = deque()
        self._unacknowledged: deque[Outgoing] = deque()
        self._limits = (unacknowledged, acknowledged)
        # Messages that nobody will ever get; those replaced by newer ones of their topic do not count.
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._retained) + len(self._acknowledged) + len(self._unacknowledged)

    def put(self, message: Outgoing) -> None:
        """Keeps `message`; where there is no room, the oldest of its kind is dropped and counted."""
        if message.retain:
            # Behind the others: it is news of this moment.
            self._retained.pop(message.topic, None)
            if len(self._retained) >= self._limits[1]:
                del self._retained[next(iter(self._retained))]
                self.dropped += 1
            self._retained[message.topic] = message
            return
        queue = self._acknowledged if message.qos else self._unacknowledged
        if len(queue) >= self._limits[1 if message.qos else 0]:
            queue.popleft()
            self.dropped += 1
        queue.append(message)

    def take(self) -> Outgoing | None:
        """The next to send, most important first; None when there is nothing."""
        if self._retained:
            return self._retained.pop(next(iter(self._retained)))
        if self._acknowledged:
            return self._acknowledged.popleft()
        return self._unacknowledged.popleft() if self._unacknowledged else None

    def put_back(self, message: Outgoing) -> None:
        """After sending `message` failed: it is the next again, unless a newer one has replaced it. QoS 0 is lost."""
        if message.retain:
            if message.topic not in self._retained:
                self._retained = {message.topic: message, **self._retained}
        elif message.qos and len(self._acknowledged) < self._limits[1]:
            self._acknowledged.appendleft(message)
        else:
            self.dropped += 1
