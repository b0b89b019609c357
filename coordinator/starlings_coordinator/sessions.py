"""Open control streams and what waits to be sent on each: bounded, so a worker that does not read costs a stream.

A worker that falls behind by more than the limits is cut off and may connect again; nothing is lost, because the core
tells a returning worker everything it needs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlings_protos import control_pb2
from starlings_protos.messages import Refusal, WorkerId

# A sync step of a large job sends each worker some ten messages: a thousand are minutes of not reading.
WAITING_MESSAGES_LIMIT = 1024
# One grant of leases may have 64 MiB (see pipes.MESSAGE_LIMIT_BYTES); a second one must fit behind it.
WAITING_BYTES_LIMIT = 144 << 20
# Acknowledgements of heartbeats are dropped first: they say only that the coordinator lives.
WAITING_MESSAGES_FOR_ACKS = 64
# As many members as a job may have (core.membership), and some that are on their way out or come back meanwhile.
SESSIONS_LIMIT = 12_000
# A worker that never reads its streams to the end may open this many.
LINGERING_PER_WORKER_LIMIT = 2


class TooManySessions(Exception):
    """As many control streams are open as this coordinator allows."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a session ends. Without a refusal nobody did anything wrong."""

    refusal: Refusal | None
    message: str
    # This process goes away: the worker should try again, and is told so by the status UNAVAILABLE.
    leaving: bool = False


@dataclass(eq=False, slots=True)
class WorkerSession:
    """One control stream. Only the event loop's thread touches it."""

    number: int
    worker_id: WorkerId
    _waiting: deque[tuple[control_pb2.ToWorker, int]] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Set once: what is in the queue is still sent, nothing is added.
    ending: Ending | None = None
    # Done once `ending` is set.
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # When a heartbeat was answered last, seconds of the coordinator's clock.
    acknowledged_at_s: float = float("-inf")
    # The pace that was named then, seconds between two heartbeats.
    told_interval_s: float = 0.0

    def send(self, message: control_pb2.ToWorker, *, may_drop: bool = False) -> None:
        """Queues a message; a queue beyond its limits ends the session. Never blocks."""
        if self.ending is not None:
            return
        if may_drop and len(self._waiting) >= WAITING_MESSAGES_FOR_ACKS:
            return
        byte_count = message.ByteSize()
        if (
            len(self._waiting) >= WAITING_MESSAGES_LIMIT
            or self._waiting_bytes + byte_count > WAITING_BYTES_LIMIT
        ):
            behind = f"{len(self._waiting)} messages, {self._waiting_bytes >> 20} MiB"
            self._waiting.clear()
            self._waiting_bytes = 0
            self.end(Ending(Refusal.LIMIT, f"The worker does not read its control stream ({behind} wait)."))
            return
        self._waiting.append((message, byte_count))
        self._waiting_bytes += byte_count
        self._changed.set()

    def end(self, ending: Ending) -> None:
        """Ends the session once the queue is sent. The first reason stays."""
        if self.ending is None:
            self.ending = ending
            self.ended.set_result(None)
            self._changed.set()

    async def next(self) -> control_pb2.ToWorker | None:
        """The next message to write; None when the session ends."""
        while not self._waiting:
            if self.ending is not None:
                return None
            self._changed.clear()
            await self._changed.wait()
        message, byte_count = self._waiting.popleft()
        self._waiting_bytes -= byte_count
        return message


class SessionTable:
    """All open sessions by number; numbers are unique in the life of this process."""

    def __init__(self, limit: int = SESSIONS_LIMIT) -> None:
        self._limit = limit
        self._sessions: dict[int, WorkerSession] = {}
        # Streams that are over for us and have not ended yet, because the peer does not read.
        self._lingering: Counter[WorkerId] = Counter()
        self._lingering_count = 0
        self._next_number = 1
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, worker_id: WorkerId) -> WorkerSession:
        """Raises TooManySessions."""
        if len(self._sessions) + self._lingering_count >= self._limit:
            raise TooManySessions(f"{self._limit} control streams are open already")
        if self._lingering[worker_id] >= LINGERING_PER_WORKER_LIMIT:
            raise TooManySessions(f"earlier streams of {worker_id} were not read to their end")
        session = WorkerSession(self._next_number, worker_id)
        self._next_number += 1
        self._sessions[session.number] = session
        self._empty.clear()
        return session

    def close(self, session: WorkerSession) -> None:
        self._sessions.pop(session.number, None)
        if not self._sessions:
            self._empty.set()

    @contextmanager
    def lingering(self, session: WorkerSession) -> Iterator[None]:
        """While a closed session's stream gets its status."""
        self._lingering[session.worker_id] += 1
        self._lingering_count += 1
        try:
            yield
        finally:
            self._lingering[session.worker_id] -= 1
            self._lingering_count -= 1
            if not self._lingering[session.worker_id]:
                del self._lingering[session.worker_id]

    def get(self, number: int, worker_id: WorkerId) -> WorkerSession | None:
        """The open session of that number, if it is that worker's."""
        session = self._sessions.get(number)
        return session if session is not None and session.worker_id == worker_id else None

    def end_all(self, ending: Ending) -> None:
        for session in list(self._sessions.values()):
            session.end(ending)

    async def wait_empty(self, within_s: float) -> bool:
        """True when all sessions are closed within the time."""
        try:
            await asyncio.wait_for(self._empty.wait(), within_s)
        except TimeoutError:
            return False
        return True
