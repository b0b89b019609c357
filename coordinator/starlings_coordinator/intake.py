"""What a worker says, before it becomes an event: well-formed, bounded, and fit to be shown to people.

Meaning is for the core to judge; here a message is only held to sizes and shapes that any honest one has. Texts lose
their control characters, because they end up in terminals and logs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from starlings_protos import control_pb2
from starlings_protos.convert import body_from_proto
from starlings_protos.errors import RefusedError, clean_text
from starlings_protos.identity import KEEPER
from starlings_protos.invite import parse_address
from starlings_protos.messages import PeerUnreachable, ProbeReport, Refusal, ToCoordinator

R = TypeVar("R")

TEXT_LIMIT_CHARACTERS = 400
# Blocks of the largest profile, routes, microbatches of a step: none has more entries.
ENTRIES_LIMIT = 16384
ADDRESSES_LIMIT = 16
_WORKER_ID = re.compile(r"w[0-9a-f]{16}")
# A gradient or a loss that is not finite is a fact about the training, and the core's to judge.
_MAY_BE_INFINITE = frozenset({"loss_sum", "squared_norm"})


def received(message: control_pb2.ToCoordinator) -> ToCoordinator:
    """The record that a worker sent.

    Raises:
        RefusedError: MALFORMED or LIMIT, with what is wrong.
    """
    try:
        record: ToCoordinator = body_from_proto(message, ToCoordinator)
    except ValueError as error:
        raise RefusedError(Refusal.MALFORMED, f"A malformed message: {error}.") from None
    record = checked(record)
    if isinstance(record, ProbeReport):
        _check_addresses(record.addresses)
    if isinstance(record, PeerUnreachable):
        _check_id(record.worker_id)
    return record


def checked(record: R) -> R:
    """The record with clean texts.

    Raises:
        RefusedError: MALFORMED for a number that is none, LIMIT for too many entries.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if (clean := _checked_value(field.name, value)) is not value:
            changes[field.name] = clean
    return dataclasses.replace(record, **changes) if changes else record  # type: ignore[type-var]


def _checked_value(name: str, value: Any) -> Any:
    match value:
        case str():
            plain = value.isprintable() and len(value) <= TEXT_LIMIT_CHARACTERS
            return value if plain else clean_text(value, TEXT_LIMIT_CHARACTERS)
        case float():
            if not math.isfinite(value) and name not in _MAY_BE_INFINITE:
                raise RefusedError(Refusal.MALFORMED, f"A malformed message: {name} is not finite.")
            return value
        case tuple():
            _check_count(name, len(value))
            items = tuple(_checked_value(name, item) for item in value)
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        case Mapping():
            _check_count(name, len(value))
            return {_checked_value(name, key): _checked_value(name, item) for key, item in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return checked(value)
        case _:
            return value


def _check_count(name: str, count: int) -> None:
    if count > ENTRIES_LIMIT:
        raise RefusedError(Refusal.LIMIT, f"{name} has {count} entries; at most {ENTRIES_LIMIT} are allowed.")


def _check_addresses(addresses: tuple[str, ...]) -> None:
    """They are passed on to every peer."""
    if len(addresses) > ADDRESSES_LIMIT:
        raise RefusedError(
            Refusal.LIMIT, f"{len(addresses)} addresses; at most {ADDRESSES_LIMIT} are allowed."
        )
    try:
        for address in addresses:
            parse_address(address)
    except ValueError as error:
        raise RefusedError(Refusal.MALFORMED, f"A data plane address is wrong: {error}.") from None


def _check_id(worker_id: str) -> None:
    if not _WORKER_ID.fullmatch(worker_id) and worker_id != KEEPER.id:
        raise RefusedError(Refusal.MALFORMED, f"{worker_id[:40]!r} is no worker's id.")
