"""Messages of the bus to bytes and back: protobuf, or protobuf's canonical JSON for tools that have no schema compiler.

A reader takes both: JSON begins with "{", and the first byte of no message of ours is 0x7b (field 15, a group, which
proto3 does not have).
"""

from __future__ import annotations

import enum

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from starlings_protos import bus_pb2, control_pb2
from starlings_protos.bus.topics import Kind, Topic

# Before anything is parsed. Telemetry comes from everybody, all the time; a plan grows with the swarm.
LIMIT_BYTES: dict[Kind, int] = {
    Kind.STATUS: 4 * 1024,
    Kind.TELEMETRY: 1024,
    Kind.PLAN: 48 * 1024,
    Kind.EVENT: 16 * 1024,
    Kind.COMMAND: 1024,
}
# The largest packet that a client or the broker needs to take: payload, topic and properties. The broker's own limit
# (`starlings bus config`) is above it.
PACKET_LIMIT_BYTES = max(LIMIT_BYTES.values()) + 1024

BusMessage = (
    bus_pb2.BusStatus | control_pb2.Telemetry | bus_pb2.PlanNotice | bus_pb2.EventNotice | bus_pb2.CommandHint
)
_TYPES: dict[Kind, type[BusMessage]] = {
    Kind.STATUS: bus_pb2.BusStatus,
    Kind.TELEMETRY: control_pb2.Telemetry,
    Kind.PLAN: bus_pb2.PlanNotice,
    Kind.EVENT: bus_pb2.EventNotice,
    Kind.COMMAND: bus_pb2.CommandHint,
}


class Form(enum.StrEnum):
    """`[bus] payload`."""

    PROTOBUF = "protobuf"
    JSON = "json"


class MalformedPayload(ValueError):
    """Bytes on the bus that are no message of their topic. Whoever can write to a topic can cause it: count, drop."""


def encode(message: Message, form: Form) -> bytes:
    """The payload; its size is the caller's business (`fits`)."""
    if form is Form.PROTOBUF:
        return message.SerializeToString()
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None).encode()


def fits(kind: Kind, payload: bytes) -> bool:
    return len(payload) <= LIMIT_BYTES[kind]


def decode(topic: Topic, payload: bytes) -> BusMessage:
    """The message in a payload that came on `topic`.

    Raises:
        MalformedPayload: too large, no message of this topic, or of another worker than the topic's.
    """
    if not fits(topic.kind, payload):
        raise MalformedPayload(f"{len(payload)} bytes on {topic}, of {LIMIT_BYTES[topic.kind]} at most")
    message = _TYPES[topic.kind]()
    try:
        if payload[:1] == b"{":
            json_format.Parse(payload, message, ignore_unknown_fields=True, max_recursion_depth=16)
        else:
            message.ParseFromString(payload)
    except (DecodeError, json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedPayload(f"no {topic.kind.value} on {topic}: {error}") from None
    if (
        isinstance(message, bus_pb2.BusStatus | control_pb2.Telemetry)
        and message.worker_id != topic.worker_id
    ):
        raise MalformedPayload(f"{message.worker_id!r} speaks on {topic}")
    return message
