"""Under which addresses peers may reach this machine. Torch-free."""

from __future__ import annotations

import hashlib
import ipaddress
import socket

import psutil

from starlings_worker.platform import machine_id

WILDCARDS = ("", "0.0.0.0", "::", "[::]")
_ADDRESSES_AT_MOST = 8


def reachable_addresses(listen_host: str, port: int, advertise: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Each "host:port" of the data plane, in the order to try.

    Args:
        listen_host: where the engine listens; a wildcard means every address of this machine.
        advertise: "host" or "host:port" that the user named; they replace what would be found.
    """
    if advertise:
        return tuple(_with_port(address, port) for address in advertise)
    if listen_host not in WILDCARDS:
        return (_joined(listen_host, port),)
    return tuple(_joined(address, port) for address in own_hosts())


def host_on_the_way_to(host: str, port: int) -> str:
    """This machine's own address on its way to a host; "" when there is none. Sends nothing, but may ask DNS."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def own_hosts(first: str = "") -> tuple[str, ...]:
    """The addresses of this machine under which others might reach it, `first` in front: whoever came the same way as
    the coordinator's messages most likely finds it there.
    """
    hosts = [first, *_own_addresses()] if first else _own_addresses()
    return tuple(dict.fromkeys(hosts))[:_ADDRESSES_AT_MOST]


def _own_addresses() -> list[str]:
    """Addresses of the interfaces that are up: routable ones first, loopback last (for workers on one
    machine).
    """
    found: list[tuple[int, str]] = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if address.is_link_local or address.is_unspecified or address.is_multicast:
                continue
            rank = 3 if address.is_loopback else 0 if address.version == 4 else 1
            if rank == 3 and address.version == 6:
                continue
            found.append((rank, str(address)))
    return [address for _, address in sorted(set(found))] or ["127.0.0.1"]


def _joined(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _with_port(address: str, port: int) -> str:
    host, colon, number = address.rpartition(":")
    if colon and number.isdecimal() and (":" not in host or host.startswith("[")):
        return address
    return _joined(address, port)


def host_id() -> str:
    """The same for all workers on this machine; says nothing else about it."""
    return hashlib.sha256(f"starlings:{machine_id()}".encode()).hexdigest()[:16]
