"""The one place for everything about gRPC channels and servers: options, credentials, keepalive, limits.

Three planes, all TLS; there is no other way in:

    enrolment   server TLS with the CA's own certificate; no client certificate
    control     mutual TLS; the server is `coordinator.starlings`
    data        mutual TLS; the server is `<id>.w.starlings`

Names are checked by `ssl_target_name_override`, so a peer may change its address without anybody noticing. gRPC sets
TCP_NODELAY on every connection by itself. Everything here is for grpc.aio.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio

from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import PortBusy, UsageError
from starlings_protos.identity import COORDINATOR_NAME, ENROLMENT_NAME, Identity, server_name_of
from starlings_protos.invite import parse_address
from starlings_protos.peers import peer_identity

# One constant for both sides: clients ping this often, servers allow twice that, so an idle swarm is never cut off
# with `too_many_pings`. Halving it finds dead peers in half the time and doubles the idle traffic (about 17 bytes/s).
KEEPALIVE_S = 10.0
# On the control plane pings are rarer, because workers speak there by themselves: who gets no acknowledgement of a
# heartbeat from the coordinator's system within `KEEPALIVE_TIMEOUT_S` is cut off already (TCP_USER_TIMEOUT, which gRPC
# sets where there is such a thing, on Linux). Pings find what is left: a coordinator that hangs, or something between
# that acknowledges in its place; and on other systems, unless they give up earlier, a way that is dead. The coordinator
# goes by heartbeats, not by pings. Ten thousand workers that ping every 30 s do that more often than they heartbeat,
# and it costs the coordinator nearly as much.
CONTROL_KEEPALIVE_S = 60.0
# A server pings only whom it has not heard for this many times as long. With equal times both would ping, and a
# connection that says nothing would cost a server about twice the CPU.
SERVER_WAITS = 2
# A ping without an answer for this long ends the connection.
KEEPALIVE_TIMEOUT_S = 10.0

ENROLMENT_MESSAGE_LIMIT_BYTES = 64 << 10
# Digests of ten thousand blocks. A parsed message takes up to 25 times its bytes (empty entries of a list).
CONTROL_MESSAGE_LIMIT_BYTES = 1 << 20
# Only from coordinator to worker: a grant carries its samples' tokens, a welcome the job's profile.
LEASE_MESSAGE_LIMIT_BYTES = 64 << 20
# Frames carry at most 1 MiB.
DATA_MESSAGE_LIMIT_BYTES = 2 << 20
TUNNEL_MESSAGE_LIMIT_BYTES = 68 << 10

# The largest is a refusal (see errors.MESSAGE_LIMIT_CHARACTERS: up to 4 bytes each, percent-encoded).
METADATA_LIMIT_BYTES = 16 << 10

Options = tuple[tuple[str, int | str], ...]

__all__ = [
    "CONTROL",
    "DATA",
    "ENROLMENT",
    "KEEPALIVE_S",
    "TUNNEL",
    "Transport",
    "bind",
    "client_options",
    "control_channel",
    "enrolment_channel",
    "enrolment_credentials",
    "make_server",
    "peer_channel",
    "peer_identity",
    "server_credentials",
    "server_options",
    "target",
]


@dataclass(frozen=True, slots=True)
class Transport:
    """Timings and limits of one plane. Tests shorten the timings; both sides must have the same ones."""

    receive_limit_bytes: int
    send_limit_bytes: int
    # Calls at once on one connection; more wait at the client.
    stream_limit: int
    # Connections at once to a server; more are closed at once.
    connection_limit: int
    keepalive_s: float = KEEPALIVE_S
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S
    # A TLS handshake that takes longer is dropped: nobody holds connections open without proving anything.
    handshake_timeout_s: float = 20.0
    # TLS records that we send. Each connection keeps buffers of this size: 4 KiB instead of 16 save a coordinator with
    # a thousand workers 5 MB; a large transfer pays 1 % for it.
    tls_record_bytes: int = 16 << 10
    # A server pings who sends, to fit its windows to the way's bandwidth. Where all that comes is small, that only
    # doubles the packets: whoever speaks every two seconds is pinged each time, and 250 messages/s cost as much again.
    server_fits_windows: bool = True
    reconnect_min_s: float = 0.5
    reconnect_max_s: float = 10.0


ENROLMENT = Transport(ENROLMENT_MESSAGE_LIMIT_BYTES, ENROLMENT_MESSAGE_LIMIT_BYTES, 4, 4096)
# As the coordinator sees it; a worker receives what the coordinator sends.
CONTROL = Transport(
    CONTROL_MESSAGE_LIMIT_BYTES,
    LEASE_MESSAGE_LIMIT_BYTES,
    64,
    16384,
    keepalive_s=CONTROL_KEEPALIVE_S,
    tls_record_bytes=4 << 10,
    server_fits_windows=False,
)
DATA = Transport(DATA_MESSAGE_LIMIT_BYTES, DATA_MESSAGE_LIMIT_BYTES, 1024, 4096)
# To a relay: frames carry at most 64 KiB of a connection, and each tunnel is one call.
TUNNEL = Transport(TUNNEL_MESSAGE_LIMIT_BYTES, TUNNEL_MESSAGE_LIMIT_BYTES, 8, 8192)


def _shared_options(transport: Transport) -> Options:
    return (
        ("grpc.keepalive_timeout_ms", _ms(transport.keepalive_timeout_s)),
        # Also while no call is open; on the server's side this is the permission for it.
        ("grpc.keepalive_permit_without_calls", 1),
        # 0 = any number of pings without data in between.
        ("grpc.http2.max_pings_without_data", 0),
        # No message compression (bit 0 = identity): the library limits a message before it is unpacked, not after, so
        # that a hundred kilobytes could become a hundred megabytes. Tensors have codecs of their own.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Names and values of a call's metadata; ours have below 2 KiB.
        ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
        ("grpc.tsi.max_frame_size", transport.tls_record_bytes),
    )


def client_options(transport: Transport, server_name: str) -> Options:
    return (
        *_shared_options(transport),
        ("grpc.keepalive_time_ms", _ms(transport.keepalive_s)),
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.max_receive_message_length", transport.send_limit_bytes),
        ("grpc.max_send_message_length", transport.receive_limit_bytes),
        ("grpc.initial_reconnect_backoff_ms", _ms(transport.reconnect_min_s)),
        ("grpc.min_reconnect_backoff_ms", _ms(min(transport.handshake_timeout_s, transport.reconnect_max_s))),
        ("grpc.max_reconnect_backoff_ms", _ms(transport.reconnect_max_s)),
        # Every channel has its own connection: closing one, or renewing its certificate, touches no other.
        ("grpc.use_local_subchannel_pool", 1),
        # Whether a failed push may be sent again is decided by our cores, never by the library.
        ("grpc.enable_retries", 0),
        # An `http_proxy` meant for a browser must not redirect a swarm, least of all one on loopback.
        ("grpc.enable_http_proxy", 0),
        # No settings from DNS TXT records.
        ("grpc.service_config_disable_resolution", 1),
    )


def server_options(transport: Transport) -> Options:
    return (
        *_shared_options(transport),
        ("grpc.keepalive_time_ms", _ms(SERVER_WAITS * transport.keepalive_s)),
        ("grpc.http2.bdp_probe", int(transport.server_fits_windows)),
        # Whatever the plane: workers of another version may ping more often.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(min(transport.keepalive_s, KEEPALIVE_S) / 2)),
        ("grpc.max_receive_message_length", transport.receive_limit_bytes),
        ("grpc.max_send_message_length", transport.send_limit_bytes),
        ("grpc.max_concurrent_streams", transport.stream_limit),
        # A call counts until its memory is free, not only until it ends (the default; here because it matters):
        # otherwise 240,000 streams that are opened and reset over 40 connections cost 3 GB instead of 30 MB.
        ("grpc.http.overload_protection", 1),
        ("grpc.max_allowed_incoming_connections", transport.connection_limit),
        ("grpc.server_handshake_timeout_ms", _ms(transport.handshake_timeout_s)),
        # Otherwise two servers on one port would share it silently.
        ("grpc.so_reuseport", 0),
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


# ------------------------------------------------------------------ clients


def target(address: str) -> str:
    """gRPC's name for "host:port": addresses literally, names by DNS.

    Raises:
        ValueError: not an address.
    """
    parsed = parse_address(address)
    try:
        version = ipaddress.ip_address(parsed.host).version
    except ValueError:
        return f"dns:///{parsed}"
    return f"ipv4:{parsed}" if version == 4 else f"ipv6:[{parsed.host}]:{parsed.port}"


def _channel(
    address: str, credentials: grpc.ChannelCredentials, transport: Transport, server_name: str
) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        target(address), credentials, options=client_options(transport, server_name)
    )


def _mutual(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.certificate_pem)


def enrolment_channel(address: str, ca_pem: bytes, transport: Transport = ENROLMENT) -> grpc.aio.Channel:
    """To the enrolment port of the coordinator whose CA is `ca_pem`: the caller has compared its pin."""
    return _channel(address, grpc.ssl_channel_credentials(ca_pem), transport, ENROLMENT_NAME)


def control_channel(address: str, identity: Identity, transport: Transport = CONTROL) -> grpc.aio.Channel:
    """To the coordinator's control port "host:port", as a worker, the owner or an observer.

    A renewed certificate needs a new channel; open connections outlive the one they were made with.
    """
    return _channel(address, _mutual(identity), transport, COORDINATOR_NAME)


def peer_channel(
    address: str, worker_id: str, identity: Identity, transport: Transport = DATA
) -> grpc.aio.Channel:
    """To the data port of `worker_id` (or "keeper") at "host:port"; whoever else answers there is refused."""
    return _channel(address, _mutual(identity), transport, server_name_of(worker_id))


# ------------------------------------------------------------------ servers


def server_credentials(source: Identity | Callable[[], Identity]) -> grpc.ServerCredentials:
    """Mutual TLS: clients must show a certificate of the same CA.

    Args:
        source: the server's identity, or a function that gives the current one. It is asked at every handshake (on a
            thread of gRPC's), so that a renewed certificate is used without a restart.
    """
    current = source if callable(source) else lambda: source
    last: list[Identity] = [current()]

    def configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(identity.key_pem, identity.certificate_pem)], root_certificates=identity.ca_pem
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        identity = current()
        if identity == last[0]:
            return None  # unchanged
        last[0] = identity
        return configuration(identity)

    return grpc.dynamic_ssl_server_credentials(
        configuration(last[0]),
        # The stubs do not know that None means "as before".
        cast(Callable[[], grpc.ServerCertificateConfiguration], fetch),
        require_client_authentication=True,
    )


def enrolment_credentials(authority: CertificateAuthority) -> grpc.ServerCredentials:
    """Server TLS with the CA's certificate itself."""
    return grpc.ssl_server_credentials([(authority.key_pem, authority.certificate_pem)])


def make_server(
    transport: Transport, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A server without ports and services; see `bind`. `transport` is ENROLMENT, CONTROL or DATA."""
    return grpc.aio.server(interceptors=interceptors, options=server_options(transport))


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    """Opens a port and returns its number (`port` 0: any free one). `host` "" = all addresses of the machine.

    Raises:
        PortBusy: another process listens there.
        UsageError: the address is not this machine's, or the port needs privileges.
    """
    host = host.strip("[]") or "::"
    if port:
        _try_port(host, port)
    try:
        return server.add_secure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials)
    except RuntimeError:
        _try_port(host, port)
        raise PortBusy(
            f"Port {port} on {host} cannot be opened: choose another port, or 0 for any free one."
        ) from None


def _try_port(host: str, port: int) -> None:
    """What gRPC does not say: why a port cannot be opened."""
    if host in ("::", "0.0.0.0"):
        # gRPC listens on both families then, or on the one that this machine has.
        for wildcard in ("::", "0.0.0.0"):
            _try_address(wildcard, port, may_lack_family=True)
    else:
        _try_address(host, port, may_lack_family=False)


def _try_address(host: str, port: int, *, may_lack_family: bool) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        if may_lack_family:
            return
        raise UsageError(f"{host!r} is no address of this machine ({error.strerror or error}).") from None
    family, kind, protocol, _, where = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: a port whose last connections linger may be used again.
            if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            # Linux lets two sockets bind with SO_REUSEADDR as long as none of them listens.
            probe.listen(1)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", -1)):
            raise PortBusy(
                f"Port {port} on {host} is busy: stop the process that listens there, or choose another port "
                "(0 = any free one)."
            ) from None
        if error.errno in (errno.EACCES, getattr(errno, "WSAEACCES", -1)):
            raise UsageError(f"Port {port} needs privileges: choose one above 1023.") from None
        if may_lack_family and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"{host} is no address of this machine: choose one that is, or leave it out."
            ) from None
        raise
