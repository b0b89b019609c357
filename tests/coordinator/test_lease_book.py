"""The lease book against a dumb twin that knows of every single sample, with restarts at any point."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from starlings_coordinator.core.lease_book import LEASE_S, RECORD_EVERY_S, LeaseBook
from starlings_coordinator.core.ranges import Range, meet, minus, ranges_of, size, union
from starlings_coordinator.core.records import (
    LeaseBlockGranted,
    LeaseBlockReturned,
    Record,
    SampleEpochOpened,
    SamplesAcknowledged,
    WorkerAdmitted,
    record_from_json,
    record_to_json,
)
from starlings_coordinator.core.state import Durable, fold, snapshot_from_json, snapshot_to_json
from starlings_protos.messages import WorkerId

WORKERS = tuple(WorkerId(f"w{i}") for i in range(3))
SAMPLES = 12
IN_FLIGHT = 3

pairs = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)


@settings(max_examples=100, deadline=None)
@given(pairs, pairs)
def test_ranges_are_sets(left_pairs: list[Range], right_pairs: list[Range]) -> None:
    def numbers(some: object) -> set[int]:
        return {n for first, end in some for n in range(first, end)}  # type: ignore[attr-defined]

    left, right = ranges_of(left_pairs), ranges_of(right_pairs)
    a, b = numbers(left_pairs), numbers(right_pairs)
    results = [
        (left, a),
        (union(left, right), a | b),
        (meet(left, right), a & b),
        (minus(left, right), a - b),
    ]
    for got, expected in results:
        assert numbers(got) == expected
        assert got == ranges_of((n, n + 1) for n in expected)
        assert size(got) == len(expected)


@dataclass
class Lease:
    granted: LeaseBlockGranted
    runs_out_at_s: float
    open: bool = True
    may_return: bool = False
    acknowledged: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    in_doubt: set[int] = field(default_factory=set)

    @property
    def positions(self) -> set[int]:
        return set(range(self.granted.first, self.granted.end))


class Twin:
    """One entry per sample and lease; believes records, and checks each against what they promise."""

    def __init__(self) -> None:
        # (epoch, position) -> "free", "done", or the lease that it is out with.
        self.where: dict[tuple[int, int], str | int] = {}
        self.leases: dict[int, Lease] = {}
        self.lives: dict[WorkerId, int] = {}
        self.recorded_at_s: dict[WorkerId, float] = {}
        # What somebody said to have trained, and no record names yet.
        self.said: set[tuple[int, int]] = set()
        # Free, and perhaps trained without a report; and what was trained again.
        self.in_doubt: set[tuple[int, int]] = set()
        self.repeated = 0

    def hear(self, record: Record, now_s: float, forced: bool) -> None:
        match record:
            case WorkerAdmitted():
                self.lives[record.worker_id] = record.incarnation
            case SampleEpochOpened():
                free = {key for key, place in self.where.items() if place == "free"}
                assert free <= self.said, "a new epoch before the old one is leased"
                assert all((record.epoch, p) not in self.where for p in range(record.samples))
                self.where |= {(record.epoch, p): "free" for p in range(record.samples)}
            case LeaseBlockGranted():
                lease = Lease(record, now_s + LEASE_S)
                assert self.lives[record.worker_id] == record.incarnation
                assert lease.positions
                for position in lease.positions:
                    assert self.where[record.epoch, position] == "free"
                    self.where[record.epoch, position] = record.lease
                    self.repeated += (record.epoch, position) in self.in_doubt
                    self.in_doubt.discard((record.epoch, position))
                assert record.lease not in self.leases
                self.leases[record.lease] = lease
            case SamplesAcknowledged():
                since_s = now_s - self.recorded_at_s.get(record.worker_id, -100.0)
                assert forced or since_s >= RECORD_EVERY_S, "more than one record a second"
                self.recorded_at_s[record.worker_id] = now_s
                assert record.accepted or record.repeated
                self._acknowledge(record)
            case LeaseBlockReturned():
                lease = self.leases[record.lease]
                life_is_over = self.lives[lease.granted.worker_id] != lease.granted.incarnation
                assert lease.open
                assert life_is_over or lease.may_return or now_s >= lease.runs_out_at_s, (
                    "taken back too early"
                )
                rest = lease.positions - lease.acknowledged
                assert 0 <= record.in_doubt <= len(rest)
                lease.open, lease.in_doubt = False, set(sorted(rest)[: record.in_doubt])
                self.in_doubt |= {(lease.granted.epoch, position) for position in lease.in_doubt}
                for position in rest:
                    assert self.where[lease.granted.epoch, position] == record.lease
                    self.where[lease.granted.epoch, position] = "free"
            case _:
                raise AssertionError(record)

    def _acknowledge(self, record: SamplesAcknowledged) -> None:
        for number, first, end in (*record.accepted, *record.repeated):
            epoch = self.leases[number].granted.epoch
            self.said -= {(epoch, position) for position in range(first, end)}
        for number, first, end in record.accepted:
            lease = self.leases[number]
            assert lease.granted.worker_id == record.worker_id
            for position in range(first, end):
                key = (lease.granted.epoch, position)
                if lease.open:
                    assert self.where[key] == number, "acknowledged for somebody who does not have it"
                    lease.acknowledged.add(position)
                else:
                    assert self.where[key] == "free", "acknowledged twice"
                    lease.late.add(position)
                assert position in lease.positions
                self.where[key] = "done"
                self.in_doubt.discard(key)
            if lease.acknowledged == lease.positions:
                lease.open = False
        for number, first, end in record.repeated:
            lease = self.leases[number]
            assert not lease.open
            for position in range(first, end):
                assert position in lease.positions - lease.acknowledged - lease.late - lease.repeated
                lease.repeated.add(position)
                # What was in doubt was counted when others got it.
                self.repeated += position not in lease.in_doubt

    @property
    def acknowledged(self) -> int:
        return list(self.where.values()).count("done")


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.stored: list[bytes] = []
        self.snapshot, self.since_snapshot = snapshot_to_json(Durable()), 0
        self.state = Durable()
        self.twin = Twin()
        # What workers said and nobody had to record yet: (lease, position) -> since when.
        self.said: dict[tuple[int, int], float] = {}
        self.forced = False
        self.open_book()

    def open_book(self) -> None:
        self.book = LeaseBook(
            self.state.leased,
            self.state.incarnations,
            self.record,
            now_s=self.now_s,
            in_doubt=lambda worker_id, now_s: IN_FLIGHT,
        )

    def record(self, record: Record) -> None:
        fold(self.state, record, 4, 8)
        self.stored.append(record_to_json(record))
        self.twin.hear(record, self.now_s, self.forced)

    @rule(worker=st.sampled_from(WORKERS))
    def a_life_begins(self, worker: WorkerId) -> None:
        self.record(WorkerAdmitted(worker, self.state.incarnations.get(worker, 0) + 1, "cpu"))

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(0, 8))
    def grant(self, worker: WorkerId, count: int) -> None:
        granted = self.book.grant(worker, count, SAMPLES, self.now_s)
        assert (granted is None) == (count == 0 or worker not in self.state.incarnations)
        assert granted is None or granted.end - granted.first <= count

    @precondition(lambda self: self.twin.leases)
    @rule(pick=st.integers(0, 10**6), first=st.integers(0, 7), count=st.integers(1, 8))
    def report(self, pick: int, first: int, count: int) -> None:
        """Of any lease there ever was, by the life that got it, dead or alive; also twice."""
        lease = self.twin.leases[pick % len(self.twin.leases)]
        granted = lease.granted
        begin = min(granted.first + first, granted.end - 1)
        trained = (begin, min(begin + count, granted.end))
        flaw = self.book.report(granted.worker_id, granted.incarnation, granted.lease, [trained], self.now_s)
        assert flaw == ""
        for position in range(*trained):
            self.said.setdefault((granted.lease, position), self.now_s)
            self.twin.said.add((granted.epoch, position))
        if lease.open:
            lease.runs_out_at_s = self.now_s + LEASE_S

    @precondition(lambda self: any(lease.open for lease in self.twin.leases.values()))
    @rule(pick=st.integers(0, 10**6), begun=st.integers(-1, 4))
    def give_back(self, pick: int, begun: int) -> None:
        lease = self._open(pick)
        lease.may_return, self.forced = True, True
        granted = lease.granted
        assert (
            self.book.give_back(granted.worker_id, granted.incarnation, granted.lease, begun, self.now_s)
            == ""
        )
        self.forced = False
        assert not lease.open

    def _open(self, pick: int) -> Lease:
        found = [lease for lease in self.twin.leases.values() if lease.open]
        return found[pick % len(found)]

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker: WorkerId) -> None:
        theirs = [lease for lease in self.twin.leases.values() if lease.granted.worker_id == worker]
        for lease in theirs:
            lease.may_return = True
        self.forced = True
        self.book.lost(worker, "its machine burnt down", self.now_s)
        self.forced = False
        assert not any(lease.open for lease in theirs)

    @rule(seconds=st.sampled_from([0.25, 1.0, 30.0, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        # A return writes down what its worker reported, whenever that was.
        open_before = {n for n, lease in self.twin.leases.items() if lease.open}
        self.forced = any(
            self.twin.lives[self.twin.leases[n].granted.worker_id] != self.twin.leases[n].granted.incarnation
            or self.now_s >= self.twin.leases[n].runs_out_at_s
            for n in open_before
        )
        self.book.due(self.now_s)
        self.forced = False
        for lease in self.twin.leases.values():
            if lease.open:
                assert self.now_s < lease.runs_out_at_s, "an unacknowledged lease did not return"
                assert self.twin.lives[lease.granted.worker_id] == lease.granted.incarnation
        for (number, position), since_s in self.said.items():
            lease = self.twin.leases[number]
            if self.now_s - since_s >= RECORD_EVERY_S:
                heard = lease.acknowledged | lease.late | lease.repeated
                assert position in heard or lease.granted.epoch not in self.state.leased.epochs

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot, self.since_snapshot = snapshot_to_json(self.state), len(self.stored)

    @rule(asleep_s=st.sampled_from([0.0, 1.0, 10 * LEASE_S]))
    def restart(self, asleep_s: float) -> None:
        """What was stored is all that is left."""
        self.state = snapshot_from_json(self.snapshot)
        for data in self.stored[self.since_snapshot :]:
            fold(self.state, record_from_json(data), 4, 8)
        self.now_s += asleep_s
        self.said.clear()
        self.twin.said.clear()
        # When it wrote last is not stored; no restart is over within the second.
        self.twin.recorded_at_s.clear()
        for lease in self.twin.leases.values():
            lease.runs_out_at_s = self.now_s + LEASE_S
        self.open_book()

    @invariant()
    def the_twin_agrees(self) -> None:
        leased = self.state.leased
        leased.validate()
        assert set(leased.blocks) == {n for n, lease in self.twin.leases.items() if lease.open}
        assert leased.samples_acknowledged == self.twin.acknowledged
        assert leased.samples_repeated == self.twin.repeated

    def teardown(self) -> None:
        """Whatever happened: a worker that goes on trains all that is left, each sample once."""
        self.record(WorkerAdmitted(WORKERS[0], self.state.incarnations.get(WORKERS[0], 0) + 1, "cpu"))
        self.wait(LEASE_S)
        for _ in range(len(self.twin.where) + 1):
            if not self.state.leased.epochs:
                break
            granted = self.book.grant(WORKERS[0], 8, SAMPLES, self.now_s)
            assert granted is not None
            whole = [(granted.first, granted.end)]
            assert self.book.report(WORKERS[0], granted.incarnation, granted.lease, whole, self.now_s) == ""
            self.wait(RECORD_EVERY_S)
        assert all(place == "done" for place in self.twin.where.values())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@dataclass
class Desk:
    state: Durable = field(default_factory=Durable)
    records: list[Record] = field(default_factory=list)

    def record(self, record: Record) -> None:
        fold(self.state, record, 4, 8)
        self.records.append(record)

    def book(self, now_s: float = 0.0) -> LeaseBook:
        state = self.state
        return LeaseBook(
            state.leased,
            state.incarnations,
            self.record,
            now_s=now_s,
            in_doubt=lambda worker_id, now_s: IN_FLIGHT,
        )


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    for worker in WORKERS:
        desk.record(WorkerAdmitted(worker, 1, "cpu"))
    return desk


def test_nonsense_is_refused_with_its_reason(desk: Desk) -> None:
    book = desk.book()
    granted = book.grant(WORKERS[0], 4, SAMPLES, 0.0)
    assert granted is not None
    assert "another worker's" in book.report(WORKERS[1], 1, granted.lease, [(0, 1)], 0.0)
    assert "another life" in book.report(WORKERS[0], 2, granted.lease, [(0, 1)], 0.0)
    assert "0 to 3 only" in book.report(WORKERS[0], 1, granted.lease, [(2, 5)], 0.0)
    assert "no lease 7" in book.report(WORKERS[0], 1, 7, [(0, 1)], 0.0)
    assert "no lease -1" in book.report(WORKERS[0], 1, -1, [(0, 1)], 0.0)
    assert "another worker's" in book.give_back(WORKERS[1], 1, granted.lease, 0, 0.0)
    book.due(5.0)
    assert desk.state.leased.samples_acknowledged == 0
    assert book.grant(WorkerId("stranger"), 4, SAMPLES, 0.0) is None


def test_a_block_outlives_an_outage_and_returns_when_its_lease_has_run_again(desk: Desk) -> None:
    granted = desk.book().grant(WORKERS[0], 4, SAMPLES, 0.0)
    assert granted is not None
    # The coordinator was away for longer than the lease; nobody could have reported.
    book = desk.book(now_s=5 * LEASE_S)
    book.due(6 * LEASE_S - 1.0)
    assert granted.lease in desk.state.leased.blocks
    book.due(6 * LEASE_S)
    assert granted.lease not in desk.state.leased.blocks
    assert desk.state.leased.samples_repeated == 0
    # What it trains after that, it reports; only what others have got meanwhile is trained twice.
    assert book.report(WORKERS[0], 1, granted.lease, [(0, 2)], 6 * LEASE_S) == ""
    book.due(6 * LEASE_S + 1.0)
    again = book.grant(WORKERS[1], 1, SAMPLES, 6 * LEASE_S + 1.0)
    assert again is not None
    assert (again.first, again.end) == (2, 3)
    assert desk.state.leased.samples_repeated == 1, "it may have been in flight"
    another = book.grant(WORKERS[1], 1, SAMPLES, 6 * LEASE_S + 1.0)
    assert another is not None
    assert (another.first, another.end) == (3, 4)
    assert desk.state.leased.samples_repeated == 1
    assert book.report(WORKERS[0], 1, granted.lease, [(2, 4)], 6 * LEASE_S + 2.0) == ""
    book.due(6 * LEASE_S + 3.0)
    assert desk.state.leased.samples_acknowledged == 2
    assert desk.state.leased.samples_repeated == 2


def test_a_replaced_life_is_fenced_and_what_it_had_in_flight_counts_when_it_is_leased_again(
    desk: Desk,
) -> None:
    book = desk.book()
    granted = book.grant(WORKERS[0], 6, SAMPLES, 0.0)
    assert granted is not None
    assert book.report(WORKERS[0], 1, granted.lease, [(0, 2)], 1.0) == ""
    desk.record(WorkerAdmitted(WORKERS[0], 2, "cpu"))
    book.due(1.1)
    # The report of its lifetime counts; of the other four at most three were in flight.
    assert desk.state.leased.samples_acknowledged == 2
    assert desk.state.leased.samples_repeated == 0
    again = book.grant(WORKERS[0], 6, SAMPLES, 3.0)
    assert again is not None
    assert (again.first, again.end, again.incarnation) == (2, 8, 2)
    assert desk.state.leased.samples_repeated == IN_FLIGHT
    assert book.report(WORKERS[0], 1, granted.lease, [(0, 6)], 4.0) == ""
    book.due(5.0)
    assert desk.state.leased.samples_acknowledged == 2
    assert desk.state.leased.samples_repeated == 4


def test_of_several_blocks_the_oldest_are_in_flight_and_only_what_is_begun_again_is_repeated(
    desk: Desk,
) -> None:
    book = desk.book()
    blocks = [book.grant(WORKERS[0], 2, SAMPLES, 0.0) for _ in range(3)]
    assert all(blocks)
    book.lost(WORKERS[0], "its machine burnt down", 1.0)
    returned = [r.in_doubt for r in desk.records if isinstance(r, LeaseBlockReturned)]
    assert returned == [2, 1, 0]
    assert book.grant(WORKERS[1], 6, SAMPLES, 1.0) is not None
    book.lost(WORKERS[1], "so did this one's, before it began", 1.0, in_doubt=0)
    assert book.grant(WORKERS[2], 6, SAMPLES, 1.0) is not None
    assert desk.state.leased.samples_repeated == IN_FLIGHT


def test_blocks_that_are_trained_to_their_ends_are_not_returned_with_others_of_their_worker(
    desk: Desk,
) -> None:
    """The return of the first one writes down that the second one is done."""
    for ending in ("lost", "a new life", "run out"):
        book, now_s = desk.book(), 0.0
        first, second = (book.grant(WORKERS[0], 1, SAMPLES, now_s) for _ in range(2))
        assert first is not None
        assert second is not None
        done = [(second.first, second.end)]
        assert book.report(WORKERS[0], second.incarnation, second.lease, done, now_s) == ""
        if ending == "lost":
            book.lost(WORKERS[0], "it was silent", now_s)
        elif ending == "a new life":
            desk.record(WorkerAdmitted(WORKERS[0], second.incarnation + 1, "cpu"))
            book.due(0.1)
        else:
            book.due(LEASE_S)
        assert not desk.state.leased.blocks, ending
    assert desk.state.leased.samples_acknowledged == 3
    assert [r.lease for r in desk.records if isinstance(r, LeaseBlockReturned)] == [0, 2, 4]


def test_two_late_reports_of_one_sample_do_not_both_count(desk: Desk) -> None:
    book = desk.book()
    for worker in WORKERS[:2]:
        granted = book.grant(worker, 4, SAMPLES, 0.0)
        assert granted is not None
        assert (granted.first, granted.end) == (0, 4)
        book.lost(worker, "it was silent", 0.0)
    assert book.report(WORKERS[0], 1, 0, [(0, 4)], 1.0) == ""
    assert book.report(WORKERS[1], 1, 1, [(0, 4)], 1.0) == ""
    # Reported, and not recorded yet: already nobody else's.
    granted = book.grant(WORKERS[2], 4, SAMPLES, 1.0)
    assert granted is not None
    assert granted.first == 4
    book.due(2.0)
    assert desk.state.leased.samples_acknowledged == 4
    assert desk.state.leased.samples_repeated == 4


def test_a_log_of_acknowledgements_stays_small(desk: Desk) -> None:
    """Ranges, one record a second: what a worker writes in a day does not depend on how fast it trains."""
    book, now_s = desk.book(), 0.0
    for _ in range(60):
        granted = book.grant(WORKERS[0], 512, 10**6, now_s)
        assert granted is not None
        for tenth in range(10):
            now_s += 0.1
            done = [(granted.first, granted.first + 51 * (tenth + 1))]
            assert book.report(WORKERS[0], 1, granted.lease, done, now_s) == ""
            book.due(now_s)
        rest = [(granted.first, granted.end)]
        assert book.report(WORKERS[0], 1, granted.lease, rest, now_s) == ""
    acknowledged = [r for r in desk.records if isinstance(r, SamplesAcknowledged)]
    assert 55 <= len(acknowledged) <= 61
    assert len(snapshot_to_json(desk.state)) < 2000


def test_a_hundred_workers_write_less_than_a_hundred_megabytes_a_day(desk: Desk) -> None:
    workers = [WorkerId(f"w{i:016x}") for i in range(100)]
    for worker in workers:
        desk.record(WorkerAdmitted(worker, 1, "cpu"))
    book, begun, now_s = desk.book(), len(desk.records), 0.0
    seconds = 120
    blocks = {worker: book.grant(worker, 5000, 10**6, 0.0) for worker in workers}
    for second in range(seconds):
        for worker, block in blocks.items():
            assert block is not None
            done = [(block.first, block.first + 40 * (second + 1))]
            assert book.report(worker, 1, block.lease, done, now_s) == ""
        now_s += 1.0
        book.due(now_s)
    written_bytes = sum(len(record_to_json(record)) for record in desk.records[begun:])
    assert written_bytes / seconds * 86400 < 100e6
    # What is not recorded yet is not much either.
    assert desk.state.leased.samples_acknowledged > 100 * 40 * (seconds - 2 * 100 / 8)
