"""A connection taken step by step (DNS, TCP, TLS), so that a failure says where it happened and what to try.

gRPC only says "unavailable". `reach` is used before the first call to an enrolment port, where the server's certificate
must be seen before anything is sent, and `diagnose` after a call failed, to find out why.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509

from starlings_protos.errors import PeerFault, Phase, Unreachable, clean_text
from starlings_protos.identity import COORDINATOR_NAME, Identity, is_issued_by, read_certificate
from starlings_protos.invite import Address

TIMEOUT_S = 10.0
# A host with a broken IPv6 route is tried over IPv4 after this long (RFC 8305).
HAPPY_EYEBALLS_DELAY_S = 0.25


@dataclass(frozen=True, slots=True)
class Reached:
    """A server that finished a TLS handshake; whether it may be trusted is for the caller to judge."""

    address: Address
    # The literal address that answered: dial this, and it is the same server.
    dialled: Address
    resolved: tuple[str, ...]
    certificate_der: bytes

    @property
    def certificate_pem(self) -> bytes:
        return ssl.DER_cert_to_PEM_cert(self.certificate_der).encode()


async def reach(
    address: Address,
    *,
    server_name: str | None = None,
    timeout_s: float = TIMEOUT_S,
    advice: Mapping[Phase, str] | None = None,
) -> Reached:
    """Connects, shakes hands without any trust and without sending anything else, and hangs up.

    Args:
        server_name: sent as SNI; None sends none.
        timeout_s: for each of the three phases.
        advice: what to try when a phase fails, by phase; a coordinator's when left out.

    Raises:
        Unreachable: names host, port, what DNS gave, the phase, and what to try.
    """
    try:
        return await _reach(address, server_name, timeout_s)
    except Unreachable as error:
        if advice is None or error.phase is None or error.phase not in advice:
            raise
        raise _unreachable(address, error.resolved, error.phase, error.cause, advice[error.phase]) from None


async def _reach(address: Address, server_name: str | None, timeout_s: float) -> Reached:
    resolved = await _resolve(address, timeout_s)
    host, writer = await _connect(address, resolved, timeout_s)
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await writer.start_tls(_trusting_context(), server_hostname=server_name)
        except (ssl.SSLError, OSError, TimeoutError) as error:
            raise _unreachable(address, resolved, Phase.TLS, _cause(error, timeout_s)) from None
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    if not certificate:
        raise _unreachable(address, resolved, Phase.TLS, "the server showed no certificate")
    return Reached(address, Address(host, address.port), resolved, certificate)


async def _resolve(address: Address, timeout_s: float) -> tuple[str, ...]:
    try:
        return (str(ipaddress.ip_address(address.host)),)
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise _unreachable(address, (), Phase.DNS, _cause(error, timeout_s)) from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


async def _connect(
    address: Address, resolved: tuple[str, ...], timeout_s: float
) -> tuple[str, asyncio.StreamWriter]:
    """To whichever of `resolved` answers first; failures name each address's own."""
    failures: dict[str, str] = {}

    async def attempt(host: str, delay_s: float) -> tuple[str, asyncio.StreamWriter]:
        await asyncio.sleep(delay_s)
        try:
            _, writer = await asyncio.open_connection(host, address.port)
        except OSError as error:
            failures[host] = _cause(error, timeout_s)
            raise
        return host, writer

    # The families alternate, so that one broken family costs one delay and not one per address.
    waiting = {
        asyncio.create_task(attempt(host, position * HAPPY_EYEBALLS_DELAY_S))
        for position, host in enumerate(_alternating(resolved))
    }
    started = set(waiting)
    winner: tuple[str, asyncio.StreamWriter] | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while waiting and winner is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                connected = [task.result() for task in done if task.exception() is None]
                winner = connected[0] if connected else None
    except TimeoutError:
        pass
    finally:
        for task in started:
            task.cancel()
        for outcome in await asyncio.gather(*started, return_exceptions=True):
            if isinstance(outcome, tuple) and outcome is not winner:
                outcome[1].transport.abort()
    if winner is not None:
        return winner
    told = "; ".join(
        f"{host}: {failures.get(host, f'no answer within {timeout_s:g} s')}" for host in resolved
    )
    raise _unreachable(address, resolved, Phase.TCP, told)


def _alternating(resolved: tuple[str, ...]) -> list[str]:
    first = [host for host in resolved if ":" in host]
    second = [host for host in resolved if ":" not in host]
    if resolved and resolved[0] in second:
        first, second = second, first
    longest = max(len(first), len(second))
    return [host for i in range(longest) for family in (first, second) for host in family[i : i + 1]]


def _trusting_context() -> ssl.SSLContext:
    """For looking only: nothing is sent over a connection made with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    return context


def _cause(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, ssl.SSLError):
        return clean_text(error.reason or str(error), 200).lower().replace("_", " ")
    if isinstance(error, ConnectionResetError):
        return "the other side closed the connection"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, so nothing listens there"
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text only repeats the address
    if isinstance(error, OSError) and error.strerror:
        return clean_text(error.strerror, 200)
    return clean_text(str(error) or type(error).__name__, 200)


_ADVICE = {
    Phase.DNS: "Check the name for typing errors, and that this machine has a working DNS and network.",
    Phase.TCP: (
        "Check that the coordinator is running, and that the firewalls on its side (and a port forwarding, if it is "
        "behind a router) let this port through."
    ),
    Phase.TLS: (
        "Something else than a coordinator may listen there, or a proxy is in the way: check the port, or try another "
        "network."
    ),
    Phase.AUTHORISATION: "Ask the owner for a new invite.",
}


def _unreachable(
    address: Address, resolved: tuple[str, ...], phase: Phase, cause: str, advice: str | None = None
) -> Unreachable:
    literal = resolved == (address.host,)
    dns = "" if literal or phase is Phase.DNS else f" ({address.host} is {', '.join(resolved[:6])})"
    return Unreachable(
        f"Cannot reach {address.host} port {address.port}{dns}: {phase.value} failed: {cause}. "
        f"{advice or _ADVICE[phase]}",
        host=address.host,
        port=address.port,
        phase=phase,
        resolved=resolved,
        cause=cause,
    )


def refused_certificate(reached: Reached, reason: str, advice: str | None = None) -> Unreachable:
    """TLS came about, but with a server that is not the one we look for."""
    return _unreachable(reached.address, reached.resolved, Phase.TLS, reason, advice)


def lost(reached: Reached, cause: str) -> Unreachable:
    """A call failed on the way to a server that had just been reached, and not by a coded refusal."""
    return _unreachable(
        reached.address,
        reached.resolved,
        Phase.AUTHORISATION,
        cause,
        "The server was there a moment before: try again; if it stays so, another one may have taken its place.",
    )


def describe_certificate(certificate: x509.Certificate) -> str:
    """Who a foreign certificate says it is: for people, to recognise a proxy by."""
    subject = clean_text(certificate.subject.rfc4514_string(), 120) or "nobody"
    issuer = clean_text(certificate.issuer.rfc4514_string(), 120) or "nobody"
    return f"for {subject}, issued by {'itself' if issuer == subject else issuer}"


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return names.get_values_for_type(x509.DNSName)


async def diagnose(
    address: Address, identity: Identity, *, server_name: str = COORDINATOR_NAME, timeout_s: float = TIMEOUT_S
) -> Unreachable:
    """Why a mutual-TLS port cannot be used: the first phase that fails. For after a call ended as unavailable."""
    try:
        reached = await reach(address, server_name=server_name, timeout_s=timeout_s)
    except Unreachable as error:
        return error
    try:
        certificate = x509.load_der_x509_certificate(reached.certificate_der)
        ours = is_issued_by(certificate, read_certificate(identity.ca_pem))
    except (ValueError, PeerFault):
        return refused_certificate(reached, "the server's certificate cannot be read")
    if not ours:
        return refused_certificate(
            reached,
            f"the server's certificate ({describe_certificate(certificate)}) is not of this job: certificate replaced "
            "by a proxy, or the coordinator was set up anew?",
        )
    if server_name not in _dns_names(certificate):
        return refused_certificate(reached, "another member of this job answers there")
    return _unreachable(
        address,
        reached.resolved,
        Phase.AUTHORISATION,
        f"the server is there but does not take the certificate of {identity.id} (expired?)",
    )
