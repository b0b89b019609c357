"""Invites: one string that a volunteer pastes into `starlings join`.

    starlings://HOST:PORT[,HOST:PORT]/JOB/PIN/ID.SECRET/EXPIRY

PIN is the SHA-256 of the CA's SubjectPublicKeyInfo in base64url, EXPIRY seconds since 1970. Only characters that no
shell treats specially, so an IPv6 address goes without brackets: the port is what follows the last colon.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from starlings_protos.errors import ExitCode, StarlingsError, UsageError

SCHEME = "starlings://"
ENVIRONMENT_VARIABLE = "STARLINGS_INVITE"
LENGTH_LIMIT_CHARACTERS = 2048
ADDRESS_LIMIT = 8
PIN_CHARACTERS = 43
TOKEN_ID_CHARACTERS = 10
SECRET_CHARACTERS = 32

_ALLOWED = re.compile(r"[A-Za-z0-9.:,/_-]*")
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
# 2001 to 2286: ten digits, so a cut-off expiry is noticed.
_EXPIRY = re.compile(r"[1-9][0-9]{9}")
_ASK = "Ask the owner for the whole invite and paste it in one piece."


class InviteError(StarlingsError):
    """The invite cannot be one; says which part is wrong."""

    exit_code = ExitCode.INVITE_WRONG


@dataclass(frozen=True, slots=True, order=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Invite:
    addresses: tuple[Address, ...]
    job: str
    pin: str
    token_id: str
    # Not in `repr`, so that it does not end up in logs.
    secret: str = field(repr=False)
    expires_s: int

    def __str__(self) -> str:
        return format_invite(self)


def parse_address(text: str) -> Address:
    """HOST:PORT; an IPv6 address with or without brackets.

    Raises:
        ValueError: says what is wrong with it.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon:
        raise ValueError(f"{_shown(text)} has no port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{_shown(port)} is no port (1 to 65535)")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{_shown(host)} is no host name or address")
    return Address(host, int(port))


def format_invite(invite: Invite) -> str:
    hosts = ",".join(str(address) for address in invite.addresses)
    return f"{SCHEME}{hosts}/{invite.job}/{invite.pin}/{invite.token_id}.{invite.secret}/{invite.expires_s}"


def parse_invite(text: str) -> Invite:
    """Reads an invite; space and quotes around it are dropped.

    Raises:
        InviteError: which part is wrong, how, and what to do. The secret is never part of the message.
    """
    text = text.strip().strip("'\"<>`").strip()
    if not text:
        raise InviteError("The invite is empty. " + _ASK)
    if len(text) > LENGTH_LIMIT_CHARACTERS:
        raise InviteError(
            f"An invite has at most {LENGTH_LIMIT_CHARACTERS} characters, this has {len(text)}. {_ASK}"
        )
    if not text.lower().startswith(SCHEME):
        raise InviteError(f"An invite begins with {SCHEME}, this with {_shown(text[:12])}. {_ASK}")
    body = text[len(SCHEME) :]
    good = _ALLOWED.match(body)
    if good is None or good.end() < len(body):
        position = (good.end() if good else 0) + len(SCHEME)
        culprit = text[position]
        what = "a space or line break" if culprit.isspace() else f"the character {_shown(culprit)}"
        raise InviteError(f"The invite has {what} at position {position + 1}, where none can be. {_ASK}")
    parts = body.split("/")
    if len(parts) != 5:
        raise InviteError(
            f"An invite has five parts after {SCHEME} (addresses, job, pin, token, expiry), this has {len(parts)}: "
            f"it was cut off or put together wrongly. {_ASK}"
        )
    hosts, job, pin, token, expiry = parts
    token_id, dot, secret = token.partition(".")
    _check(_JOB.fullmatch(job), "job name", "is empty or has other characters than a job's name may have")
    _check(_is_base64url(pin, PIN_CHARACTERS), "pin", f"is not {PIN_CHARACTERS} characters of base64url")
    _check(bool(dot), "token", "has no dot between its id and its secret")
    _check(
        _is_base64url(token_id, TOKEN_ID_CHARACTERS),
        "token's id",
        f"is not {TOKEN_ID_CHARACTERS} characters long",
    )
    _check(
        _is_base64url(secret, SECRET_CHARACTERS),
        "token's secret",
        f"is not {SECRET_CHARACTERS} characters long",
    )
    _check(_EXPIRY.fullmatch(expiry), "expiry", "is not ten digits (seconds since 1970): cut off at the end?")
    return Invite(_addresses(hosts), job, pin, token_id, secret, int(expiry))


def _addresses(hosts: str) -> tuple[Address, ...]:
    parts = hosts.split(",")
    if len(parts) > ADDRESS_LIMIT:
        raise InviteError(f"An invite has at most {ADDRESS_LIMIT} addresses, this has {len(parts)}. {_ASK}")
    try:
        # Twice the same address would only be tried twice.
        return tuple(dict.fromkeys(parse_address(part) for part in parts))
    except ValueError as error:
        raise InviteError(f"The invite's address is wrong: {error}. {_ASK}") from None


def _check(good: object, part: str, problem: str) -> None:
    if not good:
        raise InviteError(f"The invite's {part} {problem}. {_ASK}")


def _is_base64url(text: str, length: int) -> bool:
    return len(text) == length and _BASE64URL.fullmatch(text) is not None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def invite_text(
    argument: str | None,
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    stdin: TextIO | None = None,
) -> str:
    """Where the invite comes from: the argument (`-` = standard input), else the file, else STARLINGS_INVITE.

    Raises:
        UsageError: none given, two given, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    if argument and file:
        raise UsageError("Give either an invite or --invite-file, not both.")
    if argument == "-":
        return (stdin or sys.stdin).read(4 * LENGTH_LIMIT_CHARACTERS)
    if argument:
        return argument
    if file:
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                return opened.read(4 * LENGTH_LIMIT_CHARACTERS)
        except OSError as error:
            raise UsageError(f"The invite file {file} cannot be read: {error.strerror}.") from None
    if environ.get(ENVIRONMENT_VARIABLE):
        return environ[ENVIRONMENT_VARIABLE]
    raise UsageError(
        f"No invite: give it as an argument, with --invite-file FILE, or in {ENVIRONMENT_VARIABLE}. "
        "The owner gets one from `starlings invite create`."
    )


def spoken_time(wall_s: float) -> str:
    """A moment for people, in UTC: owner and volunteer may live in different zones."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))


def spoken_duration(seconds: float) -> str:
    """Two significant units at most: "3 s", "12 min", "5 h 20 min", "3 days"."""
    seconds = abs(seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{round(minutes / 1440)} days"
