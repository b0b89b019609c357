"""messages.py mirrors the .proto files field by field, and convert.py loses nothing on the way there and
back.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_protos import (
    advice_messages,
    common_pb2,
    control_pb2,
    convert,
    data_pb2,
    group_messages,
    messages,
    pair_messages,
    process_pb2,
    reach_messages,
    relay_pb2,
    status,
    stream_messages,
    telemetry,
)
from starlings_protos.relay import frames as relay_frames

MODULES = (common_pb2, control_pb2, data_pb2, process_pb2, relay_pb2)
RECORDS: dict[str, type] = {
    name: value
    for name, value in (
        vars(messages)
        | vars(pair_messages)
        | vars(group_messages)
        | vars(stream_messages)
        | vars(status)
        | vars(telemetry)
        | vars(reach_messages)
        | vars(advice_messages)
        | vars(relay_frames)
    ).items()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
}
ENUMS: dict[str, type[enum.IntEnum]] = {
    name: value
    for name, value in (vars(messages) | vars(pair_messages) | vars(group_messages)).items()
    if isinstance(value, type) and issubclass(value, enum.IntEnum)
}
UNSIGNED_BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
SCALARS = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BYTES: bytes,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_UINT32: int,
    FieldDescriptor.TYPE_UINT64: int,
}


def message_class(name: str) -> type[Message]:
    (found,) = (
        getattr(module, name) for module in MODULES if name in module.DESCRIPTOR.message_types_by_name
    )
    return typing.cast("type[Message]", found)


def base(hint: Any) -> Any:
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def expect(field: FieldDescriptor, hint: Any) -> None:
    """Fails unless a record's field of type `hint` holds just what the protobuf field can."""
    hint, origin, where = base(hint), typing.get_origin(base(hint)), field.full_name
    if is_map(field):
        assert issubclass(origin, Mapping), where
        for part, argument in zip(("key", "value"), typing.get_args(hint), strict=True):
            assert SCALARS[field.message_type.fields_by_name[part].type] is base(argument), where
        return
    if field.is_repeated:
        assert origin is tuple, where
        (hint, dots) = typing.get_args(hint)
        assert dots is Ellipsis, where
        hint = base(hint)
    elif origin is types.UnionType:
        assert field.has_presence, where
        (hint,) = (base(a) for a in typing.get_args(hint) if a is not type(None))
    if field.message_type is not None:
        assert hint is RECORDS[field.message_type.name], where
    elif field.enum_type is not None:
        assert hint is ENUMS[field.enum_type.name], where
    else:
        assert hint is SCALARS[field.type], where


@pytest.mark.parametrize("name", RECORDS)
def test_records_mirror_their_messages(name: str) -> None:
    descriptor: Descriptor = message_class(name).DESCRIPTOR
    hints = typing.get_type_hints(RECORDS[name])
    assert set(hints) == set(descriptor.fields_by_name)
    for field in descriptor.fields:
        expect(field, hints[field.name])


@pytest.mark.parametrize("name", ENUMS)
def test_enums_mirror_the_protocols(name: str) -> None:
    (descriptor,) = (
        m.DESCRIPTOR.enum_types_by_name[name] for m in MODULES if name in m.DESCRIPTOR.enum_types_by_name
    )
    prefix = "".join("_" + c if c.isupper() else c for c in name).lstrip("_").upper() + "_"
    assert {v.name.removeprefix(prefix): v.number for v in descriptor.values} == {
        e.name: e.value for e in ENUMS[name]
    }


@pytest.mark.parametrize("name", ["ToCoordinator", "ToWorker"])
def test_unions_list_every_body(name: str) -> None:
    body = message_class(name).DESCRIPTOR.oneofs_by_name["body"]
    listed = [cls.__name__ for cls in typing.get_args(getattr(messages, name))]
    assert listed == [field.message_type.name for field in body.fields]


# ---------------------------------------------------------------------- there and back

_STRATEGIES: dict[str, st.SearchStrategy[Any]] = {}


def records(name: str) -> st.SearchStrategy[Any]:
    """Any instance of a record that fits its message."""
    if name not in _STRATEGIES:
        fields = message_class(name).DESCRIPTOR.fields_by_name
        hints = typing.get_type_hints(RECORDS[name])
        _STRATEGIES[name] = st.builds(
            RECORDS[name], **{field: values(fields[field], hint) for field, hint in hints.items()}
        )
    return _STRATEGIES[name]


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return records(field.message_type.name)
    if field.enum_type is not None:
        return st.sampled_from(list(ENUMS[field.enum_type.name]))
    if field.type in UNSIGNED_BITS:
        return st.integers(0, 2 ** UNSIGNED_BITS[field.type] - 1)
    return {
        str: st.text(st.characters(exclude_categories=("Cs",)), max_size=6),
        bytes: st.binary(max_size=6),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }[SCALARS[field.type]]


def values(field: FieldDescriptor, hint: Any) -> st.SearchStrategy[Any]:
    if is_map(field):
        entry = field.message_type.fields_by_name
        return st.dictionaries(scalars(entry["key"]), scalars(entry["value"]), max_size=3)
    if field.is_repeated:
        return st.lists(scalars(field), max_size=3).map(tuple)
    if typing.get_origin(base(hint)) is types.UnionType:
        return st.none() | scalars(field)
    return scalars(field)


@pytest.mark.parametrize("name", RECORDS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_round_trip(name: str, data: st.DataObject) -> None:
    record = data.draw(records(name))
    message = convert.to_proto(record, message_class(name)())
    travelled = message_class(name).FromString(message.SerializeToString())
    assert convert.from_proto(travelled, RECORDS[name]) == record


@pytest.mark.parametrize("envelope", ["ToCoordinator", "ToWorker"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bodies_round_trip(envelope: str, data: st.DataObject) -> None:
    union = getattr(messages, envelope)
    record = data.draw(st.sampled_from([cls.__name__ for cls in typing.get_args(union)]).flatmap(records))
    message = convert.body_to_proto(record, message_class(envelope)())
    travelled = message_class(envelope).FromString(message.SerializeToString())
    back = convert.body_from_proto(travelled, union)
    assert back == record
    assert type(back) is type(record)


def test_an_all_default_body_is_still_there() -> None:
    """A message whose fields all have their defaults takes no bytes of its own; its kind must survive."""
    message = convert.body_to_proto(messages.Heartbeat(), control_pb2.ToCoordinator())
    travelled = control_pb2.ToCoordinator.FromString(message.SerializeToString())
    assert convert.body_from_proto(travelled, messages.ToCoordinator) == messages.Heartbeat()
    assert control_pb2.ToCoordinator.FromString(b"").WhichOneof("body") is None


def test_malformed_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="without a body"):
        convert.body_from_proto(control_pb2.ToWorker(), messages.ToWorker)
    with pytest.raises(ValueError, match="key is missing"):
        convert.from_proto(control_pb2.Lease(), messages.Lease)
    with pytest.raises(ValueError, match="span is missing"):
        convert.from_proto(control_pb2.Assignment(), messages.Assignment)
    unknown = control_pb2.Refused.FromString(b"\x08\x63")
    with pytest.raises(ValueError, match="99"):
        convert.from_proto(unknown, messages.Refused)
    with pytest.raises(ValueError, match="not expected"):
        convert.body_from_proto(
            control_pb2.ToWorker(finish=control_pb2.Finish()), messages.Standby | messages.Refused
        )
    with pytest.raises(ValueError, match="no body"):
        convert.body_to_proto(messages.Finish(True, ""), control_pb2.ToCoordinator())
