"""Finding the coordinator that an invite's pin names: nobody else is told anything."""

from __future__ import annotations

import asyncio

from cryptography import x509

from starlings_protos.connect import TIMEOUT_S, Reached, describe_certificate, reach, refused_certificate
from starlings_protos.errors import ClockSkewed, ExitCode, PeerFault, Phase, Unreachable
from starlings_protos.identity import ENROLMENT_NAME, read_certificate, spki_pin, validity
from starlings_protos.invite import Address, spoken_duration, spoken_time

# The next address of an invite is tried after this long, also while an earlier one still hangs.
ADDRESS_DELAY_S = 0.5


async def find_coordinator(
    addresses: tuple[Address, ...], pin: str, now_s: float, *, timeout_s: float = TIMEOUT_S
) -> Reached:
    """The first address behind which somebody shows the certificate that the pin names; nothing is sent to anybody.

    Raises:
        Unreachable: none; says for each address how far it came.
        ClockSkewed: this machine's clock is before the certificate's first moment.
    """

    async def attempt(position: int, address: Address) -> Reached:
        await asyncio.sleep(position * ADDRESS_DELAY_S)
        reached = await reach(address, server_name=ENROLMENT_NAME, timeout_s=timeout_s)
        _check_pin(reached, pin)
        return reached

    tasks = [asyncio.create_task(attempt(i, a)) for i, a in enumerate(addresses)]
    failures: list[Unreachable] = []
    try:
        for done in asyncio.as_completed(tasks):
            try:
                reached = await done
            except Unreachable as error:
                failures.append(error)
            else:
                _check_validity(read_certificate(reached.certificate_pem), now_s)
                return reached
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise _joint(failures)


def _check_pin(reached: Reached, pin: str) -> None:
    """Raises:
    Unreachable: the certificate is not the one that the pin names.
    """
    try:
        certificate = x509.load_der_x509_certificate(reached.certificate_der)
        good = spki_pin(certificate) == pin
        if good:
            read_certificate(reached.certificate_pem)
    except (ValueError, TypeError, x509.InvalidVersion, PeerFault):
        raise refused_certificate(reached, "the server's certificate cannot be read") from None
    if good:
        return
    shown = describe_certificate(certificate)
    if _names_enrolment(certificate):
        error = refused_certificate(
            reached,
            f"a coordinator answers there, but not the one that made this invite (its certificate is {shown})",
            "Nothing was sent to it. If the owner has set the job up anew, ask for a new invite.",
        )
        error.exit_code = ExitCode.INVITE_WRONG
        raise error
    raise refused_certificate(
        reached,
        f"certificate replaced by a proxy? The server shows one {shown}, not the one that the invite names",
        "Nothing was sent to it. Try another network, or ask whoever runs this one to exempt the address from TLS "
        "inspection.",
    )


def _names_enrolment(certificate: x509.Certificate) -> bool:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return ENROLMENT_NAME in names.get_values_for_type(x509.DNSName)
    except (ValueError, x509.ExtensionNotFound):
        return False


def _check_validity(ca: x509.Certificate, now_s: float) -> None:
    """TLS would only say "not yet valid"; the pin vouches for the dates."""
    not_before_s, not_after_s = validity(ca)
    if now_s < not_before_s:
        raise ClockSkewed(
            f"This machine's clock ({spoken_time(now_s)}) is at least {spoken_duration(not_before_s - now_s)} behind: "
            "the job's certificate begins later. Set the clock (switch time synchronisation on), then join again."
        )
    if now_s > not_after_s:
        raise ClockSkewed(
            f"This machine's clock ({spoken_time(now_s)}) is past the end of the job's certificate "
            f"({spoken_time(not_after_s)}): if the clock is right, the owner must set the job up anew."
        )


def _joint(failures: list[Unreachable]) -> Unreachable:
    """One error for all addresses: what came furthest tells most."""
    order = list(Phase)
    ranked = sorted(failures, key=lambda e: order.index(e.phase) if e.phase else -1, reverse=True)
    best = ranked[0]
    if len(ranked) == 1:
        return best
    others = ", ".join(f"{e.host}:{e.port} ({e.phase.value if e.phase else 'failed'})" for e in ranked[1:])
    joint = Unreachable(
        f"{best} Also tried: {others}.",
        host=best.host,
        port=best.port,
        phase=best.phase,
        resolved=best.resolved,
    )
    joint.exit_code = best.exit_code
    return joint
