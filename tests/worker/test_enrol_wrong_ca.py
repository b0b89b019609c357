"""With a wrong certificate the token never leaves the worker, however the server pretends."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import ExitCode, Phase, Unreachable
from starlings_protos.identity import PeerIdentity, Role, key_id, key_to_pem, new_key
from starlings_protos.invite import Address
from starlings_worker.enrol import enrol
from support.enrolment_server import Recorder, enrolment_world, forwarder, pretender


def _nothing_leaked(recorder: Recorder) -> None:
    # Not even a byte: the handshake ends on the worker's side.
    assert recorder.received == b""


async def test_another_coordinators_certificate(tmp_path: Path):
    other = CertificateAuthority.create("job", time.time())
    async with (
        enrolment_world(tmp_path / "job") as world,
        pretender(tmp_path, other.key_pem, other.certificate_pem) as recorder,
    ):
        invite = world.invite(addresses=(Address("127.0.0.1", recorder.port),))
        with pytest.raises(Unreachable, match="not the one that made this invite") as failed:
            await enrol(invite, tmp_path / "w")
        assert (failed.value.exit_code, failed.value.phase) == (ExitCode.INVITE_WRONG, Phase.TLS)
        assert "Nothing was sent to it" in str(failed.value)
        _nothing_leaked(recorder)
        # Nothing is left behind either, and the real coordinator heard of nothing.
        assert not (tmp_path / "w").exists()
        assert world.events == []


def _proxy_certificate() -> tuple[bytes, bytes]:
    key = new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Example Corp TLS Inspection")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )
    certificate = builder.sign(key, hashes.SHA256())
    return key_to_pem(key), certificate.public_bytes(serialization.Encoding.PEM)


async def test_a_tls_inspecting_proxy(tmp_path: Path):
    async with (
        enrolment_world(tmp_path / "job") as world,
        pretender(tmp_path, *_proxy_certificate()) as recorder,
    ):
        invite = world.invite(addresses=(Address("127.0.0.1", recorder.port),))
        with pytest.raises(Unreachable, match=r"certificate replaced by a proxy\?") as failed:
            await enrol(invite, tmp_path / "w")
        assert failed.value.exit_code == ExitCode.UNREACHABLE
        assert "Example Corp TLS Inspection" in str(failed.value)
        _nothing_leaked(recorder)


@pytest.mark.parametrize("insider", [False, True], ids=["stranger", "another worker of the job"])
async def test_bait_and_switch(tmp_path: Path, insider: bool):
    """The first connection shows the right certificate, the second goes elsewhere: nothing is sent there either."""
    async with enrolment_world(tmp_path / "job") as world:
        if insider:
            key = new_key()
            peer = PeerIdentity(key_id(key.public_key()), Role.WORKER)
            key_pem = key_to_pem(key)
            certificate_pem = world.authority.ca.issue(key.public_key(), peer, time.time())
        else:
            other = CertificateAuthority.create("job", time.time())
            key_pem, certificate_pem = other.key_pem, other.certificate_pem
        async with (
            pretender(tmp_path, key_pem, certificate_pem) as recorder,
            forwarder(lambda n: world.port if n == 1 else recorder.port) as port,
        ):
            invite = world.invite(addresses=(Address("127.0.0.1", port),))
            with pytest.raises(Unreachable, match="authorisation failed"):
                await enrol(invite, tmp_path / "w")
            _nothing_leaked(recorder)
            assert world.events == []


async def test_a_certificate_with_the_right_names_and_dates_but_another_key(tmp_path: Path):
    """Only the key counts: a copy of everything else does not help."""
    async with enrolment_world(tmp_path / "job") as world:
        copy = CertificateAuthority.create(world.authority.job, time.time())
        async with pretender(tmp_path, copy.key_pem, copy.certificate_pem) as recorder:
            invite = replace(world.invite(), addresses=(Address("127.0.0.1", recorder.port),))
            with pytest.raises(Unreachable):
                await enrol(invite, tmp_path / "w")
            _nothing_leaked(recorder)


async def test_a_pretender_among_the_addresses_does_not_keep_anybody_out(tmp_path: Path):
    other = CertificateAuthority.create("job", time.time())
    async with (
        enrolment_world(tmp_path / "job") as world,
        pretender(tmp_path, other.key_pem, other.certificate_pem) as recorder,
    ):
        addresses = (Address("127.0.0.1", recorder.port), Address("127.0.0.1", world.port))
        invite = world.invite(addresses=addresses)
        membership = (await enrol(invite, tmp_path / "w")).membership
        assert membership.enrolment_addresses[0] == addresses[1]
        _nothing_leaked(recorder)
