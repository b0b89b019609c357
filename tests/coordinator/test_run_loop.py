"""The loop: records are durable before effects leave, bursts share commits, and queues are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from starlings_coordinator import sessions
from starlings_coordinator.clock import SystemClock
from starlings_coordinator.core.effects import Announce
from starlings_coordinator.core.events import Booted, KeeperLost, StopRequested, Ticked
from starlings_coordinator.core.records import StopRecorded
from starlings_coordinator.journal import LONGEST_SPACING_S, Journal, commit_spacing_s
from starlings_coordinator.loop import CoreLoop
from starlings_coordinator.sessions import Ending, SessionTable, TooManySessions
from starlings_coordinator.store import Store, StoreFull, sqlite_url
from starlings_protos import control_pb2
from starlings_protos.messages import Refusal, WorkerId

WORKER = WorkerId("w" + "0" * 16)


@dataclass
class EchoCore:
    """Writes down and announces every stop request; ignores everything else."""

    handled: list[Any] = field(default_factory=list)

    def handle(self, event: Any, now: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        self.handled.append(event)
        if isinstance(event, StopRequested):
            return (StopRecorded(event.reason),), (Announce("stop", event.reason),)
        return (), ()

    def snapshot(self) -> bytes:
        return b"snapshot"


class Rig:
    def __init__(self, directory: Path) -> None:
        self.store = Store(sqlite_url(directory / "core.sqlite"))
        self.core = EchoCore()
        self.left: list[str] = []
        # At the moment an effect leaves: how many records are in the database.
        self.stored: list[int] = []
        self.reader = Store(sqlite_url(directory / "core.sqlite"))
        journal = Journal(self.store, SystemClock())
        self.loop = CoreLoop(self.core, journal, SystemClock(), self.execute)  # type: ignore[arg-type]

    def execute(self, effect: Any) -> None:
        self.left.append(effect.text)
        self.stored.append(len(self.reader.load().entries))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_no_effect_leaves_before_its_record_is_stored(rig: Rig) -> None:
    running = asyncio.create_task(rig.loop.run())
    for number in range(40):
        await rig.loop.post(StopRequested(str(number)))
        if number % 7 == 0:
            await asyncio.sleep(0.001)
    await rig.loop.turn()
    assert rig.left == [str(n) for n in range(40)]
    assert all(stored > number for number, stored in enumerate(rig.stored))
    rig.loop.stop()
    await running
    assert [e.kind for e in rig.reader.load().entries] == ["stop_recorded"] * 40


async def test_failed_append_stops_the_loop_and_nothing_leaves(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(records: Any, wall_s: float) -> None:
        raise StoreFull("no space")

    monkeypatch.setattr(rig.store, "append", full)
    running = asyncio.create_task(rig.loop.run())
    await rig.loop.post(StopRequested("x"))
    waiting = asyncio.create_task(rig.loop.turn())
    with pytest.raises(StoreFull):
        await running
    assert rig.left == []
    await asyncio.wait_for(waiting, 5)  # nobody waits for ever for a loop that is gone


async def test_burst_shares_commits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[int] = []
    real = rig.store.append

    def counted(records: Any, wall_s: float) -> None:
        commits.append(len(records))
        real(records, wall_s)

    monkeypatch.setattr(rig.store, "append", counted)
    for number in range(100):
        await rig.loop.post(StopRequested(str(number)))
    running = asyncio.create_task(rig.loop.run())
    await rig.loop.turn()
    rig.loop.stop()
    await running
    assert sum(commits) == 100
    assert len(commits) <= 3


async def test_flush_leaves_a_snapshot_and_an_empty_log(rig: Rig) -> None:
    running = asyncio.create_task(rig.loop.run())
    await rig.loop.post(StopRequested("x"))
    await rig.loop.turn()
    rig.loop.stop()
    await running
    await rig.loop.flush()
    saved = rig.reader.load()
    assert (saved.snapshot, saved.entries) == (b"snapshot", ())


async def test_inside_events_come_before_a_full_queue(rig: Rig) -> None:
    for _ in range(4096):
        await rig.loop.post(Booted())
    rig.loop.post_soon(KeeperLost("gone"))
    running = asyncio.create_task(rig.loop.run())
    await rig.loop.turn()
    rig.loop.stop()
    await running
    assert rig.core.handled[0] == KeeperLost("gone")
    ticks = [e for e in rig.core.handled if isinstance(e, Ticked)]
    assert len(rig.core.handled) - len(ticks) == 4097


def test_slow_disks_are_spared_and_fast_ones_delay_nobody() -> None:
    assert commit_spacing_s(0.0) == 0.0
    assert commit_spacing_s(0.001) == pytest.approx(0.004)
    assert commit_spacing_s(0.04) == LONGEST_SPACING_S
    spacings = [commit_spacing_s(t / 1000) for t in range(100)]
    assert all(a <= b for a, b in itertools.pairwise(spacings))


# ------------------------------------------------------------------ sessions


def _message(size_bytes: int = 0) -> control_pb2.ToWorker:
    message = control_pb2.ToWorker()
    message.standby.reason = "x" * size_bytes
    return message


async def test_queue_beyond_a_limit_ends_the_session_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "WAITING_BYTES_LIMIT", 1000)
    session = SessionTable().open(WORKER)
    session.send(_message(600))
    session.send(_message(600))
    assert session.ending is not None
    assert session.ending.refusal is Refusal.LIMIT
    assert await session.next() is None
    session.send(_message())
    assert await session.next() is None


async def test_queue_of_many_small_messages_is_bounded_too() -> None:
    session = SessionTable().open(WORKER)
    for _ in range(sessions.WAITING_MESSAGES_LIMIT):
        session.send(_message())
    assert session.ending is None
    session.send(_message())
    assert session.ending is not None


async def test_acknowledgements_are_dropped_before_anything_else_suffers() -> None:
    session = SessionTable().open(WORKER)
    for _ in range(10_000):
        session.send(_message(), may_drop=True)
    assert session.ending is None
    count = 0
    session.end(Ending(None, "over"))
    while await session.next() is not None:
        count += 1
    assert count == sessions.WAITING_MESSAGES_FOR_ACKS


async def test_last_words_are_sent_and_the_first_reason_stays() -> None:
    session = SessionTable().open(WORKER)
    session.send(_message())
    session.end(Ending(Refusal.REVOKED, "first"))
    session.end(Ending(None, "second"))
    assert await session.next() is not None
    assert await session.next() is None
    await asyncio.wait_for(session.ended, 5)
    assert session.ending == Ending(Refusal.REVOKED, "first")


async def test_table_has_a_limit_and_knows_whose_session_is_whose() -> None:
    table = SessionTable(limit=2)
    first, second = table.open(WORKER), table.open(WorkerId("w" + "1" * 16))
    with pytest.raises(TooManySessions):
        table.open(WORKER)
    assert table.get(first.number, WORKER) is first
    assert table.get(second.number, WORKER) is None
    assert not await table.wait_empty(0.01)
    for session in (first, second):
        table.close(session)
    assert await table.wait_empty(0.01)


async def test_streams_that_are_not_read_to_their_end_count() -> None:
    table = SessionTable(limit=10)
    with contextlib.ExitStack() as streams:
        for _ in range(sessions.LINGERING_PER_WORKER_LIMIT):
            session = table.open(WORKER)
            table.close(session)
            streams.enter_context(table.lingering(session))
        assert await table.wait_empty(0.01)
        with pytest.raises(TooManySessions, match="not read"):
            table.open(WORKER)
        table.open(WorkerId("w" + "1" * 16))
    table.open(WORKER)
