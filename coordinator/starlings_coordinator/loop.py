"""The coordinator's one loop: events in, the pure core decides, records become durable, effects leave.

Nothing else changes the core's state, and no effect leaves before the records it rests on are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from starlings_coordinator.clock import Clock
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.effects import Effect
from starlings_coordinator.core.events import Event, Ticked, WorkerSaid
from starlings_coordinator.core.records import record_to_json
from starlings_coordinator.journal import Journal

TICK_S = 0.25
# Streams wait (and so do their senders, by flow control) when this many events are not handled yet.
WAITING_EVENTS_LIMIT = 4096
# Events of one turn; more wait for the next, so that effects do not come in huge bursts.
TURN_LIMIT = 512


class CoreLoop:
    def __init__(self, core: Core, journal: Journal, clock: Clock, execute: Callable[[Effect], None]) -> None:
        self._core = core
        self._journal = journal
        self._clock = clock
        self._execute = execute
        # An asyncio.Event in the queue is set once everything before it is done.
        self._events: asyncio.Queue[Event | asyncio.Event] = asyncio.Queue(WAITING_EVENTS_LIMIT)
        # What our own children and timers say is never held up by what comes from outside.
        self._inside: list[Event] = []
        # The newest heartbeat and the newest counters of each stream since the last turn.
        self._signs: dict[tuple[int, type], WorkerSaid] = {}
        self._reached: list[asyncio.Event] = []
        self._stopping = False
        self._over = False
        # Set by whoever runs the loop when the job is over: watchers send their last reply.
        self.ended = asyncio.Event()

    async def post(self, event: Event) -> None:
        """From a stream: waits while the queue is full. Dropped when the loop is over."""
        if not self._over:
            await self._events.put(event)

    def post_soon(self, event: Event) -> None:
        """From this process itself: never waits. Handled in the next turn, before what waits in the queue."""
        self._inside.append(event)
        self._wake()

    def post_sign(self, said: WorkerSaid) -> None:
        """A heartbeat, or counters: never waits, and wakes nobody; the next turn takes it, at the latest a tick later.
        Of several from one stream only the newest counts, so that a stream cannot fill anything with them.
        """
        if not self._over:
            self._signs[said.session, type(said.message)] = said

    async def turn(self) -> None:
        """Waits until everything posted before was handled and its effects have left, or the loop is over."""
        reached = asyncio.Event()
        if not self._over:
            await self._events.put(reached)
            if not self._over:  # it may have ended while the queue was full
                await reached.wait()

    def stop(self) -> None:
        """Ends `run` after the turn under way."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        # A full queue needs no waking.
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(Ticked())

    async def run(self) -> None:
        """Handles events until `stop`.

        Raises:
            StoreError: records could not be stored; their effects did not leave.
        """
        ticker = asyncio.create_task(self._tick())
        try:
            while not self._stopping:
                await self._turn(await self._events.get())
        finally:
            ticker.cancel()
            self._over = True
            # Whoever waits for a place in the queue, or for its turn, waits no more.
            while not self._events.empty():
                self._take([])
            self._let_go()

    async def flush(self) -> None:
        """At an orderly end: whatever is in the log becomes a snapshot, so that the next start is quick."""
        if self._journal.has_entries:
            await self._journal.snapshot(self._core.snapshot())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._events.put(Ticked())

    async def _turn(self, first: Event | asyncio.Event) -> None:
        records: list[tuple[str, bytes]] = []
        effects: list[Effect] = []
        self._handle_batch(self._take([first]), records, effects)
        if records:
            await self._journal.spacing()
            # What arrived during the wait shares the commit.
            self._handle_batch(self._take([]), records, effects)
            await self._journal.commit(records)
        for effect in effects:
            self._execute(effect)
        self._let_go()
        if self._journal.wants_snapshot:
            await self._journal.snapshot(self._core.snapshot())

    def _take(self, waiting: list[Event | asyncio.Event]) -> list[Event]:
        """Up to a turn's worth of waiting events, in order; of several ticks one is enough."""
        while len(waiting) < TURN_LIMIT and not self._events.empty():
            waiting.append(self._events.get_nowait())
        events, self._inside = self._inside, []
        ticked = False
        for item in waiting:
            if isinstance(item, asyncio.Event):
                self._reached.append(item)
            elif isinstance(item, Ticked):
                ticked = True
            else:
                events.append(item)
        # After the greeting of their stream, and before anybody is given up for his silence.
        events += self._signs.values()
        self._signs.clear()
        return [*events, Ticked()] if ticked else events

    def _handle_batch(
        self, events: Sequence[Event], records: list[tuple[str, bytes]], effects: list[Effect]
    ) -> None:
        now = self._clock.now()
        for event in events:
            new_records, new_effects = self._core.handle(event, now)
            records.extend((record.kind, record_to_json(record)) for record in new_records)
            effects.extend(new_effects)

    def _let_go(self) -> None:
        reached, self._reached = self._reached, []
        for event in reached:
            event.set()
