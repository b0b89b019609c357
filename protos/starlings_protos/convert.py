"""Between the frozen records of `messages.py` and protobuf, driven by field names: one function each way.

Unknown enum numbers and absent required sub-messages raise `ValueError`, so bytes from outside never become a
half-filled record.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")
# Reads one field of a message.
Read = Callable[[Message], Any]


# What a record's class says about its fields is worked out once: a coordinator reads hundreds of messages a second.
_HINTS: dict[type, dict[str, Any]] = {}
_READERS: dict[type, tuple[tuple[str, Read], ...]] = {}
_BODIES: dict[tuple[str, Any], type | None] = {}


def field_hints(cls: type) -> dict[str, Any]:
    """Types of a record's fields by name, in their order; NewTypes are replaced by what is behind them."""
    hints = _HINTS.get(cls)
    if hints is None:
        hints = {name: plain(hint) for name, hint in typing.get_type_hints(cls).items()}
        _HINTS[cls] = hints
    return hints


def plain(hint: Any) -> Any:
    """The class behind a NewType."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def to_proto(record: Any, message: Message) -> Message:
    """Fills `message` (fresh) from `record` and returns it."""
    for name in field_hints(type(record)):
        value = getattr(record, name)
        if value is None:
            continue
        if dataclasses.is_dataclass(value):
            target = getattr(message, name)
            target.SetInParent()
            to_proto(value, target)
        elif isinstance(value, tuple):
            container = getattr(message, name)
            if value and dataclasses.is_dataclass(value[0]):
                for item in value:
                    to_proto(item, container.add())
            else:
                container.extend(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, enum.IntEnum):
            setattr(message, name, int(value))
        else:
            setattr(message, name, value)
    return message


def from_proto(message: Message, cls: type[T]) -> T:
    """The record of class `cls` that `message` describes.

    Raises:
        ValueError: a required sub-message is absent or an enum number is unknown.
    """
    readers = _READERS.get(cls)
    if readers is None:
        readers = tuple((name, _reader(name, hint)) for name, hint in field_hints(cls).items())
        _READERS[cls] = readers
    return cls(**{name: read(message) for name, read in readers})


def _reader(name: str, hint: Any) -> Read:
    """How the field `name` is read, which is of type `hint`."""
    get: Read = operator.attrgetter(name)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        optional = next(plain(a) for a in typing.get_args(hint) if a is not type(None))
        return lambda message: from_proto(get(message), optional) if message.HasField(name) else None
    if origin is tuple:
        inner = plain(typing.get_args(hint)[0])
        if dataclasses.is_dataclass(inner):
            return lambda message: tuple(from_proto(item, inner) for item in get(message))  # type: ignore[arg-type]
        return lambda message: tuple(get(message))
    if origin is not None and issubclass(origin, Mapping):
        return lambda message: dict(get(message))
    if dataclasses.is_dataclass(hint):
        return lambda message: _required(message, name, typing.cast("type[Any]", hint))
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return lambda message: hint(get(message))
    return get


def _required(message: Message, name: str, cls: type[T]) -> T:
    if not message.HasField(name):
        raise ValueError(f"{message.DESCRIPTOR.name}.{name} is missing")
    return from_proto(getattr(message, name), cls)


def body_to_proto(record: Any, envelope: Message) -> Message:
    """Puts `record` into the `oneof body` of `envelope`, in the field whose message is named like it."""
    body = getattr(envelope, _body_field(envelope, type(record).__name__))
    body.SetInParent()
    to_proto(record, body)
    return envelope


def _body_field(envelope: Message, record_name: str) -> str:
    for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields:
        if field.message_type is not None and field.message_type.name == record_name:
            return field.name
    raise ValueError(f"{envelope.DESCRIPTOR.name} has no body {record_name}")


def body_from_proto(envelope: Message, union: Any) -> Any:
    """The record in the `oneof body` of `envelope`; `union` lists the classes that may be there.

    Raises:
        ValueError: the body is empty, of an unknown kind, or malformed.
    """
    name = envelope.WhichOneof("body")
    if name is None:
        raise ValueError(f"{envelope.DESCRIPTOR.name} without a body")
    kind = (name, union)
    if kind not in _BODIES:
        body_name = getattr(envelope, name).DESCRIPTOR.name
        _BODIES[kind] = next((cls for cls in typing.get_args(union) if cls.__name__ == body_name), None)
    cls = _BODIES[kind]
    if cls is None:
        raise ValueError(f"{envelope.DESCRIPTOR.name}.{name} is not expected here")
    return from_proto(getattr(envelope, name), cls)
