"""Whether a worker can be reached from here: the question is asked of its own certificate, at every address at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cryptography import x509

from starlings_protos.connect import reach
from starlings_protos.errors import PeerFault, Unreachable
from starlings_protos.identity import (
    Identity,
    identity_of_certificate,
    is_issued_by,
    read_certificate,
    server_name_of,
)
from starlings_protos.invite import parse_address

TIMEOUT_S = 4.0


async def dial_back(
    worker_id: str, addresses: Sequence[str], identity: Identity, timeout_s: float = TIMEOUT_S
) -> tuple[tuple[str, ...], str]:
    """(the addresses at which that worker answers, what went wrong at the first of the others)."""

    async def attempt(address: str) -> str:
        try:
            reached = await reach(
                parse_address(address), server_name=server_name_of(worker_id), timeout_s=timeout_s
            )
            certificate = x509.load_der_x509_certificate(reached.certificate_der)
            if not is_issued_by(certificate, read_certificate(identity.ca_pem)):
                return f"{address}: something else than a worker of this job answers there"
            found = identity_of_certificate(reached.certificate_pem)
        except Unreachable as error:
            return f"{address}: {error.phase.value if error.phase else 'connecting'} failed: {error.cause}"
        except (ValueError, PeerFault) as error:
            return f"{address}: {error}"
        return "" if found.id == worker_id else f"{address}: {found.id} answers there"

    outcomes = await asyncio.gather(*map(attempt, addresses))
    reached = tuple(a for a, failure in zip(addresses, outcomes, strict=True) if not failure)
    return reached, next((failure for failure in outcomes if failure), "")
