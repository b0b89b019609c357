"""Renewing a certificate, also an expired one: the request proves the certificate's own key, nothing else is needed."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from starlings_protos import control_pb2
from starlings_protos.errors import PeerFault
from starlings_protos.identity import (
    Identity,
    certificate_key,
    fingerprint,
    key_from_pem,
    make_csr,
    read_certificate,
    read_csr,
    spki_der,
)


def make_renewal(identity: Identity, wall_time_s: float) -> control_pb2.RenewRequest:
    """`wall_time_s`: this machine's clock, seconds since 1970."""
    key = key_from_pem(identity.key_pem)
    text = _proof_text(read_certificate(identity.certificate_pem), wall_time_s)
    return control_pb2.RenewRequest(
        certificate_pem=identity.certificate_pem,
        csr_pem=make_csr(key),
        proof=key.sign(text, ec.ECDSA(hashes.SHA256())),
        wall_time_s=wall_time_s,
    )


def check_renewal(request: control_pb2.RenewRequest) -> x509.Certificate:
    """The certificate to renew, whose key surely made the request. Who issued it is for the caller to check.

    Raises:
        PeerFault: which part does not hold.
    """
    certificate = read_certificate(request.certificate_pem)
    key = certificate_key(certificate)
    if spki_der(read_csr(request.csr_pem)) != spki_der(key):
        raise PeerFault("the certificate request is for another key than the certificate")
    if len(request.proof) > 80:
        raise PeerFault("the proof is too long for a signature")
    try:
        key.verify(request.proof, _proof_text(certificate, request.wall_time_s), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise PeerFault("the proof was not made with the certificate's key") from None
    return certificate


def _proof_text(certificate: x509.Certificate, wall_time_s: float) -> bytes:
    return f"starlings-renew:{wall_time_s:.3f}:{fingerprint(certificate)}".encode()
