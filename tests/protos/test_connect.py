"""A failed connection says which phase failed, to where, and what to try."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest

from starlings_protos import channels, connect
from starlings_protos.authority import CertificateAuthority
from starlings_protos.connect import diagnose, reach
from starlings_protos.errors import Phase, Unreachable
from starlings_protos.identity import COORDINATOR, KEEPER, OWNER, Identity, spki_pin
from starlings_protos.invite import Address


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("job", time.time())


@asynccontextmanager
async def _mutual_tls(identity: Identity):
    server = channels.make_server(channels.CONTROL)
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identity))
    await server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        await server.stop(0)


@asynccontextmanager
async def _says(first: bytes | None):
    """A TCP server that says `first` and hangs up; with None it is silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first is not None:
            writer.write(first)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def _fails(address: Address, phase: Phase, **options) -> str:
    with pytest.raises(Unreachable) as failed:
        await reach(address, **options)
    error = failed.value
    assert (error.phase, error.host, error.port, error.exit_code) == (phase, address.host, address.port, 3)
    assert f"{address.host} port {address.port}" in str(error)
    assert f"{phase.value} failed" in str(error)
    return str(error)


async def test_reaching_shows_the_certificate(authority: CertificateAuthority):
    from cryptography import x509

    server = channels.make_server(channels.ENROLMENT)
    port = channels.bind(server, "127.0.0.1", 0, channels.enrolment_credentials(authority))
    await server.start()
    try:
        reached = await reach(Address("localhost", port), server_name="enrol.starlings")
        assert spki_pin(x509.load_der_x509_certificate(reached.certificate_der)) == authority.pin
        assert reached.certificate_pem.startswith(b"-----BEGIN CERTIFICATE-----")
        # localhost may also be ::1, where nobody listens.
        assert reached.dialled == Address("127.0.0.1", port)
        assert "127.0.0.1" in reached.resolved
    finally:
        await server.stop(0)


async def test_dns():
    message = await _fails(Address("no-such-host.invalid", 7701), Phase.DNS)
    assert "Check the name" in message


async def test_a_name_that_is_none():
    await _fails(Address("x" * 80 + ".invalid", 7701), Phase.DNS)


async def test_tcp_refused():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    message = await _fails(Address("localhost", port), Phase.TCP)
    assert "(localhost is " in message
    assert "127.0.0.1: " in message
    assert "refused" in message.lower()
    assert "firewalls" in message


async def test_tls_against_something_else():
    async with _says(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert "check the port" in await _fails(address, Phase.TLS)
    async with _says(b"") as address:
        await _fails(address, Phase.TLS)


async def test_tls_against_silence():
    async with _says(None) as address:
        assert "no answer within 0.2 s" in await _fails(address, Phase.TLS, timeout_s=0.2)


async def test_a_dead_first_address_costs_a_moment_only(monkeypatch: pytest.MonkeyPatch):
    """A host with a broken IPv6 route: its AAAA record leads nowhere."""
    dialled: list[str] = []
    real = asyncio.open_connection

    async def open_connection(host, port, **options):
        dialled.append(host)
        if ":" in host:
            await asyncio.sleep(3600)
        return await real(host, port, **options)

    async def resolve(address, timeout_s):
        return ("2001:db8::1", "2001:db8::2", "127.0.0.1")

    monkeypatch.setattr(connect, "_resolve", resolve)
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    async with _says(b"") as address:
        with pytest.raises(Unreachable) as failed:
            await reach(Address("train.example.org", address.port), timeout_s=5)
    assert failed.value.phase is Phase.TLS  # so IPv4 was reached
    assert dialled == ["2001:db8::1", "127.0.0.1"]


def test_families_alternate():
    assert connect._alternating(("a:1", "a:2", "1", "2", "3")) == ["a:1", "1", "a:2", "2", "3"]
    assert connect._alternating(("1", "a:1")) == ["1", "a:1"]


# ------------------------------------------------------------------ diagnosis


async def test_diagnosis_of_each_phase(authority: CertificateAuthority):
    owner = authority.issue_identity(OWNER, time.time())
    assert (await diagnose(Address("no-such-host.invalid", 1), owner)).phase is Phase.DNS
    async with _says(b"SSH-2.0-x\r\n") as address:
        assert (await diagnose(address, owner)).phase is Phase.TLS
    stranger = CertificateAuthority.create("job", time.time())
    async with _mutual_tls(stranger.issue_identity(COORDINATOR, time.time())) as address:
        error = await diagnose(address, owner)
        assert error.phase is Phase.TLS
        assert "certificate replaced by a proxy, or the coordinator was set up anew?" in str(error)
    async with _mutual_tls(authority.issue_identity(KEEPER, time.time())) as address:
        assert "another member of this job" in str(await diagnose(address, owner))
    async with _mutual_tls(authority.issue_identity(COORDINATOR, time.time())) as address:
        error = await diagnose(address, authority.issue_identity(OWNER, time.time() - 9e5))
        assert error.phase is Phase.AUTHORISATION
        assert "expired" in str(error)


async def test_foreign_names_cannot_drive_a_terminal(authority: CertificateAuthority):
    evil = CertificateAuthority.create("\x1b[2J\x07evil", time.time())
    assert "\x1b" not in connect.describe_certificate(evil.certificate)
