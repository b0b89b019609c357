"""An access line: packets from one TUN device to another, later, or never. `python -m lab.link` runs one.

    python -m lab.link NEAR_NAMESPACE FAR_NAMESPACE NEAR_DEVICE FAR_DEVICE DELAY_S JITTER_S LOSS SEED

Orders come as lines on standard input: "cut", "cut up", "cut down", "mend", "delay SECONDS". Ends with its input. Up is
from the near side (the site) to the far one (the internet). Packets keep their order, as on one line, jitter included.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_PACKET_BYTES = 65536
# A line that takes more than this is a queue without end: what comes beyond is dropped, as by a router.
_WAITING_AT_MOST = 5000


@dataclass
class Direction:
    """One way of the line: pure but for the time that is given to it."""

    delay_s: float
    jitter_s: float
    loss: float
    rng: random.Random
    cut: bool = False
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)

    def takes(self, packet: bytes, now_s: float) -> None:
        if self.cut or self.rng.random() < self.loss or len(self.waiting) >= _WAITING_AT_MOST:
            return
        due_s = now_s + self.delay_s + self.jitter_s * self.rng.random()
        if self.waiting:
            due_s = max(due_s, self.waiting[-1][0])
        self.waiting.append((due_s, packet))

    def due(self, now_s: float) -> list[bytes]:
        found = []
        while self.waiting and self.waiting[0][0] <= now_s:
            packet = self.waiting.popleft()[1]
            if not self.cut:
                found.append(packet)
        return found


def order(text: str, up: Direction, down: Direction) -> None:
    match text.split():
        case ["cut"]:
            up.cut = down.cut = True
        case ["cut", "up"]:
            up.cut = True
        case ["cut", "down"]:
            down.cut = True
        case ["mend"]:
            up.cut = down.cut = False
        case ["delay", seconds]:
            up.delay_s = down.delay_s = float(seconds)
        case _:
            raise SystemExit(f"not an order: {text!r}")


def _tun(namespace: str, device: str) -> int:
    """Opens a TUN device within a namespace; this process stays there."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def main() -> None:
    near_ns, far_ns, near_device, far_device, *numbers = sys.argv[1:]
    delay_s, jitter_s, loss, seed = map(float, numbers)
    near, far = _tun(near_ns, near_device), _tun(far_ns, far_device)
    rng = random.Random(int(seed))
    up, down = Direction(delay_s, jitter_s, loss, rng), Direction(delay_s, jitter_s, loss, rng)
    print("open", flush=True)
    selector = selectors.DefaultSelector()
    for descriptor in (near, far, 0):
        selector.register(descriptor, selectors.EVENT_READ)
    while True:
        dues = [d.waiting[0][0] for d in (up, down) if d.waiting]
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        for key, _ in selector.select(wait_s):
            if key.fd == 0:
                text = os.read(0, 4096).decode()
                if not text:
                    return
                for line in text.splitlines():
                    order(line, up, down)
                continue
            direction = up if key.fd == near else down
            for _ in range(64):
                try:
                    packet = os.read(key.fd, _PACKET_BYTES)
                except (BlockingIOError, OSError):
                    break
                direction.takes(packet, time.monotonic())
        now_s = time.monotonic()
        for direction, out in ((up, far), (down, near)):
            for packet in direction.due(now_s):
                try:
                    os.write(out, packet)
                except OSError:
                    continue  # the device is down, or its queue is full: lost


if __name__ == "__main__":
    main()
