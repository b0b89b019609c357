"""Between the frozen records of `messages.py` and protobuf, driven by field names: one function each way.

Unknown enum numbers and absent required sub-messages raise `ValueError`, so bytes from outside never become a
half-filled record.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    """Types of a record's fields; resolving them takes longer than everything else here."""
    hints = _HINTS.get(cls)
    if hints is None:
        hints = _HINTS[cls] = typing.get_type_hints(cls)
    return hints


def _base(hint: Any) -> Any:
    """The class behind a NewType."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def to_proto(record: Any, message: Message) -> Message:
    """Fills `message` (fresh) from `record` and returns it."""
    for name in _hints(type(record)):
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
    values = {name: _read(message, name, hint) for name, hint in _hints(cls).items()}
    return cls(**values)


def _read(message: Message, name: str, hint: Any) -> Any:
    hint = _base(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(_base(a) for a in typing.get_args(hint) if a is not type(None))
        return from_proto(getattr(message, name), inner) if message.HasField(name) else None
    if origin is tuple:
        inner = _base(typing.get_args(hint)[0])
        items = getattr(message, name)
        nested = dataclasses.is_dataclass(inner)
        return tuple(from_proto(item, inner) for item in items) if nested else tuple(items)
    if origin is not None and issubclass(origin, Mapping):
        return dict(getattr(message, name))
    if dataclasses.is_dataclass(hint):
        if not message.HasField(name):
            raise ValueError(f"{message.DESCRIPTOR.name}.{name} is missing")
        return from_proto(getattr(message, name), typing.cast("type[Any]", hint))
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return hint(getattr(message, name))
    return getattr(message, name)


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
    body = getattr(envelope, name)
    for cls in typing.get_args(union):
        if cls.__name__ == body.DESCRIPTOR.name:
            return from_proto(body, cls)
    raise ValueError(f"{envelope.DESCRIPTOR.name}.{name} is not expected here")
