"""The relay's decisions: order, credit, bounds, turns, ends; random traffic with the invariants checked throughout."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from starlings_protos.pacing import ByteBucket, ByteRate
from starlings_protos.relay.core import (
    WINDOW_LEAST_BYTES,
    RelayCore,
    RelayFull,
    RelayLimits,
    TunnelFault,
    window_bytes,
)
from starlings_protos.relay.frames import (
    BEAT_S,
    CHUNK_BYTES,
    SILENT_S,
    Beat,
    BytesCarried,
    ConnectionEnded,
    ConnectionOpened,
    CreditGranted,
    TunnelFrame,
    TunnelOpened,
)

A, B, C = "w" + "a" * 16, "w" + "b" * 16, "w" + "c" * 16
DIALS, LISTENS = TunnelOpened(), TunnelOpened(listens=True)


def drained(core: RelayCore, tunnel: int, now_s: float = 0.0) -> list[TunnelFrame]:
    frames = []
    while (frame := core.next_frame(tunnel, now_s)) is not None:
        core.validate()
        frames.append(frame)
    return frames


def connected(limits: RelayLimits | None = None, credit: int = 1 << 20) -> tuple[RelayCore, int, int, int]:
    """A core in which A has opened connection 1 to B: (core, A's tunnel, B's tunnel, A's window)."""
    core = RelayCore(limits or RelayLimits(), 0.0)
    near, far = core.attach(A, DIALS, 0.0), core.attach(B, LISTENS, 0.0)
    core.received(near, ConnectionOpened(1, B, credit), 0.0)
    opened, granted = drained(core, near)
    assert opened == TunnelOpened()
    assert isinstance(granted, CreditGranted)
    assert drained(core, far) == [TunnelOpened(), ConnectionOpened(1, A, granted.byte_count)]
    core.received(far, CreditGranted(1, credit), 0.0)
    return core, near, far, granted.byte_count


def test_bytes_arrive_in_order_both_ways() -> None:
    core, near, far, _ = connected()
    for chunk in (b"one", b"two"):
        core.received(near, BytesCarried(1, chunk), 0.0)
    core.received(far, BytesCarried(1, b"back"), 0.0)
    assert set(core.take_awake()) == {near, far}
    assert drained(core, far) == [BytesCarried(1, b"one"), BytesCarried(1, b"two")]
    assert drained(core, near) == [BytesCarried(1, b"back")]
    assert core.carried_bytes == 10


def test_a_sender_is_granted_again_what_has_left_and_no_more_than_its_window_waits() -> None:
    core, near, far, window = connected(credit=0)
    sent = 0
    while sent < window:
        core.received(near, BytesCarried(1, b"x" * min(CHUNK_BYTES, window - sent)), 0.0)
        sent += min(CHUNK_BYTES, window - sent)
    assert drained(core, far) == []
    assert core.waiting_bytes == window
    with pytest.raises(TunnelFault, match="credit"):
        core.received(near, BytesCarried(1, b"x"), 0.0)
    core.received(far, CreditGranted(1, window // 4 + 5), 0.0)
    assert sum(len(f.chunk) for f in drained(core, far) if isinstance(f, BytesCarried)) == window // 4 + 5
    (granted,) = drained(core, near)
    assert isinstance(granted, CreditGranted)
    assert granted.byte_count >= window // 4


def test_a_receiver_that_does_not_read_holds_up_nobody_else() -> None:
    core, near, far, _ = connected(credit=0)
    core.received(near, ConnectionOpened(2, B, 1 << 20), 0.0)
    drained(core, near), drained(core, far)
    core.received(far, CreditGranted(2, 1 << 20), 0.0)
    core.received(near, BytesCarried(1, b"stuck"), 0.0)
    core.received(near, BytesCarried(2, b"flows"), 0.0)
    assert drained(core, far) == [BytesCarried(2, b"flows")]


def test_connections_of_a_tunnel_take_turns() -> None:
    core, near, far, _ = connected()
    core.received(near, ConnectionOpened(2, B, 1 << 20), 0.0)
    drained(core, near), drained(core, far)
    core.received(far, CreditGranted(2, 1 << 20), 0.0)
    for connection in (1, 1, 1, 2, 2, 2):
        core.received(near, BytesCarried(connection, b"x"), 0.0)
    order = [f.connection for f in drained(core, far) if isinstance(f, BytesCarried)]
    assert order == [1, 2, 1, 2, 1, 2]


def test_what_was_sent_before_the_end_is_delivered_before_it() -> None:
    core, near, far, _ = connected()
    core.received(near, BytesCarried(1, b"last"), 0.0)
    core.received(near, ConnectionEnded(1, "done"), 0.0)
    core.validate()
    assert drained(core, far) == [BytesCarried(1, b"last"), ConnectionEnded(1, "done")]
    assert core.connections == 0
    # What crosses the end is nobody's fault.
    core.received(far, BytesCarried(1, b"late"), 0.0)
    core.received(far, ConnectionEnded(1), 0.0)
    assert drained(core, near) == []


def test_a_lost_tunnel_ends_its_connections_and_frees_their_memory() -> None:
    core, near, far, _ = connected()
    core.detach(far)
    core.validate()
    (ended,) = drained(core, near)
    assert isinstance(ended, ConnectionEnded)
    assert B in ended.reason
    assert (core.connections, core.waiting_bytes, core.listeners) == (0, 0, ())
    core.received(near, ConnectionOpened(2, B), 0.0)
    assert drained(core, near) == [ConnectionEnded(2, f"{B} has no tunnel here")]


def test_the_newest_tunnel_of_a_listener_takes_new_connections() -> None:
    core, near, _, _ = connected()
    newest = core.attach(B, LISTENS, 1.0)
    core.received(near, ConnectionOpened(2, B, 10), 1.0)
    assert any(isinstance(f, ConnectionOpened) for f in drained(core, newest))


def test_silence_ends_a_tunnel_and_beats_keep_it() -> None:
    core, near, far, _ = connected()
    for turn in range(1, 6):
        core.received(far, Beat(), turn * BEAT_S)
        assert core.tick(turn * BEAT_S) == (() if turn * BEAT_S <= SILENT_S else (near,))
    assert Beat() in drained(core, far)
    assert core.tunnel_count == 1


def test_limits_are_named() -> None:
    core = RelayCore(RelayLimits(tunnels=2, tunnels_per_worker=1), 0.0)
    core.attach(A, DIALS, 0.0)
    with pytest.raises(RelayFull, match=A):
        core.attach(A, DIALS, 0.0)
    core.attach(B, LISTENS, 0.0)
    with pytest.raises(RelayFull, match="2 tunnels"):
        core.attach(C, LISTENS, 0.0)
    core, near, _, _ = connected(RelayLimits(connections_per_tunnel=1))
    core.received(near, ConnectionOpened(2, B), 0.0)
    assert [f for f in drained(core, near) if isinstance(f, ConnectionEnded)]


def test_the_pool_bounds_what_waits_whatever_is_opened() -> None:
    limits = RelayLimits(buffer_bytes=4 * WINDOW_LEAST_BYTES, connections_per_tunnel=100)
    core, near, _, _ = connected(limits, credit=0)
    for number in range(2, 20):
        core.received(near, ConnectionOpened(number, B), 0.0)
        core.validate()
    refused = [f for f in drained(core, near) if isinstance(f, ConnectionEnded)]
    assert len(refused) == 17
    assert "memory" in refused[0].reason


@pytest.mark.parametrize(
    "frame",
    [
        ConnectionOpened(1, B),
        TunnelOpened(),
        BytesCarried(1, b""),
        BytesCarried(1, b"x" * (CHUNK_BYTES + 1)),
        CreditGranted(1, 1 << 40),
    ],
)
def test_broken_rules_close_the_tunnel(frame: TunnelFrame) -> None:
    core, near, _, _ = connected()
    with pytest.raises(TunnelFault):
        core.received(near, frame, 0.0)


def test_a_listener_opens_nothing() -> None:
    core, _, far, _ = connected()
    with pytest.raises(TunnelFault):
        core.received(far, ConnectionOpened(7, A), 0.0)


def test_a_cap_is_kept_over_time() -> None:
    rate = ByteRate(1e6, 50_000)
    core, near, far, _ = connected(RelayLimits(rate=rate))
    now_s, got = 0.0, 0
    while now_s < 5.0:
        core.received(far, CreditGranted(1, 10_000), now_s)
        for frame in drained(core, near, now_s):
            if isinstance(frame, CreditGranted):
                pass
        try:
            core.received(near, BytesCarried(1, b"x" * 10_000), now_s)
        except TunnelFault:
            break
        got += sum(len(f.chunk) for f in drained(core, far, now_s) if isinstance(f, BytesCarried))
        now_s += max(0.001, core.pause_s(now_s))
    assert got <= rate.burst_bytes + 1e6 * now_s + 10_000
    assert got >= 0.9e6 * now_s


def test_a_bucket_passes_its_rate_and_a_burst() -> None:
    bucket, now_s, passed = ByteBucket(ByteRate(1000.0, 100.0), 0.0), 0.0, 0
    while now_s < 100.0:
        if (wait_s := bucket.wait_s(now_s)) > 0:
            now_s += wait_s
            continue
        bucket.take(350, now_s)
        passed += 350
    assert 100_000 <= passed <= 100_000 + 100 + 350
    assert ByteBucket(ByteRate(), 0.0).wait_s(0.0) == 0.0


def test_windows_shrink_with_what_is_free() -> None:
    assert window_bytes(0) == WINDOW_LEAST_BYTES
    assert window_bytes(1 << 40) == 1 << 20


class _Ends:
    """Both ends' processes: they obey credit, and remember what they sent and got, by (tunnel, connection)."""

    def __init__(self, core: RelayCore) -> None:
        self.core = core
        self.live: set[tuple[int, int]] = set()
        self.credit: dict[tuple[int, int], int] = defaultdict(int)
        self.sent: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.got: dict[tuple[int, int], bytes] = defaultdict(bytes)

    def send(self, end: tuple[int, int], chunk: bytes) -> None:
        self.credit[end] -= len(chunk)
        self.sent[end] += chunk
        self.core.received(end[0], BytesCarried(end[1], chunk), 0.0)

    def hear(self, tunnel: int, frame: TunnelFrame | None) -> None:
        match frame:
            case ConnectionOpened():
                self.live.add((tunnel, frame.connection))
                self.credit[tunnel, frame.connection] += frame.credit_bytes
                self.core.received(tunnel, CreditGranted(frame.connection, 7000), 0.0)
            case CreditGranted():
                self.credit[tunnel, frame.connection] += frame.byte_count
            case BytesCarried():
                self.got[tunnel, frame.connection] += frame.chunk
                self.core.received(tunnel, CreditGranted(frame.connection, len(frame.chunk)), 0.0)
            case ConnectionEnded():
                self.live.discard((tunnel, frame.connection))
            case _:
                pass


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_keeps_order_and_bounds(seed: int) -> None:
    rng = random.Random(seed)
    core = RelayCore(RelayLimits(), 0.0)
    dialing, listening = core.attach(A, DIALS, 0.0), core.attach(B, LISTENS, 0.0)
    ends, opened = _Ends(core), 0
    for _ in range(500):
        match rng.randrange(6):
            case 0 if opened < 12:
                opened += 1
                ends.live.add((dialing, opened))
                core.received(dialing, ConnectionOpened(opened, B, 5000), 0.0)
            case 1 | 2 if ends.live:
                end = rng.choice(sorted(ends.live))
                if size := min(ends.credit[end], rng.randrange(1, 40_000)):
                    ends.send(end, rng.randbytes(size))
            case 3 if ends.live and rng.random() < 0.1:
                end = rng.choice(sorted(ends.live))
                ends.live.discard(end)
                core.received(end[0], ConnectionEnded(end[1]), 0.0)
            case _:
                tunnel = rng.choice((dialing, listening))
                ends.hear(tunnel, core.next_frame(tunnel, 0.0))
        core.validate()
    # None was refused, so a connection has the same number in both tunnels.
    for number in range(1, opened + 1):
        assert ends.sent[dialing, number].startswith(ends.got[listening, number])
        assert ends.sent[listening, number].startswith(ends.got[dialing, number])
    assert any(ends.got.values())
    core.detach(dialing)
    core.detach(listening)
    core.validate()
    assert (core.connections, core.waiting_bytes, core.tunnel_count) == (0, 0, 0)
