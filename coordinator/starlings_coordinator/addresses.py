"""Under which addresses others reach this machine, and how a local command reaches its own coordinator."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

WILDCARDS = ("", "0.0.0.0", "::", "[::]")
# Documentation addresses (RFC 5737, RFC 3849): nothing is sent to them, the system only chooses a route.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def outward_addresses() -> tuple[str, ...]:
    """This machine's own addresses on the routes to the world, IPv4 first; loopback when there is no route."""
    found = []
    for family, target in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                address = str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
        if not ipaddress.ip_address(address).is_link_local:
            found.append(address)
    return tuple(found) or ("127.0.0.1",)


def advertised_hosts(chosen: Sequence[str], configured: Sequence[str], listen_host: str) -> tuple[str, ...]:
    """The hosts that go into invites: what the owner said, else where we listen, else what the system says."""
    if chosen:
        return tuple(chosen)
    if configured:
        return tuple(configured)
    if listen_host not in WILDCARDS:
        return (listen_host.strip("[]"),)
    return outward_addresses()


def local_host(listen_host: str) -> str:
    """Where a process on this machine reaches a server that listens on `listen_host`."""
    if listen_host in ("::", "[::]"):
        return "::1"
    return "127.0.0.1" if listen_host in WILDCARDS else listen_host.strip("[]")
