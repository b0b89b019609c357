"""What a worker's directory remembers of a job it joined: key, certificate, CA, and where the coordinator is.

An observer's is alike.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlings_protos.errors import UsageError
from starlings_protos.identity import Identity, read_certificate, spki_pin
from starlings_protos.invite import Address, parse_address
from starlings_protos.private_files import make_private_directory, write_private

# A coordinator may name this many addresses; more is no honest answer.
ADDRESS_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Membership:
    """Of one worker id in one job."""

    job: str
    identity: Identity
    # In the order to try.
    enrolment_addresses: tuple[Address, ...]
    control_addresses: tuple[Address, ...]
    # Of the job's MQTT bus; "" when it has none, or had none when the certificate was made.
    bus_url: str = ""

    @property
    def worker_id(self) -> str:
        return self.identity.id

    @property
    def pin(self) -> str:
        """Of the job's CA."""
        return spki_pin(read_certificate(self.identity.ca_pem))

    def with_identity(self, identity: Identity) -> Membership:
        return replace(self, identity=identity)

    def save(self, directory: Path) -> None:
        """The certificate last: a directory with `id.pem` is complete.

        Raises:
            OSError: disk full, no permission; what was there before still fits together.
        """
        make_private_directory(directory)
        write_private(directory / "worker.toml", _to_toml(self).encode())
        self.identity.save(directory)

    @classmethod
    def load(cls, directory: Path) -> Membership | None:
        """None when the worker has not joined yet.

        Raises:
            UsageError: a file is damaged; says which directory to delete.
        """
        if not (directory / "id.pem").exists():
            return None
        try:
            identity = Identity.load(directory)
            fields: Any = tomllib.loads((directory / "worker.toml").read_text("utf-8"))
            return cls(
                str(fields["job"]),
                identity,
                tuple(parse_address(text) for text in fields["enrolment"]),
                tuple(parse_address(text) for text in fields["control"]),
                str(fields.get("bus", "")),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(
                f"The worker's files in {directory} are damaged ({error}): delete that directory and join again with "
                "an invite."
            ) from None


def _to_toml(membership: Membership) -> str:
    # JSON's strings and lists of strings are TOML's too, as long as they are ASCII.
    lines = (
        "# Written by `starlings join` or `watch`; deleting this directory forgets the job.",
        f"job = {json.dumps(membership.job)}",
        f"worker_id = {json.dumps(membership.worker_id)}",
        f"enrolment = {json.dumps([str(a) for a in membership.enrolment_addresses])}",
        f"control = {json.dumps([str(a) for a in membership.control_addresses])}",
        f"bus = {json.dumps(membership.bus_url)}",
    )
    return "\n".join(lines) + "\n"
