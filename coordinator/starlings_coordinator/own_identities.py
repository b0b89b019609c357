"""The CA, the assignment key, and the certificates of the owner's own processes: coordinator, keeper, commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import UsageError
from starlings_protos.identity import (
    COORDINATOR,
    KEEPER,
    OWNER,
    Identity,
    PeerIdentity,
    key_from_pem,
    key_to_pem,
    new_key,
)
from starlings_protos.private_files import write_private


class OwnIdentities:
    """Keeps `ca/` and `owner/` of a job's directory. Thread-safe.

    Raises:
        UsageError: something in `ca/` is damaged.
    """

    def __init__(self, directory: Path, job: str, wall: Callable[[], float]) -> None:
        self._directory = directory
        self._wall = wall
        self._lock = threading.Lock()
        self._current: dict[PeerIdentity, Identity] = {}
        self.ca = CertificateAuthority.load_or_create(directory / "ca", job, wall())
        self.assignment_key = _load_or_create_key(directory / "ca" / "assignment.key")

    def get(self, peer: PeerIdentity) -> Identity:
        """COORDINATOR's, KEEPER's or OWNER's; a new one when it is due.

        OWNER's is also written to `owner/`, for the commands of this machine.
        """
        if peer not in (COORDINATOR, KEEPER, OWNER):
            raise ValueError(f"{peer.id} enrols by an invite")
        with self._lock:
            known = self._current.get(peer)
            if known is None or known.is_due(self._wall()):
                known = self.ca.issue_identity(peer, self._wall())
                if peer == OWNER:
                    known.save(self._directory / "owner")
                self._current[peer] = known
            return known

    def renew(self) -> tuple[PeerIdentity, ...]:
        """Whose certificate was due and is new now, of those asked for before."""
        before = dict(self._current)
        return tuple(peer for peer in before if self.get(peer) is not before[peer])


def _load_or_create_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        key = new_key()
        write_private(path, key_to_pem(key))
        return key
    try:
        return key_from_pem(path.read_bytes())
    except UsageError as error:
        raise UsageError(f"{path} is damaged ({error}): delete it, a new one is made then.") from None
