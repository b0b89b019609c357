"""The job's own certificate authority: made once per job, it signs short certificates and names them by role and id.

Its certificate is also the TLS certificate of the enrolment port (SAN `enrol.starlings`): what a worker reads there is
what the invite's pin names.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from starlings_protos.errors import PeerFault, UsageError
from starlings_protos.identity import (
    ENROLMENT_NAME,
    Identity,
    PeerIdentity,
    Role,
    certificate_key,
    is_issued_by,
    key_from_pem,
    key_to_pem,
    new_key,
    read_certificate,
    spki_der,
    spki_pin,
)
from starlings_protos.private_files import make_private_directory, write_private

CERTIFICATE_LIFETIME_S = 7 * 86400.0
CA_LIFETIME_S = 20 * 365 * 86400.0
# A fresh certificate is already valid for clocks that are behind.
BACKDATED_S = 3600.0
# A broker's files are renewed by hand.
BROKER_LIFETIME_S = 365 * 86400.0
# Names that our own servers go by: no broker may have one.
_OUR_DOMAIN = "starlings"

_LABEL = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")

_SERVES = frozenset({Role.WORKER, Role.KEEPER, Role.COORDINATOR, Role.RELAY})
# The coordinator calls its bus's broker.
_CALLS = frozenset(Role)


class CertificateAuthority:
    """Key and certificate of a job's CA, checked to belong together."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate_pem: bytes) -> None:
        self.certificate = read_certificate(certificate_pem)
        if spki_der(key.public_key()) != spki_der(certificate_key(self.certificate)):
            raise UsageError("the CA's key and certificate do not belong together")
        self._key = key
        self.certificate_pem = certificate_pem

    @classmethod
    def create(
        cls, job: str, now_s: float, key: ec.EllipticCurvePrivateKey | None = None
    ) -> CertificateAuthority:
        """A new authority, or a new certificate for the `key` of an old one; `now_s` is seconds since 1970."""
        key = key or new_key()
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "starlings"),
                x509.NameAttribute(NameOID.COMMON_NAME, f"starlings job {job}"[:64]),
            ]
        )
        builder = (
            _builder(name, name, key.public_key(), now_s, CA_LIFETIME_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(ENROLMENT_NAME)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        certificate = builder.sign(key, hashes.SHA256())
        return cls(key, certificate.public_bytes(serialization.Encoding.PEM))

    @classmethod
    def load_or_create(cls, directory: Path, job: str, now_s: float) -> CertificateAuthority:
        """From `ca.key` and `ca.pem` in `directory`, made there when absent.

        With the key alone (a crash in between, a lost file) a new certificate is made for it: the pin, and
        with it every invite and certificate handed out, stays good.

        Raises:
            UsageError: damaged, or a certificate without its key. A new CA would make all that was handed out
                worthless, so it never comes silently.
        """
        key_path, certificate_path = directory / "ca.key", directory / "ca.pem"
        try:
            if certificate_path.exists():
                return cls(key_from_pem(key_path.read_bytes()), certificate_path.read_bytes())
            key = key_from_pem(key_path.read_bytes()) if key_path.exists() else None
        except OSError as error:
            raise UsageError(
                f"The job's CA in {directory} cannot be read ({error.strerror}: {error.filename}): restore it from a "
                f"copy, or delete {directory} to begin with a new one; workers then need new invites."
            ) from None
        except (UsageError, PeerFault) as error:
            raise UsageError(
                f"The job's CA in {directory} is damaged ({error}): restore it from a copy, or delete {directory} "
                "to begin with a new one; workers then need new invites."
            ) from None
        authority = cls.create(job, now_s, key)
        make_private_directory(directory)
        write_private(key_path, authority.key_pem)
        write_private(certificate_path, authority.certificate_pem)
        return authority

    @property
    def key_pem(self) -> bytes:
        return key_to_pem(self._key)

    @property
    def pin(self) -> str:
        return spki_pin(self.certificate)

    def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        peer: PeerIdentity,
        now_s: float,
        lifetime_s: float = CERTIFICATE_LIFETIME_S,
    ) -> bytes:
        """A certificate for `peer`, PEM, valid from an hour before `now_s` for `lifetime_s` after it."""
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, peer.role.value),
                x509.NameAttribute(NameOID.COMMON_NAME, peer.id),
            ]
        )
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if peer.role in _SERVES else []
        usages += [ExtendedKeyUsageOID.CLIENT_AUTH] if peer.role in _CALLS else []
        builder = (
            _builder(subject, self.certificate.subject, public_key, now_s, lifetime_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(peer.server_name)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue_identity(
        self, peer: PeerIdentity, now_s: float, lifetime_s: float = CERTIFICATE_LIFETIME_S
    ) -> Identity:
        """A new key with its certificate, for a process of the owner's machine."""
        key = new_key()
        certificate_pem = self.issue(key.public_key(), peer, now_s, lifetime_s)
        return Identity(peer, key_to_pem(key), certificate_pem, self.certificate_pem)

    def issue_broker(
        self,
        public_key: ec.EllipticCurvePublicKey,
        hosts: Sequence[str],
        now_s: float,
        lifetime_s: float = BROKER_LIFETIME_S,
    ) -> bytes:
        """A certificate for an MQTT broker at `hosts` (DNS names or IP addresses), PEM.

        It serves TLS under these names and nothing else: it names no id and no role, and no port of ours takes it.

        Raises:
            ValueError: no hosts, or one that no broker can have.
        """
        names = [_host_name(host) for host in hosts]
        if not names:
            raise ValueError("a broker needs a name or an address")
        subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "broker")])
        builder = (
            _builder(subject, self.certificate.subject, public_key, now_s, lifetime_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def has_issued(self, certificate: x509.Certificate) -> bool:
        return is_issued_by(certificate, self.certificate)


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    labels = host.lower().rstrip(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{host!r} is no host name or address (without a port)")
    if labels[-1] == _OUR_DOMAIN:
        raise ValueError(f"{host!r} cannot be a broker's name: Starlings uses .{_OUR_DOMAIN} itself")
    return x509.DNSName(".".join(labels))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now_s: float,
    lifetime_s: float,
) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(now_s, UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=BACKDATED_S))
        .not_valid_after(now + timedelta(seconds=lifetime_s))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
