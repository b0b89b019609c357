"""mosquitto.conf and the access list of a job's broker, as text. Pure: who may say what on the bus is decided here.

A client's name is that of its certificate (`use_identity_as_username`), which the job's CA has signed, so there are no
passwords. The rules grant, and what is not granted is refused:

    everybody       reads what belongs to the job
    a worker        writes below its own topic
    coordinator     writes everywhere in the job: plans, events, hints, and it clears what forgotten workers left
    an observer     writes nothing: it is named, because a rule cannot tell its name from a worker's
    who was shut out neither reads nor writes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from starlings_protos.bus.payloads import PACKET_LIMIT_BYTES
from starlings_protos.bus.topics import PREFIX

MQTTS_PORT = 8883
# Files of the directory, and the folder for retained messages.
CONFIGURATION, ACCESS, CA, CERTIFICATE, KEY, RETAINED = (
    "mosquitto.conf",
    "access",
    "ca.pem",
    "broker.pem",
    "broker.key",
    "retained",
)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What one broker needs to know.

    Raises:
        ValueError: a port out of range, packets that are too small, or a path that Mosquitto's file format cannot hold.
    """

    job: str
    # Of the listener; Mosquitto has no "any free port".
    port: int
    # The directory of the files as the broker's process sees it.
    directory: str
    # To which account Mosquitto changes when root starts it; "" leaves its own default.
    account: str = ""
    # Listens on this address only; "" = on all.
    listen: str = ""
    # Workers, observers and their reconnections. More need more file descriptors (LimitNOFILE) as well.
    connections: int = 12_000
    # Above all that our processes send (bus.payloads); larger packets cost their sender the connection.
    packet_bytes: int = 64 << 10
    # For a client that does not read: what waits for it beyond this is dropped.
    queued_messages: int = 1_000
    queued_bytes: int = 4 << 20
    # Unacknowledged at a time, per client.
    inflight_messages: int = 20
    # A silent client is lost after 1.5 times this.
    keepalive_s: int = 60
    # The broker's own memory; OpenSSL's, some 50 KiB per connection, is not counted.
    memory_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"{self.port} is no port of a broker (1 to 65535)")
        if self.packet_bytes <= PACKET_LIMIT_BYTES:
            raise ValueError(f"packets of a job have up to {PACKET_LIMIT_BYTES} bytes")
        if any(ord(character) < 32 for character in self.directory):
            raise ValueError(f"Mosquitto's configuration cannot hold the path {self.directory!r}")


def mosquitto_conf(settings: BrokerSettings) -> str:
    """The text of mosquitto.conf."""
    place = settings.directory.rstrip("/")
    lines = [
        f"# The broker of the Starlings job {settings.job}, written by `starlings bus config`; Mosquitto 2.0 or newer.",
        "# After a change of `access`: kill -HUP; after one of this file or a certificate: restart.",
        "",
        "per_listener_settings false",
        "allow_anonymous false",
        f"acl_file {place}/{ACCESS}",
        "# What somebody retained before being shut out is shown to nobody. The manual's default, but not 2.0.11's.",
        "check_retain_source true",
        *([f"user {settings.account}"] if settings.account else []),
        "",
        f"listener {settings.port} {settings.listen}".rstrip(),
        f"max_connections {settings.connections}",
        "# TLS with the job's authority alone, both ways; a client's name is its certificate's.",
        "tls_version tlsv1.2",
        f"cafile {place}/{CA}",
        f"certfile {place}/{CERTIFICATE}",
        f"keyfile {place}/{KEY}",
        "require_certificate true",
        "use_identity_as_username true",
        "max_qos 1",
        "",
        f"max_packet_size {settings.packet_bytes}",
        f"max_inflight_messages {settings.inflight_messages}",
        f"max_queued_messages {settings.queued_messages}",
        f"max_queued_bytes {settings.queued_bytes}",
        "queue_qos0_messages false",
        f"max_keepalive {settings.keepalive_s}",
        f"memory_limit {settings.memory_bytes}",
        "persistent_client_expiration 1h",
        "set_tcp_nodelay true",
        "# Other statistics than `starlings watch` shows are nobody's business.",
        "sys_interval 0",
        "",
        "# What is retained (states of workers, the plan) survives a restart.",
        "persistence true",
        f"persistence_location {place}/{RETAINED}/",
        "autosave_interval 60",
        "",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        "log_type information",
        "log_timestamp_format %Y-%m-%dT%H:%M:%S",
        "connection_messages false",
    ]
    return "\n".join(lines) + "\n"


def access_list(job: str, observers: Iterable[str] = (), revoked: Iterable[str] = ()) -> str:
    """The text of the ACL file.

    Args:
        observers: ids of all that have enrolled.
        revoked: ids of workers and observers that were shut out.
    """
    topics = f"{PREFIX}/{job}"
    shut_out = sorted(set(revoked))
    lines = [
        f"# Who may say what on the bus of {job}; written by `starlings bus config`, which adds observers and those",
        "# that were shut out since: run it again with --force after either, then kill -HUP the broker.",
        "",
        "user coordinator",
        f"topic write {topics}/#",
        "",
        "# Everybody whom the job's authority has given a certificate.",
        f"pattern read {topics}/#",
        f"pattern write {topics}/worker/%u/#",
    ]
    for name in sorted(set(observers) - set(shut_out)):
        lines += ["", f"user {name}", f"topic deny {topics}/worker/{name}/#"]
    for name in shut_out:
        lines += ["", f"user {name}", f"topic deny {topics}/#"]
    return "\n".join(lines) + "\n"
