"""What a relay decides, without sockets and clocks: who is connected to whom, and which frame goes out next.

    attach, detach      a tunnel came or went
    received            a frame came out of a tunnel
    next_frame          what to write into a tunnel now; asked until it says None
    take_awake          tunnels that have something to send since the last time

Flow control is by credit, hop by hop and per connection: the relay grants each end a window and grants again what has
left its buffers, and sends what the other end has granted. So what waits here is never more than the windows, which
come out of one pool (`RelayLimits.buffer_bytes`), and a slow receiver stops its own sender and nobody else's. Within
a tunnel the connections take turns, chunk by chunk (chunks are of about one size), after credit and beats.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from starlings_protos.pacing import ByteBucket, ByteRate
from starlings_protos.relay.frames import (
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

WINDOW_LEAST_BYTES = 64 << 10
WINDOW_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What one relay takes on."""

    # All tunnels, and those of one worker: an engine that dials, a supervisor that listens, and their successors.
    tunnels: int = 4096
    tunnels_per_worker: int = 6
    # Through one tunnel: one for each peer that is met there.
    connections_per_tunnel: int = 512
    # All windows together: what the relay's memory holds at most.
    buffer_bytes: int = 128 << 20
    # What it passes on: 0 = without limit.
    rate: ByteRate = field(default=ByteRate())


class RelayFull(Exception):
    """No room for another tunnel; the message says which limit."""


class TunnelFault(Exception):
    """The other side of a tunnel broke the rules; the tunnel must be closed."""


def window_bytes(free_bytes: int) -> int:
    """The window of a new connection's end: a 32nd of what is free, so that the first ones are fast and many fit."""
    return max(WINDOW_LEAST_BYTES, min(WINDOW_MOST_BYTES, free_bytes // 32))


@dataclass(slots=True, eq=False)
class _End:
    """One end of a connection, as the relay sees it."""

    tunnel: _Tunnel
    number: int
    # What this end may have on the way to us or waiting here.
    window_bytes: int
    # How much of it may still come.
    may_come_bytes: int
    # How much this end has granted us.
    credit_bytes: int = 0
    # Waits to be sent to this end.
    waiting: deque[bytes] = field(default_factory=deque)
    # Of the pool: its own window, and after the other end's end also what of that may still wait here.
    charged_bytes: int = 0
    # Has left us for the other end, and is not granted again yet.
    owed_bytes: int = 0
    # The other end has closed: said once `waiting` is sent.
    closing: str | None = None
    other: _End | None = None


@dataclass(slots=True, eq=False)
class _Tunnel:
    number: int
    worker_id: str
    listens: bool
    heard_at_s: float
    # Small frames, which go before bytes.
    first: deque[TunnelFrame] = field(default_factory=deque)
    ends: dict[int, _End] = field(default_factory=dict)
    # Ends that may have something to send, in their turn.
    turn: deque[_End] = field(default_factory=deque)
    next_connection: int = 1
    highest: int = 0


class RelayCore:
    def __init__(self, limits: RelayLimits, now_s: float) -> None:
        self._limits = limits
        self._tunnels: dict[int, _Tunnel] = {}
        # The newest that listens for a worker gets its connections; others go on with theirs.
        self._listening: dict[str, list[_Tunnel]] = {}
        self._free_bytes = limits.buffer_bytes
        self._awake: set[int] = set()
        self._next_tunnel = 1
        self._bucket = ByteBucket(limits.rate, now_s)
        self.carried_bytes = 0
        self.connections = 0

    # ---------------------------------------------------------------- tunnels

    def attach(self, worker_id: str, opened: TunnelOpened, now_s: float) -> int:
        """A tunnel of that worker (or of the keeper); returns its number.

        Raises:
            RelayFull: too many are open.
        """
        if len(self._tunnels) >= self._limits.tunnels:
            raise RelayFull(f"{len(self._tunnels)} tunnels are open here already")
        if sum(t.worker_id == worker_id for t in self._tunnels.values()) >= self._limits.tunnels_per_worker:
            raise RelayFull(f"{worker_id} has {self._limits.tunnels_per_worker} tunnels here already")
        tunnel = _Tunnel(self._next_tunnel, worker_id, opened.listens, now_s)
        self._next_tunnel += 1
        self._tunnels[tunnel.number] = tunnel
        if opened.listens:
            self._listening.setdefault(worker_id, []).append(tunnel)
        self._say(tunnel, TunnelOpened())
        return tunnel.number

    def detach(self, number: int) -> None:
        """A tunnel is gone: its connections end at their other ends."""
        tunnel = self._tunnels.pop(number, None)
        if tunnel is None:
            return
        listening = self._listening.get(tunnel.worker_id, [])
        if tunnel in listening:
            listening.remove(tunnel)
            if not listening:
                del self._listening[tunnel.worker_id]
        for end in list(tunnel.ends.values()):
            self._close(end, f"the tunnel of {tunnel.worker_id} ended")
        self._awake.discard(number)

    def detach_worker(self, worker_id: str) -> tuple[int, ...]:
        """Of one whose certificate was revoked; returns the tunnels to close."""
        numbers = tuple(t.number for t in self._tunnels.values() if t.worker_id == worker_id)
        for number in numbers:
            self.detach(number)
        return numbers

    def tick(self, now_s: float) -> tuple[int, ...]:
        """Every `BEAT_S`: a beat into each tunnel. Returns those that were silent for too long, detached."""
        silent = [t.number for t in self._tunnels.values() if now_s - t.heard_at_s > SILENT_S]
        for number in silent:
            self.detach(number)
        for tunnel in self._tunnels.values():
            if not tunnel.first or not isinstance(tunnel.first[-1], Beat):
                self._say(tunnel, Beat())
        return tuple(silent)

    @property
    def listeners(self) -> tuple[str, ...]:
        """Who can be reached through this relay."""
        return tuple(sorted(self._listening))

    @property
    def tunnel_count(self) -> int:
        return len(self._tunnels)

    @property
    def waiting_bytes(self) -> int:
        """What waits in the buffers."""
        return sum(len(c) for t in self._tunnels.values() for e in t.ends.values() for c in e.waiting)

    # ---------------------------------------------------------------- frames

    def received(self, number: int, frame: TunnelFrame, now_s: float) -> None:
        """A frame that came out of a tunnel.

        Raises:
            TunnelFault: it breaks the rules.
        """
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return
        tunnel.heard_at_s = now_s
        match frame:
            case Beat():
                pass
            case ConnectionOpened():
                self._open(tunnel, frame)
            case CreditGranted():
                if (end := tunnel.ends.get(frame.connection)) is not None:
                    end.credit_bytes += frame.byte_count
                    if end.credit_bytes > WINDOW_MOST_BYTES * 16:
                        raise TunnelFault("more credit than anybody has buffers for")
                    self._may_send(end)
            case BytesCarried():
                # Of a connection that has just ended here: it crossed our word of it.
                if (end := tunnel.ends.get(frame.connection)) is not None:
                    self._carry(end, frame.chunk)
            case ConnectionEnded():
                if (end := tunnel.ends.pop(frame.connection, None)) is not None:
                    self._forget(end, frame.reason)
            case TunnelOpened():
                raise TunnelFault("a tunnel is opened once")

    def next_frame(self, number: int, now_s: float) -> TunnelFrame | None:
        """What to write into a tunnel; None when there is nothing, or nothing yet (see `pause_s`)."""
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return None
        if tunnel.first:
            return tunnel.first.popleft()
        while tunnel.turn:
            end = tunnel.turn[0]
            if not end.waiting and end.closing is not None and end.number in tunnel.ends:
                tunnel.turn.popleft()
                del tunnel.ends[end.number]
                self._release(end)
                return ConnectionEnded(end.number, end.closing)
            if end.number not in tunnel.ends or not end.waiting or end.credit_bytes <= 0:
                tunnel.turn.popleft()
                continue
            if self.pause_s(now_s) > 0:
                return None
            tunnel.turn.popleft()
            chunk = end.waiting.popleft()
            if len(chunk) > end.credit_bytes:
                end.waiting.appendleft(chunk[end.credit_bytes :])
                chunk = chunk[: end.credit_bytes]
            end.credit_bytes -= len(chunk)
            self._bucket.take(len(chunk), now_s)
            self.carried_bytes += len(chunk)
            self._may_send(end)
            if end.other is not None:
                self._owe(end.other, len(chunk))
            return BytesCarried(end.number, chunk)
        return None

    def pause_s(self, now_s: float) -> float:
        """How long the relay's own cap forbids to pass bytes on."""
        return self._bucket.wait_s(now_s)

    def take_awake(self) -> tuple[int, ...]:
        """Tunnels to ask for their next frame, since this was called last."""
        awake, self._awake = self._awake, set()
        return tuple(sorted(awake))

    # ---------------------------------------------------------------- connections

    def _open(self, tunnel: _Tunnel, frame: ConnectionOpened) -> None:
        if tunnel.listens:
            raise TunnelFault("a tunnel that listens opens no connections")
        if frame.connection <= tunnel.highest:
            raise TunnelFault("a connection's number was used before")
        tunnel.highest = frame.connection
        if reason := self._why_not(tunnel, frame.worker_id):
            self._say(tunnel, ConnectionEnded(frame.connection, reason))
            return
        target = self._listening[frame.worker_id][-1]
        window = window_bytes(self._free_bytes)
        self._free_bytes -= 2 * window
        self.connections += 1
        near = _End(tunnel, frame.connection, window, window, frame.credit_bytes, charged_bytes=window)
        far = _End(target, target.next_connection, window, window, charged_bytes=window)
        target.next_connection += 1
        near.other, far.other = far, near
        tunnel.ends[near.number], target.ends[far.number] = near, far
        self._say(tunnel, CreditGranted(near.number, window))
        self._say(target, ConnectionOpened(far.number, tunnel.worker_id, window))

    def _why_not(self, tunnel: _Tunnel, worker_id: str) -> str:
        if worker_id not in self._listening:
            return f"{worker_id} has no tunnel here"
        target = self._listening[worker_id][-1]
        most = self._limits.connections_per_tunnel
        if len(tunnel.ends) >= most or len(target.ends) >= most:
            return f"{most} connections go through one tunnel already"
        if self._free_bytes < 2 * WINDOW_LEAST_BYTES:
            return "the relay has no memory left for another connection"
        return ""

    def _carry(self, end: _End, chunk: bytes) -> None:
        if not 0 < len(chunk) <= CHUNK_BYTES:
            raise TunnelFault(f"a chunk of {len(chunk)} bytes")
        if len(chunk) > end.may_come_bytes:
            raise TunnelFault("more bytes than there was credit for")
        end.may_come_bytes -= len(chunk)
        if end.other is None:
            self._owe(end, len(chunk))
            return
        end.other.waiting.append(chunk)
        self._may_send(end.other)

    def _owe(self, end: _End, byte_count: int) -> None:
        """So many of this end's bytes have left: granted again in portions of a quarter window."""
        end.owed_bytes += byte_count
        if end.owed_bytes >= end.window_bytes // 4 and end.number in end.tunnel.ends:
            end.may_come_bytes += end.owed_bytes
            self._say(end.tunnel, CreditGranted(end.number, end.owed_bytes))
            end.owed_bytes = 0

    def _may_send(self, end: _End) -> None:
        if (end.waiting and end.credit_bytes > 0) or (end.closing is not None and not end.waiting):
            if end not in end.tunnel.turn:
                end.tunnel.turn.append(end)
            self._awake.add(end.tunnel.number)

    def _forget(self, end: _End, reason: str) -> None:
        """An end has closed: what it sent is still delivered, then the other end hears of it."""
        end.waiting.clear()
        other, end.other = end.other, None
        if other is None:
            self._release(end)
            return
        other.other = None
        other.charged_bytes += end.charged_bytes
        other.closing = reason
        self._may_send(other)

    def _close(self, end: _End, reason: str) -> None:
        """An end is gone with its tunnel."""
        end.tunnel.ends.pop(end.number, None)
        self._forget(end, reason)

    def _release(self, end: _End) -> None:
        """The second end of a connection is gone."""
        self._free_bytes += end.charged_bytes
        self.connections -= 1

    def _say(self, tunnel: _Tunnel, frame: TunnelFrame) -> None:
        tunnel.first.append(frame)
        self._awake.add(tunnel.number)

    def validate(self) -> None:
        """What must hold after every call; for tests and simulations. Raises AssertionError."""
        ends = [e for t in self._tunnels.values() for e in t.ends.values()]
        assert self._free_bytes + sum(e.charged_bytes for e in ends) == self._limits.buffer_bytes
        assert 0 <= self.waiting_bytes <= self._limits.buffer_bytes - self._free_bytes
        for end in ends:
            assert end.may_come_bytes >= 0
            if end.other is not None:
                assert end.other.other is end
                held_bytes = sum(map(len, end.other.waiting))
                assert end.may_come_bytes + held_bytes + end.owed_bytes == end.window_bytes
