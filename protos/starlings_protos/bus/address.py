"""Where a job's broker is: `[bus] url`. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

TLS_PORT, PLAIN_PORT = 8883, 1883
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


@dataclass(frozen=True, slots=True)
class BusAddress:
    host: str
    port: int
    # With the job's authority, both ways. Without it anybody on the machine may say and read everything.
    tls: bool

    def __str__(self) -> str:
        """The URL in its canonical form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"


def parse_bus_url(text: str) -> BusAddress:
    """Reads "mqtts://host[:port]", or "mqtt://" of a loopback host.

    Raises:
        ValueError: one sentence, with what is allowed.
    """
    example = f"write mqtts://host:{TLS_PORT}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"{text!r} is no URL (a port is 1 to 65535); {example}") from None
    if parts.scheme not in ("mqtts", "mqtt"):
        raise ValueError(f"{text!r} does not begin with mqtts://; {example}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} has a path or a user, but certificates say who is who; {example}")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text!r} names no host; {example}")
    if port == 0:
        raise ValueError(f"{text!r}: 0 is no port (1 to 65535); {example}")
    tls = parts.scheme == "mqtts"
    if not tls and not is_loopback(host):
        raise ValueError(
            f"mqtt:// is not encrypted and only for localhost, 127.0.0.1 and ::1; write mqtts://{host}:{TLS_PORT}"
        )
    return BusAddress(host, port or (TLS_PORT if tls else PLAIN_PORT), tls)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
