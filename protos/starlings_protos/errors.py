"""What can go wrong between parts, by whose fault it is, and how it travels.

    StarlingsError             ends a command with `exit_code`; the text is for people and names the fix
      WorldError               the network, a port, a disk, a clock
        Unreachable              nobody there, or not over this network; says host, port, phase
        PortBusy, ClockSkewed
      UsageError               what we were given: arguments, files
      RefusedError             the other side said no, with a `Refusal`
      PeerFault                the other side said something that makes no sense

One table (`RULES`) maps a refusal to its gRPC status, its exit code and whether a restart may cure it. On the wire the
refusal's number travels in trailing metadata, because several refusals share a status. The module itself does not
import grpc, so that everything may raise these errors.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from starlings_protos.messages import Refusal

if TYPE_CHECKING:
    import grpc

REFUSAL_METADATA_KEY = "starlings-refusal"
# gRPC drops a call whose trailing metadata exceeds 8 KiB, and with it the reason.
MESSAGE_LIMIT_CHARACTERS = 1000


# How often this process has said which no, since its start.
refusals: Counter[Refusal] = Counter()


class ExitCode(enum.IntEnum):
    """The sheet of exit codes."""

    DONE = 0
    BUG = 1
    USAGE = 2
    UNREACHABLE = 3
    INVITE_WRONG = 4
    EXPIRED = 5
    USED_UP = 6
    REVOKED = 7
    MISMATCH = 8
    DISK_FULL = 9
    PORT_BUSY = 10
    IN_USE = 11
    NO_DATA = 12
    NO_DEVICE = 13
    CAP_REACHED = 14
    CLOCK = 15
    EVICTED = 16


class StarlingsError(Exception):
    """Root of what our processes raise on purpose; `exit_code` follows the sheet."""

    exit_code: int = ExitCode.BUG


class WorldError(StarlingsError):
    """Nobody's fault who could read a manual: network, port, disk, clock."""


class Phase(enum.StrEnum):
    """How far a connection came."""

    DNS = "DNS"
    TCP = "TCP"
    TLS = "TLS"
    AUTHORISATION = "authorisation"


class Unreachable(WorldError):
    """No connection; `phase` is the first that failed, `resolved` what DNS gave."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(
        self,
        message: str,
        *,
        host: str = "",
        port: int = 0,
        phase: Phase | None = None,
        resolved: tuple[str, ...] = (),
        cause: str = "",
    ) -> None:
        super().__init__(message)
        self.host = host
        self.port = port
        self.phase = phase
        self.resolved = resolved
        # What happened, without host and advice.
        self.cause = cause


class PortBusy(WorldError):
    """Another process listens there."""

    exit_code = ExitCode.PORT_BUSY


class ClockSkewed(WorldError):
    """This machine's clock is off by more than certificates tolerate."""

    exit_code = ExitCode.CLOCK


class UsageError(StarlingsError):
    """An argument or a file that cannot be used as it is."""

    exit_code = ExitCode.USAGE


class PeerFault(StarlingsError):
    """The other side answered, but not as the protocol says."""


class RefusedError(StarlingsError):
    """The other side (or we, about to answer) said no."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.exit_code = RULES[refusal].exit_code

    @property
    def restart_may_cure(self) -> bool:
        return RULES[self.refusal].restart_may_cure


@dataclass(frozen=True, slots=True)
class Rule:
    # Name of a grpc.StatusCode.
    status: str
    exit_code: ExitCode
    # Whether trying again without a person's help makes sense.
    restart_may_cure: bool


RULES: Mapping[Refusal, Rule] = {
    Refusal.UNSPECIFIED: Rule("UNKNOWN", ExitCode.BUG, False),
    Refusal.INVITE_WRONG: Rule("UNAUTHENTICATED", ExitCode.INVITE_WRONG, False),
    Refusal.INVITE_EXPIRED: Rule("UNAUTHENTICATED", ExitCode.EXPIRED, False),
    Refusal.INVITE_USED_UP: Rule("PERMISSION_DENIED", ExitCode.USED_UP, False),
    Refusal.REVOKED: Rule("PERMISSION_DENIED", ExitCode.REVOKED, False),
    Refusal.VERSION: Rule("FAILED_PRECONDITION", ExitCode.MISMATCH, False),
    Refusal.JOB_MISMATCH: Rule("FAILED_PRECONDITION", ExitCode.MISMATCH, False),
    Refusal.CLOCK: Rule("FAILED_PRECONDITION", ExitCode.CLOCK, False),
    Refusal.NOT_YOU: Rule("PERMISSION_DENIED", ExitCode.USAGE, False),
    Refusal.ASSIGNMENT: Rule("PERMISSION_DENIED", ExitCode.BUG, True),
    Refusal.STALE: Rule("ABORTED", ExitCode.BUG, True),
    Refusal.LIMIT: Rule("RESOURCE_EXHAUSTED", ExitCode.CAP_REACHED, True),
    Refusal.BUSY: Rule("RESOURCE_EXHAUSTED", ExitCode.UNREACHABLE, True),
    Refusal.MALFORMED: Rule("INVALID_ARGUMENT", ExitCode.BUG, False),
    Refusal.NOT_HELD: Rule("NOT_FOUND", ExitCode.USAGE, True),
    Refusal.SUPERSEDED: Rule("ABORTED", ExitCode.IN_USE, False),
    Refusal.NO_ROOM: Rule("FAILED_PRECONDITION", ExitCode.NO_DEVICE, False),
    Refusal.IN_USE: Rule("FAILED_PRECONDITION", ExitCode.IN_USE, False),
    # The process ends and frees its device; whoever starts it again later, a service manager say, is let in then.
    Refusal.EVICTED: Rule("PERMISSION_DENIED", ExitCode.EVICTED, False),
    Refusal.NOT_NOW: Rule("FAILED_PRECONDITION", ExitCode.USAGE, False),
}


def exit_code_of(refusal: Refusal) -> ExitCode:
    return RULES[refusal].exit_code


def clean_text(text: str, limit_characters: int = MESSAGE_LIMIT_CHARACTERS) -> str:
    """`text` from outside, fit for a terminal: no control characters (they could move the cursor), and not endless."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * limit_characters])
    collapsed = " ".join(printable.split())
    return collapsed if len(collapsed) <= limit_characters else collapsed[: limit_characters - 3] + "..."


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal, message: str) -> NoReturn:
    """Ends the rpc with the refusal's status, the message, and the refusal's number in trailing metadata."""
    import asyncio

    import grpc.aio

    refusals[refusal] += 1
    try:
        await context.abort(
            grpc.StatusCode[RULES[refusal].status],
            clean_text(message),
            trailing_metadata=((REFUSAL_METADATA_KEY, str(int(refusal))),),
        )
    except grpc.aio.AbortError as ended:
        # The call keeps this exception, whose frames keep the call: it would stay, and count against its connection's
        # limit of calls, until the garbage collector comes by.
        asyncio.get_running_loop().call_soon(_forget_frames, ended)
        raise
    raise AssertionError("context.abort returned")


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: RefusedError) -> NoReturn:
    _forget_frames(error)  # of callers, whose variables may hold the error
    await abort(context, error.refusal, str(error))


def _forget_frames(error: BaseException) -> None:
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__context__


def refusal_of(error: BaseException) -> Refusal | None:
    """The refusal that a failed call or a `RefusedError` carries; None for a transport failure or an unknown number."""
    if isinstance(error, RefusedError):
        return error.refusal
    trailing = getattr(error, "trailing_metadata", None)
    if not callable(trailing):
        return None
    for key, value in trailing() or ():
        if key == REFUSAL_METADATA_KEY and isinstance(value, str) and value.isascii() and value.isdigit():
            try:
                return Refusal(int(value[:9]))
            except ValueError:
                return None
    return None


def refused_error(error: BaseException) -> RefusedError | None:
    """A failed call as `RefusedError` with the other side's own words; None when it is no coded refusal."""
    if isinstance(error, RefusedError):
        return error
    refusal = refusal_of(error)
    if refusal is None:
        return None
    details = getattr(error, "details", None)
    return RefusedError(
        refusal, clean_text(str(details() if callable(details) else "") or refusal.name.lower())
    )
