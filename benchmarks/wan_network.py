"""Hosts on this machine, each behind an uplink of its own: network namespaces on one bridge. Needs root on Linux.

Rates only (`tc tbf`): the kernels of many machines have no delay to add.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

DEVICE = "uplink"


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str

    @property
    def through(self) -> Sequence[str]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.namespace)


def why_not() -> str:
    """Why there can be no such hosts here; "" when there can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs Linux and iproute2"
    if os.geteuid() != 0:
        return "needs root"
    name = f"slw{os.getpid() % 100_000}p"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if probe.returncode != 0:
        return f"network namespaces are not allowed here: {probe.stderr.decode().strip()}"
    _run("ip", "netns", "del", name)
    return ""


@contextmanager
def hosts(uplinks_mbit_s: Sequence[float]) -> Iterator[list[Host]]:
    """One host per uplink; 0 = without limit. Everything ends with the context."""
    tag = f"slw{os.getpid() % 100_000}"
    switch = f"{tag}s"
    found = [Host(f"{tag}h{n}", f"10.79.0.{n + 1}") for n in range(len(uplinks_mbit_s))]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, (host, rate) in enumerate(zip(found, uplinks_mbit_s, strict=True)):
            port = f"port{number}"
            there = ("ip", "-n", host.namespace)
            _run("ip", "netns", "add", host.namespace)
            _run(*there, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run(*there, "address", "add", f"{host.address}/24", "dev", DEVICE)
            _run(*there, "link", "set", DEVICE, "up")
            _run(*there, "link", "set", "lo", "up")
            if rate:
                shape = ("tbf", "rate", f"{rate:g}mbit", "burst", "64kb", "latency", "200ms")
                _run("tc", "-n", host.namespace, "qdisc", "add", "dev", DEVICE, "root", *shape)
        yield found
    finally:
        for name in (switch, *(host.namespace for host in found)):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
