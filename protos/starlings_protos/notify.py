"""Tells a service manager how a process is doing, in systemd's protocol (sd_notify(3)): one datagram per message.

Where nobody asked for it (no NOTIFY_SOCKET: a terminal, a container, Windows, macOS) every call does nothing, and a
manager that does not listen is no reason to fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from starlings_protos.errors import clean_text

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PROCESS_VARIABLE = "WATCHDOG_PID"
# `systemctl status` shows the newest; more often is only noise in its bookkeeping.
STATUS_EVERY_S = 1.0
_STATUS_LIMIT_CHARACTERS = 200


class Notifier:
    """Of this process. Not thread-safe: one event loop uses it, and calls `tick` every second or two."""

    def __init__(
        self,
        address: str = "",
        *,
        watchdog: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            address: a path, or "@name" in Linux's abstract namespace; empty = nobody listens.
            watchdog: the manager ends the process when it hears no `tick` for the time that it was set up with.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._clock = clock
        self._socket: socket.socket | None = None
        self._ready = self._stopping = False
        # The newest line, and the one that the manager has.
        self._status = self._told = ""
        self._told_at_s = float("-inf")
        if address[:1] in ("/", "@") and hasattr(socket, "AF_UNIX"):
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """The one that the manager wants; what says so is taken out, because it is not meant for our children."""
        address = environment.pop(SOCKET_VARIABLE, "")
        allowed = environment.pop(WATCHDOG_VARIABLE, "0")
        meant_for = environment.pop(WATCHDOG_PROCESS_VARIABLE, "")
        return cls(address, watchdog=allowed != "0" and meant_for in ("", str(os.getpid())))

    @property
    def listening(self) -> bool:
        return self._socket is not None

    def ready(self) -> None:
        """The process can do its work. Said once."""
        if not self._ready:
            self._ready = True
            self._send("READY=1", *self._news())

    def status(self, text: str) -> None:
        """One line about what the process does. Goes out at once, or with a `tick` when the last is quite new."""
        # A line break would begin another message.
        self._status = clean_text(text, _STATUS_LIMIT_CHARACTERS)
        if self._clock() - self._told_at_s >= STATUS_EVERY_S:
            self._send(*self._news())

    def stopping(self) -> None:
        """The end has begun. Said once."""
        if not self._stopping:
            self._stopping = True
            self._send("STOPPING=1", *self._news())

    def tick(self) -> None:
        """The process lives: to be called from where a hang would be noticed."""
        late = self._clock() - self._told_at_s >= STATUS_EVERY_S
        self._send(*(["WATCHDOG=1"] if self._watchdog else []), *(self._news() if late else []))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _news(self) -> list[str]:
        if self._status == self._told:
            return []
        self._told, self._told_at_s = self._status, self._clock()
        return [f"STATUS={self._status}"]

    def _send(self, *lines: str) -> None:
        if self._socket is not None and lines:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)
