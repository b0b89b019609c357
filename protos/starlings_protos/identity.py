"""Keys, ids and certificates: who a process is, on the wire and on disk.

Certificates name ids, never addresses. A worker's id is derived from its key, so the same key is always the same
worker, and nobody can ask for another's id. Signing is in authority.py; channels.py uses all this for TLS.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from starlings_protos.errors import PeerFault, UsageError
from starlings_protos.private_files import make_private_directory, write_private

# gRPC's TLS refuses Ed25519 keys; every TLS stack takes P-256.
CURVE = ec.SECP256R1
PEM_LIMIT_BYTES = 16 << 10

ENROLMENT_NAME = "enrol.starlings"
COORDINATOR_NAME = "coordinator.starlings"
_SUFFIX = ".w.starlings"

# All that `cryptography` raises for bytes that are not what they should be.
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion)


class Role(enum.StrEnum):
    """The certificate's organisational unit: what its holder may call."""

    WORKER = "worker"
    OWNER = "owner"
    KEEPER = "keeper"
    OBSERVER = "observer"
    COORDINATOR = "coordinator"
    # The coordinator's own relay; workers that relay are workers.
    RELAY = "relay"


_ID_OF_ROLE = {
    Role.WORKER: re.compile(r"w[0-9a-f]{16}"),
    Role.OBSERVER: re.compile(r"o[0-9a-f]{16}"),
    Role.OWNER: re.compile("owner"),
    Role.KEEPER: re.compile("keeper"),
    Role.COORDINATOR: re.compile("coordinator"),
    Role.RELAY: re.compile("relay"),
}


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a verified certificate says: CN and OU, held together with its SAN.

    Raises:
        PeerFault: at construction, an id that the role cannot have.
    """

    id: str
    role: Role

    def __post_init__(self) -> None:
        if not _ID_OF_ROLE[self.role].fullmatch(self.id):
            raise PeerFault(f"{self.id!r} is no id of a {self.role.value}")

    @property
    def server_name(self) -> str:
        """The certificate's only SAN, and what a TLS client must expect."""
        return COORDINATOR_NAME if self.role is Role.COORDINATOR else f"{self.id}{_SUFFIX}"


OWNER = PeerIdentity("owner", Role.OWNER)
KEEPER = PeerIdentity("keeper", Role.KEEPER)
COORDINATOR = PeerIdentity("coordinator", Role.COORDINATOR)
RELAY = PeerIdentity("relay", Role.RELAY)


def server_name_of(worker_id: str) -> str:
    """The TLS name of a worker, of the keeper or of the coordinator's relay, for a client that knows only the id.

    Raises:
        ValueError: no such id can exist.
    """
    if not (_ID_OF_ROLE[Role.WORKER].fullmatch(worker_id) or worker_id in (KEEPER.id, RELAY.id)):
        raise ValueError(f"{worker_id!r} is neither a worker's id nor the keeper's nor the relay's")
    return f"{worker_id}{_SUFFIX}"


# ------------------------------------------------------------------ keys


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(CURVE())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PKCS#8, not encrypted: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_from_pem(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Raises:
    UsageError: not an unencrypted P-256 key.
    """
    try:
        key = serialization.load_pem_private_key(pem, None)
    except _UNREADABLE:
        raise UsageError("this is no unencrypted private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVE):
        raise UsageError("the private key is not of the curve P-256")
    return key


def spki_der(public_key: ec.EllipticCurvePublicKey) -> bytes:
    return public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def key_id(public_key: ec.EllipticCurvePublicKey, role: Role = Role.WORKER) -> str:
    """ "w" (an observer: "o") and the first 16 hex digits of the SHA-256 of the key's SubjectPublicKeyInfo."""
    letter = {Role.WORKER: "w", Role.OBSERVER: "o"}[role]
    return letter + hashlib.sha256(spki_der(public_key)).hexdigest()[:16]


def public_key_from_der(der: bytes) -> ec.EllipticCurvePublicKey:
    """Raises:
    PeerFault: not a P-256 SubjectPublicKeyInfo.
    """
    try:
        key = serialization.load_der_public_key(der)
    except _UNREADABLE:
        raise PeerFault("not a public key in DER") from None
    return _p256(key, "public key")


def _p256(key: object, what: str) -> ec.EllipticCurvePublicKey:
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVE):
        raise PeerFault(f"the {what} is not of the curve P-256")
    return key


# ------------------------------------------------------------------ certificate requests


def make_csr(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A PKCS#10 request, PEM. It names nothing: the authority decides on the names."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_csr(pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a request whose self-signature holds. Everything else in it is ignored.

    Raises:
        PeerFault: not a request, not P-256, or signed by another key.
    """
    if len(pem) > PEM_LIMIT_BYTES:
        raise PeerFault(f"the certificate request has {len(pem)} bytes, above {PEM_LIMIT_BYTES}")
    try:
        request = x509.load_pem_x509_csr(pem)
        # The curve first: checking a signature of an exotic key may cost a lot.
        key = _p256(request.public_key(), "certificate request's key")
        valid = request.is_signature_valid
    except _UNREADABLE:
        raise PeerFault("this is no certificate request in PEM") from None
    if not valid:
        raise PeerFault("the certificate request is not signed by its own key")
    return key


# ------------------------------------------------------------------ certificates


def read_certificate(pem: bytes) -> x509.Certificate:
    """Raises:
    PeerFault: not exactly one P-256 certificate in PEM.
    """
    if len(pem) > PEM_LIMIT_BYTES:
        raise PeerFault(f"the certificate has {len(pem)} bytes, above {PEM_LIMIT_BYTES}")
    try:
        found = x509.load_pem_x509_certificates(pem)
        if len(found) != 1:
            raise PeerFault(f"{len(found)} certificates where one was expected")
        _p256(found[0].public_key(), "certificate's key")
    except _UNREADABLE:
        raise PeerFault("this is no certificate in PEM") from None
    return found[0]


def certificate_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    return _p256(certificate.public_key(), "certificate's key")


def spki_pin(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate's SubjectPublicKeyInfo, base64url without padding: 43 characters."""
    digest = hashlib.sha256(
        certificate.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    ).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the whole certificate, hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether `ca` signed `certificate`; its validity in time is another question."""
    try:
        certificate.verify_directly_issued_by(ca)
    except _UNREADABLE:
        return False
    return True


def validity(certificate: x509.Certificate) -> tuple[float, float]:
    """not_before and not_after, seconds since 1970."""
    return _seconds(certificate.not_valid_before_utc), _seconds(certificate.not_valid_after_utc)


def _seconds(moment: datetime) -> float:
    return moment.timestamp()


@lru_cache(maxsize=4096)
def identity_of_certificate(pem: bytes) -> PeerIdentity:
    """Whom a certificate names. The caller (TLS, or `is_issued_by`) vouches for its signature.

    Raises:
        PeerFault: CN, OU and SAN are not exactly those of one of our certificates.
    """
    certificate = read_certificate(pem)
    try:
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        (unit,) = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        identity = PeerIdentity(str(name.value), Role(str(unit.value)))
        san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (*_UNREADABLE, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        raise PeerFault("the certificate names no id and role of ours") from None
    if list(san) != [x509.DNSName(identity.server_name)]:
        raise PeerFault(f"the certificate of {identity.id} carries other names too")
    return identity


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that a process needs to prove who it is, and to check others. `repr` shows no key."""

    peer: PeerIdentity
    key_pem: bytes
    certificate_pem: bytes
    ca_pem: bytes

    def __repr__(self) -> str:
        return f"Identity({self.peer.id}, {self.peer.role.value})"

    @property
    def id(self) -> str:
        return self.peer.id

    @property
    def not_after_s(self) -> float:
        return validity(read_certificate(self.certificate_pem))[1]

    @property
    def renew_at_s(self) -> float:
        """Two thirds of the certificate's life, seconds since 1970."""
        not_before_s, not_after_s = validity(read_certificate(self.certificate_pem))
        return not_before_s + (not_after_s - not_before_s) * 2 / 3

    def is_due(self, now_s: float) -> bool:
        """Whether a new certificate is wanted at `now_s`, seconds since 1970: two thirds of its life are over, or it
        has not begun. The latter after a clock came back that was ahead when the certificate was made.
        """
        not_before_s, _ = validity(read_certificate(self.certificate_pem))
        return not not_before_s <= now_s < self.renew_at_s

    @classmethod
    def from_pem(cls, key_pem: bytes, certificate_pem: bytes, ca_pem: bytes) -> Identity:
        """Checked to belong together.

        Raises:
            UsageError: a key that is none, or not the certificate's.
            PeerFault: a certificate that is none of ours, or of another CA.
        """
        certificate = read_certificate(certificate_pem)
        if spki_der(key_from_pem(key_pem).public_key()) != spki_der(certificate_key(certificate)):
            raise UsageError("key and certificate do not belong together")
        if not is_issued_by(certificate, read_certificate(ca_pem)):
            raise PeerFault("the certificate was issued by another CA")
        return cls(identity_of_certificate(certificate_pem), key_pem, certificate_pem, ca_pem)

    @classmethod
    def load(cls, directory: Path) -> Identity:
        """From `id.key`, `id.pem` and `ca.pem` in `directory`.

        Raises:
            UsageError: a file is absent, unreadable, or damaged; says which directory.
        """
        try:
            pems = [(directory / name).read_bytes() for name in ("id.key", "id.pem", "ca.pem")]
            return cls.from_pem(*pems)
        except OSError as error:
            raise UsageError(f"No identity in {directory} ({error.strerror}: {error.filename}).") from None
        except (UsageError, PeerFault) as error:
            raise UsageError(f"The identity in {directory} is damaged: {error}.") from None

    def save(self, directory: Path) -> None:
        """Writes the three files, each 0600 and in one piece; the key first, so that no certificate lacks its key."""
        make_private_directory(directory)
        write_private(directory / "id.key", self.key_pem)
        write_private(directory / "ca.pem", self.ca_pem)
        write_private(directory / "id.pem", self.certificate_pem)
