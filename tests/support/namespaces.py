"""A second host on this machine, behind a cable that can be cut: network namespaces, for tests. Needs root on Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass


def why_not() -> str:
    """Why there can be no namespaces here; "" when there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2"
    if os.geteuid() != 0:
        return "needs root"
    probe = subprocess.run(["ip", "netns", "add", f"stl{os.getpid()}p"], capture_output=True, check=False)
    if probe.returncode != 0:
        return f"network namespaces are not allowed here: {probe.stderr.decode().strip()}"
    _ip("netns", "del", f"stl{os.getpid()}p")
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class OtherHost:
    """`here` and `there` are the addresses of this machine and of the other one on the cable between them."""

    here: str
    there: str
    namespace: str
    switch: str
    port: str

    @property
    def through(self) -> Sequence[str]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self) -> None:
        """Whatever is sent from now on vanishes without an answer."""
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "master", "bridge")


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Two cables into a bridge in a namespace of its own, so that neither end sees its own cable go down."""
    tag = f"{os.getpid() % 100_000}"
    there, switch, net = f"stl{tag}b", f"stl{tag}s", f"10.{os.getpid() % 200 + 20}.77"
    host = OtherHost(f"{net}.1", f"{net}.2", there, switch, "right")
    names = (there, switch)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        _ip("link", "add", f"stl{tag}l", "type", "veth", "peer", "name", "left", "netns", switch)
        _ip("-n", there, "link", "add", "cable", "type", "veth", "peer", "name", "right", "netns", switch)
        for port in ("left", "right"):
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("address", "add", f"{host.here}/24", "dev", f"stl{tag}l")
        _ip("link", "set", f"stl{tag}l", "up")
        _ip("-n", there, "address", "add", f"{host.there}/24", "dev", "cable")
        _ip("-n", there, "link", "set", "cable", "up")
        _ip("-n", there, "link", "set", "lo", "up")
        yield host
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"stl{tag}l")
