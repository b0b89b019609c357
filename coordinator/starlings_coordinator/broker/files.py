"""Writes a broker's directory: configuration, access list, the CA's certificate, its own certificate and key."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlings_coordinator import tokens
from starlings_coordinator.broker.configuration import (
    ACCESS,
    CA,
    CERTIFICATE,
    CONFIGURATION,
    KEY,
    RETAINED,
    BrokerSettings,
    access_list,
    mosquitto_conf,
)
from starlings_coordinator.token_journal import FileJournal
from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import UsageError
from starlings_protos.identity import Role, key_to_pem, new_key, read_certificate, validity
from starlings_protos.private_files import make_private_directory, write_private

# The account that Mosquitto changes to when root starts it and its configuration names no other.
MOSQUITTO = "mosquitto"


@dataclass(frozen=True, slots=True)
class Access:
    """Whom the access list has to name."""

    observers: tuple[str, ...]
    revoked: tuple[str, ...]


def read_access(job_directory: Path) -> Access:
    """From the tokens of a job, whose coordinator may be running meanwhile.

    Raises:
        UsageError: the file is damaged.
    """
    table = tokens.fold(FileJournal(job_directory / "ca" / "tokens.jsonl").peek())
    observers = {
        member
        for token in table.tokens.values()
        if token.created.role == Role.OBSERVER
        for member in token.workers
    }
    return Access(tuple(sorted(observers)), tuple(sorted(table.revoked_workers)))


def write_broker_files(
    directory: Path,
    settings: BrokerSettings,
    authority: CertificateAuthority,
    hosts: Sequence[str],
    access: Access,
    *,
    now_s: float,
    replace: bool = False,
) -> float:
    """Writes everything, files with mode 0600, and hands them over to `settings.account` where that is another one.

    A server certificate is made anew each time; what the broker has retained stays.

    Returns:
        When the server certificate expires, seconds since 1970.

    Raises:
        ValueError: a host that no certificate can name.
        UsageError: there is a configuration already and `replace` is not set; or the account cannot get there.
        OSError: disk full, no permission.
    """
    if not replace and (directory / CONFIGURATION).exists():
        raise UsageError(
            f"{directory} has a broker's configuration already: choose another directory, or --force."
        )
    key = new_key()
    certificate = authority.issue_broker(key.public_key(), hosts, now_s)
    owner = _account_ids(settings.account)
    make_private_directory(directory)
    make_private_directory(directory / RETAINED)
    files = {
        KEY: key_to_pem(key),
        CERTIFICATE: certificate,
        CA: authority.certificate_pem,
        ACCESS: access_list(settings.job, access.observers, access.revoked).encode(),
        CONFIGURATION: mosquitto_conf(settings).encode(),
    }
    for name, content in files.items():
        write_private(directory / name, content)
    if sys.platform != "win32" and owner is not None:
        for path in (directory, directory / RETAINED, *(directory / name for name in files)):
            os.chown(path, *owner)
        _check_way(directory.absolute(), settings.account, *owner)
    return validity(read_certificate(certificate))[1]


def default_account() -> str:
    """Root's broker runs as `mosquitto` where there is such an account; everybody else's as themselves."""
    if sys.platform == "win32":
        return ""
    import pwd

    try:
        return (pwd.getpwnam(MOSQUITTO) if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())).pw_name
    except KeyError:
        return ""


def _account_ids(account: str) -> tuple[int, int] | None:
    """Whom the files must be given to; None when they are that account's anyway.

    Raises:
        UsageError: no such account, or only root could give files to it.
    """
    if sys.platform == "win32" or not account:
        return None
    import pwd

    try:
        entry = pwd.getpwnam(account)
    except KeyError:
        raise UsageError(
            f"There is no account {account!r} here: install Mosquitto, or choose another --account."
        ) from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise UsageError(
            f"Only root can give files to {account!r}: leave --account out, or run this as root."
        )
    return entry.pw_uid, entry.pw_gid


def _check_way(directory: Path, account: str, user_id: int, group_id: int) -> None:
    """Raises:
    UsageError: a folder above `directory` lets nobody through but its owner.
    """
    for folder in directory.parents:
        found = folder.stat()
        bit = 0o100 if found.st_uid == user_id else 0o010 if found.st_gid == group_id else 0o001
        if not found.st_mode & bit:
            raise UsageError(
                f"{account!r} cannot get through {folder} to the broker's files: choose a directory elsewhere, such as "
                f"/var/lib/starlings-broker, or chmod o+x {folder}."
            )
