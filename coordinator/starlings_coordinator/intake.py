"""What a worker says, before it becomes an event: well-formed, bounded, and fit to be shown to people.

Meaning is for the core to judge; here a message is only held to sizes and shapes that any honest one has. Texts lose
their control characters, because they end up in terminals and logs.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from starlings_protos import control_pb2
from starlings_protos.convert import body_from_proto, field_hints, plain
from starlings_protos.errors import RefusedError, clean_text
from starlings_protos.identity import KEEPER, RELAY
from starlings_protos.invite import parse_address
from starlings_protos.messages import (
    Heartbeat,
    PeerUnreachable,
    ProbeReport,
    Refusal,
    SlowedBy,
    ToCoordinator,
)
from starlings_protos.pair_messages import RoundOutcome
from starlings_protos.reach_messages import ReachReport

R = TypeVar("R")
_SCALARS = (str, bytes, int, float)

TEXT_LIMIT_CHARACTERS = 400
# Blocks of the largest profile, routes, microbatches of a step: none has more entries.
ENTRIES_LIMIT = 16384
ADDRESSES_LIMIT = 16
# A worker holds tunnels to two at once, and may be changing.
RELAYS_LIMIT = 4
_SLOWED_BY = {int(reason): reason for reason in SlowedBy}
_WORKER_ID = re.compile(r"w[0-9a-f]{16}")
# A gradient or a loss that is not finite is a fact about the training, and the core's to judge.
_MAY_BE_INFINITE = frozenset({"loss_sum", "squared_norm"})


def received(message: control_pb2.ToCoordinator) -> ToCoordinator:
    """The record that a worker sent.

    Raises:
        RefusedError: MALFORMED or LIMIT, with what is wrong.
    """
    if message.WhichOneof("body") == "heartbeat":
        # Most of what a large swarm says.
        return _heartbeat(message.heartbeat)
    # Before any record is made: a megabyte can hold half a million empty entries.
    _check_counts(message)
    try:
        record: ToCoordinator = body_from_proto(message, ToCoordinator)
    except ValueError as error:
        raise RefusedError(Refusal.MALFORMED, f"A malformed message: {error}.") from None
    record = checked(record)
    if isinstance(record, ProbeReport):
        _check_addresses(record.addresses)
    if isinstance(record, ReachReport):
        _check_addresses(record.addresses + record.relay_addresses)
        for relay_id in record.relays[:RELAYS_LIMIT]:
            _check_id(relay_id)
        record = dataclasses.replace(record, relays=record.relays[:RELAYS_LIMIT])
    if isinstance(record, PeerUnreachable):
        _check_id(record.worker_id)
    if isinstance(record, RoundOutcome) and record.partner:
        _check_id(record.partner)
    return record


def _heartbeat(said: control_pb2.Heartbeat) -> Heartbeat:
    _check_count("stage_seconds", len(said.stage_seconds))
    seconds = (said.busy_s, said.push_s, said.room_s, *said.stage_seconds)
    if not all(map(math.isfinite, seconds)):
        raise RefusedError(Refusal.MALFORMED, "A malformed message: a heartbeat's seconds are not finite.")
    return Heartbeat(
        said.progress,
        said.version,
        said.busy_s,
        said.passes,
        seconds[3:],
        said.push_s,
        said.room_s,
        # A newer worker may know further reasons.
        _SLOWED_BY.get(int(said.slowed_by), SlowedBy.UNSPECIFIED),
    )


def checked(record: R) -> R:
    """The record with clean texts.

    Raises:
        RefusedError: MALFORMED for a number that is none.
    """
    cls = type(record)
    checks = _CHECKS.get(cls)
    if checks is None:
        found = ((name, _check_for(name, hint)) for name, hint in field_hints(cls).items())
        checks = _CHECKS[cls] = tuple((name, check) for name, check in found if check is not None)
    changes: dict[str, Any] = {}
    for name, check in checks:
        value = getattr(record, name)
        if (clean := check(value)) is not value:
            changes[name] = clean
    return dataclasses.replace(record, **changes) if changes else record  # type: ignore[type-var]


# Returns the very value when there is nothing to change.
_Check = Callable[[Any], Any]
# What a class's fields need is worked out once: heartbeats of a thousand workers come by here.
_CHECKS: dict[type, tuple[tuple[str, _Check], ...]] = {}


def _check_for(name: str, hint: Any) -> _Check | None:
    """How to check values of type `hint`; None where nothing can be wrong with one."""
    hint = plain(hint)
    arguments = [plain(argument) for argument in typing.get_args(hint)]
    origin = typing.get_origin(hint)
    if hint is str:
        return _text
    if hint is float:
        return None if name in _MAY_BE_INFINITE else partial(_finite, name)
    if dataclasses.is_dataclass(hint):
        return checked
    if origin is tuple:
        item = _check_for(name, arguments[0])
        return None if item is None else partial(_items, item)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = (_check_for(name, argument) or _unchanged for argument in arguments)
        return partial(_entries, key, value)
    if origin in (types.UnionType, typing.Union):
        inner = next(_check_for(name, argument) for argument in arguments if argument is not type(None))
        return None if inner is None else lambda value: value if value is None else inner(value)
    return None


def _unchanged(value: Any) -> Any:
    return value


def _text(value: str) -> str:
    plain_text = value.isprintable() and len(value) <= TEXT_LIMIT_CHARACTERS
    return value if plain_text else clean_text(value, TEXT_LIMIT_CHARACTERS)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise RefusedError(Refusal.MALFORMED, f"A malformed message: {name} is not finite.")
    return value


def _items(item: _Check, values: tuple[Any, ...]) -> tuple[Any, ...]:
    clean = tuple([item(value) for value in values])
    return values if all(map(operator.is_, clean, values)) else clean


def _entries(key: _Check, value: _Check, entries: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return {key(k): value(v) for k, v in entries.items()}


def _check_counts(message: Message) -> None:
    """Raises RefusedError for a list or map that is too long, at any depth."""
    for field, value in message.ListFields():
        if isinstance(value, _SCALARS):
            continue
        if isinstance(value, Message):
            _check_counts(value)
            continue
        _check_count(field.name, len(value))
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for item in value:
                _check_counts(item)


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
    if not _WORKER_ID.fullmatch(worker_id) and worker_id not in (KEEPER.id, RELAY.id):
        raise RefusedError(Refusal.MALFORMED, f"{worker_id[:40]!r} is no worker's id.")
