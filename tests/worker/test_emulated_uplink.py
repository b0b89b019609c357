"""An emulated uplink paces what leaves, in order, at its rate; and compute of a fixed length takes that long."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_protos import data_pb2, frames
from starlings_protos.messages import LeaseKind, MicrobatchHeader, MicrobatchKey, Peer, WorkerId
from starlings_worker import emulation
from starlings_worker.emulation import BACKWARD_PART, FORWARD_PART, Throttle
from starlings_worker.links import Links
from starlings_worker.meters import Meters
from starlings_worker.uplink import BURST_S, HEADERS_FACTOR, LinkClass, Uplink, parse_link
from support.peer_servers import Certificates, peer_server, take


class Clock:
    """Sleeping takes as long as it says and nothing else takes any time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20Mbit/s,40ms", LinkClass(2.5e6, 0.04)),
        (" 1.5 gbit/s ", LinkClass(187.5e6, 0.0)),
        ("800kbit/s, 0.2s", LinkClass(1e5, 0.2)),
    ],
)
def test_links_are_read(text: str, expected: LinkClass) -> None:
    found = parse_link(text)
    assert found.bytes_per_s == pytest.approx(expected.bytes_per_s)
    assert found.delay_s == pytest.approx(expected.delay_s)


@pytest.mark.parametrize(
    "text", ["", "20", "20MB/s", "0Mbit/s", "-1Mbit/s", "20Mbit/s,40", "20Mbit/s 40ms", "1e9kbit/s"]
)
def test_what_is_no_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20Mbit/s,40ms"):
        parse_link(text)


@pytest.mark.parametrize("piece", [1000, 64 << 10, 1 << 20])
async def test_a_cap_counts_what_headers_add(piece: int) -> None:
    """In 30 s no more than the cap leaves, with 5 % of headers on top of what is sent, and not much less."""
    clock = Clock()
    uplink = Uplink(cap_bytes_per_s=5e6, clock=lambda: clock.now_s, sleep=clock.sleep)
    sent = 0
    while clock.now_s < 30.0:
        await uplink.leaves(piece)
        sent += piece
    assert 0.98 * 5e6 * clock.now_s <= sent * HEADERS_FACTOR <= 1.02 * 5e6 * clock.now_s


async def test_the_slower_of_cap_and_emulated_link_counts() -> None:
    clock = Clock()
    uplink = Uplink(LinkClass(1e6), 5e6, lambda: clock.now_s, clock.sleep)
    for _ in range(10):
        await uplink.leaves(1_000_000)
    assert clock.now_s == pytest.approx(10.0, abs=0.1)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 1 << 20)), min_size=1, max_size=50),
    st.floats(1e4, 1e9),
)
def test_nothing_leaves_faster_than_the_uplink(transfers: list[tuple[float, int]], rate: float) -> None:
    """Any run of transfers takes as long as its bytes take, but for what a pause has left in the bucket."""
    clock = Clock()
    uplink = Uplink(LinkClass(rate), clock=lambda: clock.now_s, sleep=clock.sleep)

    async def send() -> list[tuple[float, float, int]]:
        done = []
        for pause_s, size_bytes in transfers:
            clock.now_s += pause_s
            begin_s = clock.now_s
            await uplink.leaves(size_bytes)
            done.append((begin_s, clock.now_s, size_bytes))
        return done

    done = asyncio.run(send())
    for first in range(len(done)):
        total_bytes = sum(size for _, _, size in done[first:])
        assert done[-1][1] - done[first][0] >= total_bytes / rate - BURST_S - 1e-6
    # And no slower than it must be.
    for begin_s, end_s, size_bytes in done:
        assert end_s - begin_s <= size_bytes / rate + 1e-6


def test_without_a_class_nothing_waits() -> None:
    async def never(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s")

    async def send() -> None:
        uplink = Uplink(sleep=never)
        await uplink.leaves(1 << 40)
        await uplink.travels()

    asyncio.run(send())


async def test_a_push_takes_its_way_there_its_bytes_and_its_way_back() -> None:
    """300 KB at 1 MB/s, 50 ms one way, on a real connection; two at once share the uplink."""
    certificates = Certificates()
    peer = certificates.worker()
    key = MicrobatchKey(LeaseKind.TRAIN, 0, 0, 0)
    size = 300_000
    tensor = frames.tensor_header("gradient", data_pb2.DATA_TYPE_UINT8, (size,), size)
    header = frames.make_header(MicrobatchHeader(key, 1, (), 1.0, 1), [tensor])
    async with peer_server(peer, take) as address:
        links = Links(certificates.worker(), Meters(), uplink=Uplink(LinkClass(1e6, 0.05)))
        links.update([Peer(WorkerId(peer.id), (address,), incarnation=3)])
        await links.connect(WorkerId(peer.id))
        begin_s = time.monotonic()
        await asyncio.gather(
            *(
                links.push(WorkerId(peer.id), "Forward", header, [bytes(size)], kind="forward")
                for _ in range(2)
            )
        )
        took_s = time.monotonic() - begin_s
        await links.close()
    assert took_s >= 2 * size / 1e6 + 2 * 0.05 - BURST_S


class Time:
    """As the module, but nothing takes any time except sleeping and `now_s += ...`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    thread_time = monotonic

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def test_a_pass_of_fixed_length_takes_that_long_in_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    time_ = Time()
    monkeypatch.setattr(emulation, "time", time_)
    throttle = Throttle(0.0, time_.monotonic, pass_s=0.06)
    with throttle.block(FORWARD_PART):
        time_.now_s += 0.003
    assert time_.now_s == pytest.approx(0.02)
    # What is no part of a pass, such as an optimizer's step, is as long as it is.
    with throttle.block():
        time_.now_s += 0.1
    assert time_.now_s == pytest.approx(0.12)
    # Who was late makes up for it, but not for more than a pass.
    with throttle.block(BACKWARD_PART):
        time_.now_s += 0.05
    with throttle.block(FORWARD_PART):
        pass
    assert time_.now_s == pytest.approx(0.18)
    with throttle.block(BACKWARD_PART):
        time_.now_s += 10
    for _ in range(3):
        with throttle.block(BACKWARD_PART):
            pass
    assert time_.now_s == pytest.approx(0.18 + 10 + 3 * 0.04 - 0.06)
