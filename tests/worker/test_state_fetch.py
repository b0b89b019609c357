"""Blocks from several donors at once: spread, resumed, bounded; and what donors keep of the last steps."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable

import pytest

from starlings_protos import data_pb2
from starlings_protos.state_fetch import Donor, DonorBusy, DonorLacks, Fetcher, fetch_blocks
from starlings_protos.state_transfer import (
    BlockInbox,
    ServedBlock,
    StateTensor,
    StateTransferError,
    state_frames,
)
from starlings_worker.core.observing import STEPS_BEHIND_AT_MOST
from starlings_worker.history import History, Part
from starlings_worker.serving import NotHeld, NotYet

_NAMES = [f"layers.{i}" for i in range(8)]


def _block(name: str, version: int = 3) -> ServedBlock:
    rng = random.Random(f"{name} {version}")
    tensors = [
        StateTensor(f"param:{k}", "F32", (200_000,), memoryview(rng.randbytes(800_000))) for k in "abc"
    ]
    return ServedBlock(version, name, tensors)


_BLOCKS = {name: _block(name) for name in _NAMES}
_BYTES = 3 * 800_000


class _Peer:
    """A donor whose frames pass through `change(number of all its frames, frame)`."""

    def __init__(self, name: str, change: Callable[[int, data_pb2.Frame], None] = lambda *_: None) -> None:
        self.name, self.change = name, change
        self.frames = 0
        self.sent_bytes = 0
        self.offsets: list[int] = []

    async def open(self, request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
        if request.version != 3:
            raise DonorLacks(f"version {request.version} is not kept here")
        self.offsets.append(request.offset)
        for frame in state_frames([_BLOCKS[request.blocks[0]]], request.offset):
            self.change(self.frames, frame)
            self.frames += 1
            self.sent_bytes += len(frame.chunk)
            yield frame

    @property
    def donor(self) -> Donor:
        return Donor(self.name, self.open)


async def _fetch(donors: list[Donor], *, in_place: bool = True, at_once: int = 3) -> dict[str, bytes]:
    """All blocks, as the bytes that ended in place."""
    memory = {name: [bytearray(800_000) for _ in "abc"] for name in _NAMES}
    fetcher = Fetcher(lambda: donors, 3, True, 64 << 20, random.Random(1), lambda *_: None)
    got: dict[str, bytes] = {}

    async def done(name: str, inbox: BlockInbox) -> None:
        data = [t.data for t in inbox.tensors().values()]
        got[name] = b"".join(map(bytes, data))
        if in_place:
            assert got[name] == b"".join(memory[name])

    place = (lambda name: lambda _: [memoryview(b) for b in memory[name]]) if in_place else lambda _: None
    await fetch_blocks(fetcher, _NAMES, place, done, at_once=at_once)
    return got


def _right(got: dict[str, bytes]) -> bool:
    return got == {name: b"".join(bytes(t.data) for t in b.tensors) for name, b in _BLOCKS.items()}


async def test_the_load_is_spread_over_the_donors_and_nothing_is_fetched_twice() -> None:
    peers = [_Peer("a"), _Peer("b"), _Peer("c")]
    assert _right(await _fetch([p.donor for p in peers]))
    assert sum(p.sent_bytes for p in peers) == 8 * _BYTES
    assert all(p.sent_bytes >= 2 * _BYTES for p in peers)


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_donor_that_dies_after_70_percent_costs_nothing_but_its_last_chunks(in_place: bool) -> None:
    total_frames = sum(1 for b in _BLOCKS.values() for _ in state_frames([b]))

    def dies(number: int, frame: data_pb2.Frame) -> None:
        if number >= 0.7 * total_frames:
            raise ConnectionError("the donor died")

    dying, other = _Peer("a", dies), _Peer("b")
    spare = Donor("b", other.open, last_resort=True)
    assert _right(await _fetch([dying.donor, spare], in_place=in_place))
    assert dying.sent_bytes + other.sent_bytes == 8 * _BYTES
    assert any(offset > 0 for offset in other.offsets), "it went on in the middle of a block"


async def test_a_flipped_byte_costs_one_tensor() -> None:
    def flips(number: int, frame: data_pb2.Frame) -> None:
        if number == 2:
            frame.chunk = bytes([frame.chunk[0] ^ 1]) + frame.chunk[1:]

    peer = _Peer("a", flips)
    assert _right(await _fetch([peer.donor], at_once=1))
    assert 0 < peer.sent_bytes - 8 * _BYTES <= 800_000


async def test_a_donor_of_another_version_or_span_is_not_taken_for_one() -> None:
    async def stale(request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
        for frame in state_frames([_block(request.blocks[0], version=2)], request.offset):
            yield frame

    async def lacks(request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
        raise DonorLacks("version 3 is not kept here")
        yield data_pb2.Frame()

    fresh = _Peer("fresh")
    elsewhere = Donor("elsewhere", _Peer("x").open, may_have=lambda _: False)
    assert _right(await _fetch([Donor("stale", stale), Donor("lacks", lacks), elsewhere, fresh.donor]))
    assert fresh.sent_bytes == 8 * _BYTES
    with pytest.raises(StateTransferError, match="no donor has layers"):
        await _fetch([Donor("stale", stale), Donor("lacks", lacks)])


async def test_a_busy_donor_is_asked_again() -> None:
    peer, calls = _Peer("a"), 0

    async def busy_at_first(request: data_pb2.StateRequest) -> AsyncIterator[data_pb2.Frame]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise DonorBusy("step 2 is not applied here yet")
        async for frame in peer.open(request):
            yield frame

    assert _right(await _fetch([Donor("a", busy_at_first)], at_once=1))


def _update(size: int) -> dict[str, list[Part]]:
    return {"stage:0": [Part(0, size, "exact", bytes(4 * size))]}


def test_history_is_bounded_in_steps_and_bytes_the_oldest_goes_first() -> None:
    history = History()
    history.keep(0)
    for step in range(STEPS_BEHIND_AT_MOST + 6):
        history.record(step, _update(10), 1 << 20)
        history.applied(step + 1)
    assert history.steps == tuple(range(6, STEPS_BEHIND_AT_MOST + 6))
    history.record(70, _update(1000), 10_000)
    history.record(71, _update(1000), 10_000)
    history.record(72, _update(1000), 10_000)
    assert history.steps == (71, 72)
    with pytest.raises(NotHeld, match="there are: 71 to 72"):
        history.serve(70, "stage:0")


def test_what_is_not_applied_yet_is_not_served_and_not_gone() -> None:
    history = History()
    history.keep(4)
    assert not history.wants(3)
    history.record(4, _update(10), 1 << 20)
    history.applied(5)
    assert history.serve(5, "stage:0").tensors[0].name == "0:0:10:exact"
    with pytest.raises(NotYet):
        history.serve(6, "stage:0")
    with pytest.raises(NotHeld):
        history.serve(5, "stage:1")


def test_nobody_asking_ends_it_two_steps_later() -> None:
    history = History()
    history.keep(0)
    history.keep(None)
    for step in range(2):
        assert history.wants(step)
        history.record(step, _update(10), 1 << 20)
        history.applied(step + 1)
    assert not history.wants(2)
    assert history.steps == (0, 1)
    history.applied(3)
    assert history.steps == ()
