"""What a service manager hears over its datagram socket, and that nothing fails where there is none."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starlings_protos.notify import Notifier

if not hasattr(socket, "AF_UNIX"):
    pytest.skip("no unix sockets here", allow_module_level=True)


class Manager:
    """The listening end."""

    def __init__(self, address: str | bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return found


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.socket.close()


def test_ready_and_stopping_are_said_once(manager: Manager, tmp_path: Path):
    notifier = Notifier(str(tmp_path / "notify"))
    assert notifier.listening
    notifier.status("joins")
    notifier.ready()
    notifier.ready()
    notifier.tick()
    notifier.stopping()
    notifier.stopping()
    notifier.close()
    notifier.stopping()
    assert manager.heard() == ["STATUS=joins", "READY=1", "STOPPING=1"]


def test_statuses_are_rate_limited_and_the_newest_is_not_lost(manager: Manager, tmp_path: Path):
    now_s = 100.0
    notifier = Notifier(str(tmp_path / "notify"), clock=lambda: now_s)
    for step in range(100):
        notifier.status(f"step {step}")
        now_s += 0.001
    assert manager.heard() == ["STATUS=step 0"]
    notifier.tick()
    assert manager.heard() == []
    now_s += 1.0
    notifier.tick()
    notifier.tick()
    assert manager.heard() == ["STATUS=step 99"]
    notifier.status("training\nREADY=1\x1b[2J")
    assert manager.heard() == []
    notifier.ready()
    # What came with the line break is text, not a message; nor does anything move a cursor.
    assert manager.heard() == ["READY=1\nSTATUS=training READY=1 [2J"]


def test_a_watchdog_hears_every_tick(manager: Manager, tmp_path: Path):
    notifier = Notifier(str(tmp_path / "notify"), watchdog=True)
    notifier.tick()
    notifier.tick()
    assert manager.heard() == ["WATCHDOG=1", "WATCHDOG=1"]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_socket():
    name = f"starlings-test-{os.getpid()}"
    manager = Manager(b"\0" + name.encode())
    Notifier(f"@{name}").ready()
    assert manager.heard() == ["READY=1"]
    manager.socket.close()


@pytest.mark.parametrize("address", ["", "nonsense", "vsock:2:1", "/nowhere/at/all", "@", "/" + "x" * 200])
def test_where_nobody_listens_nothing_happens(address: str):
    notifier = Notifier(address, watchdog=True)
    notifier.status("works")
    notifier.ready()
    notifier.tick()
    notifier.stopping()
    notifier.close()


def test_a_manager_that_does_not_read_holds_nobody_up(manager: Manager, tmp_path: Path):
    notifier = Notifier(str(tmp_path / "notify"), watchdog=True)
    for _ in range(10_000):
        notifier.tick()
    assert manager.heard()


@pytest.mark.parametrize(
    ("environment", "listening", "watched"),
    [
        ({}, False, False),
        ({"NOTIFY_SOCKET": "/run/x"}, True, False),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000"}, True, True),
        (
            {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())},
            True,
            True,
        ),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, True, False),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "0"}, True, False),
    ],
)
def test_the_environment_is_taken_for_oneself(environment: dict[str, str], listening: bool, watched: bool):
    given = {"OTHER": "stays", **environment}
    notifier = Notifier.from_environment(given)
    assert (notifier.listening, notifier._watchdog) == (listening, watched)
    assert given == {"OTHER": "stays"}, "children must not speak for us"
