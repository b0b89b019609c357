"""Keys, ids and certificates are what the other side expects, and damaged ones are refused in words."""

from __future__ import annotations

import os
import random
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import PeerFault, UsageError
from starlings_protos.identity import (
    COORDINATOR,
    KEEPER,
    OWNER,
    Identity,
    PeerIdentity,
    Role,
    identity_of_certificate,
    is_issued_by,
    key_from_pem,
    key_id,
    key_to_pem,
    make_csr,
    new_key,
    public_key_from_der,
    read_certificate,
    read_csr,
    server_name_of,
    spki_der,
    spki_pin,
    validity,
)
from starlings_protos.private_files import write_private

NOW = 1_800_000_000.0
WEEK = 7 * 86400.0


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("a job", NOW)


def _worker(key: ec.EllipticCurvePrivateKey) -> PeerIdentity:
    return PeerIdentity(key_id(key.public_key()), Role.WORKER)


def test_an_id_follows_from_the_key():
    key = new_key()
    assert key_id(key.public_key()) == key_id(key_from_pem(key_to_pem(key)).public_key())
    digest = hashes.Hash(hashes.SHA256())
    digest.update(spki_der(key.public_key()))
    assert key_id(key.public_key()) == "w" + digest.finalize().hex()[:16]
    assert key_id(key.public_key(), Role.OBSERVER)[0] == "o"
    assert key_id(new_key().public_key()) != key_id(key.public_key())


def test_a_workers_certificate(authority: CertificateAuthority):
    key = new_key()
    peer = _worker(key)
    pem = authority.issue(key.public_key(), peer, NOW)
    certificate = read_certificate(pem)
    assert identity_of_certificate(pem) == peer
    assert is_issued_by(certificate, authority.certificate)
    assert validity(certificate) == (NOW - 3600, NOW + WEEK)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(f"{peer.id}.w.starlings")]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        (OWNER, "owner.w.starlings"),
        (KEEPER, "keeper.w.starlings"),
        (COORDINATOR, "coordinator.starlings"),
        (PeerIdentity("o" + "0" * 16, Role.OBSERVER), "o0000000000000000.w.starlings"),
    ],
)
def test_names_of_the_other_roles(authority: CertificateAuthority, peer: PeerIdentity, name: str):
    identity = authority.issue_identity(peer, NOW)
    assert (identity.peer, identity.peer.server_name) == (peer, name)
    assert Identity.from_pem(identity.key_pem, identity.certificate_pem, identity.ca_pem) == identity
    assert "PRIVATE" not in repr(identity)


def test_only_those_who_serve_may_serve(authority: CertificateAuthority):
    serves, calls = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    for peer, usages in (
        (OWNER, [calls]),
        (PeerIdentity("o" + "0" * 16, Role.OBSERVER), [calls]),
        # It calls the broker.
        (COORDINATOR, [serves, calls]),
    ):
        certificate = read_certificate(authority.issue_identity(peer, NOW).certificate_pem)
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == usages


def test_the_ca_is_the_enrolment_server(authority: CertificateAuthority):
    names = authority.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["enrol.starlings"]
    assert is_issued_by(authority.certificate, authority.certificate)
    assert authority.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert len(authority.pin) == 43
    assert authority.pin == spki_pin(authority.certificate)


@pytest.mark.parametrize(
    ("id", "role"),
    [
        ("w123", Role.WORKER),
        ("owner", Role.WORKER),
        ("w" + "0" * 16, Role.OWNER),
        ("w" + "g" * 16, Role.WORKER),
        ("w" + "0" * 16 + "\n", Role.WORKER),
        ("keeper.w.starlings", Role.KEEPER),
    ],
)
def test_ids_that_cannot_be(id: str, role: Role):
    with pytest.raises(PeerFault):
        PeerIdentity(id, role)


def test_server_names_come_only_from_ids():
    assert server_name_of("w" + "0" * 16) == "w0000000000000000.w.starlings"
    assert server_name_of("keeper") == "keeper.w.starlings"
    for bad in ("owner", "coordinator", "evil.example.org", ""):
        with pytest.raises(ValueError, match="neither"):
            server_name_of(bad)


def test_two_thirds(authority: CertificateAuthority):
    identity = authority.issue_identity(KEEPER, NOW)
    assert identity.not_after_s == NOW + WEEK
    assert identity.renew_at_s == pytest.approx(NOW - 3600 + (WEEK + 3600) * 2 / 3)
    assert [
        identity.is_due(t) for t in (NOW - 3601, NOW - 3600, identity.renew_at_s - 1, identity.renew_at_s)
    ] == [
        # Made while the clock was ahead, which has come back: nobody would accept it for long.
        True,
        False,
        False,
        True,
    ]


# ------------------------------------------------------------------ requests


def test_a_request_proves_its_key():
    key = new_key()
    assert spki_der(read_csr(make_csr(key))) == spki_der(key.public_key())


def test_a_request_signed_by_another_key_is_refused():
    pem = make_csr(new_key())
    request = x509.load_pem_x509_csr(pem)
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    broken = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(PeerFault, match="request"):
        read_csr(broken)


def _foreign_request(key) -> bytes:
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "key",
    [
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP384R1()),
    ],
    ids=["ed25519", "rsa", "p384"],
)
def test_other_keys_than_p256_are_refused(key):
    with pytest.raises(PeerFault, match="P-256"):
        read_csr(_foreign_request(key))
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(UsageError, match="P-256"):
        key_from_pem(pem)
    der = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with pytest.raises(PeerFault, match="P-256"):
        public_key_from_der(der)


def test_names_in_a_request_are_ignored(authority: CertificateAuthority):
    key = new_key()
    wished = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "owner"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "owner"),
        ]
    )
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(wished)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("coordinator.starlings")]), critical=False)
    )
    request = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    public_key = read_csr(request)
    pem = authority.issue(public_key, PeerIdentity(key_id(public_key), Role.WORKER), NOW)
    assert identity_of_certificate(pem) == _worker(key)


# ------------------------------------------------------------------ bytes from outside


def test_random_and_mutated_bytes_never_crash(authority: CertificateAuthority):
    rng = random.Random(7)
    key = new_key()
    seeds = [
        authority.certificate_pem,
        authority.issue(key.public_key(), _worker(key), NOW),
        make_csr(key),
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ]
    parsers = (read_csr, read_certificate, identity_of_certificate)
    for turn in range(10_000):
        if turn % 2:
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            data = bytearray(rng.randbytes(rng.randrange(64)))
        try:
            rng.choice(parsers)(bytes(data))
        except PeerFault:
            continue


def test_long_input_is_refused_before_it_is_parsed():
    for parser in (read_csr, read_certificate):
        with pytest.raises(PeerFault, match="above"):
            parser(b"x" * (1 << 20))


def test_two_certificates_are_not_one(authority: CertificateAuthority):
    with pytest.raises(PeerFault, match="2 certificates"):
        read_certificate(authority.certificate_pem * 2)


def test_the_ca_itself_is_nobody(authority: CertificateAuthority):
    with pytest.raises(PeerFault, match="no id and role"):
        identity_of_certificate(authority.certificate_pem)


# ------------------------------------------------------------------ files


def test_an_identity_on_disk(authority: CertificateAuthority, tmp_path: Path):
    identity = authority.issue_identity(OWNER, NOW)
    identity.save(tmp_path / "owner")
    assert Identity.load(tmp_path / "owner") == identity
    assert sorted(p.name for p in (tmp_path / "owner").iterdir()) == ["ca.pem", "id.key", "id.pem"]
    if sys.platform != "win32":
        assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "owner").iterdir()} == {0o600}


def test_identities_that_do_not_fit(authority: CertificateAuthority, tmp_path: Path):
    with pytest.raises(UsageError, match="No identity in"):
        Identity.load(tmp_path)
    mine, other = authority.issue_identity(OWNER, NOW), authority.issue_identity(KEEPER, NOW)
    with pytest.raises(UsageError, match="do not belong together"):
        Identity.from_pem(other.key_pem, mine.certificate_pem, mine.ca_pem)
    stranger = CertificateAuthority.create("a job", NOW)
    with pytest.raises(PeerFault, match="another CA"):
        Identity.from_pem(mine.key_pem, mine.certificate_pem, stranger.certificate_pem)
    mine.save(tmp_path)
    (tmp_path / "id.pem").write_bytes(b"rubbish")
    with pytest.raises(UsageError, match="damaged"):
        Identity.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "id.key"
    write_private(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["id.key"]


def test_a_ca_is_made_once_and_survives_losing_its_certificate(tmp_path: Path):
    first = CertificateAuthority.load_or_create(tmp_path / "ca", "job", NOW)
    again = CertificateAuthority.load_or_create(tmp_path / "ca", "job", NOW + 5)
    assert again.certificate_pem == first.certificate_pem
    identity = first.issue_identity(KEEPER, NOW)
    (tmp_path / "ca" / "ca.pem").unlink()
    renewed = CertificateAuthority.load_or_create(tmp_path / "ca", "job", NOW + 9)
    assert renewed.pin == first.pin
    assert renewed.has_issued(read_certificate(identity.certificate_pem))


def test_a_damaged_ca_is_never_replaced_silently(tmp_path: Path):
    first = CertificateAuthority.load_or_create(tmp_path / "ca", "job", NOW)
    (tmp_path / "ca" / "ca.key").write_bytes(key_to_pem(new_key()))
    with pytest.raises(UsageError, match="damaged"):
        CertificateAuthority.load_or_create(tmp_path / "ca", "job", NOW)
    (tmp_path / "ca" / "ca.key").unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        CertificateAuthority.load_or_create(tmp_path / "ca", "job", NOW)
    assert (tmp_path / "ca" / "ca.pem").read_bytes() == first.certificate_pem
