"""Two ways to speak: rich text for people, one JSON object per line for machines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from rich.console import Console

# Lines in a pipe or a log file: often enough to see life, rare enough to read afterwards.
PLAIN_INTERVAL_S = 5.0


def console() -> Console:
    """Standard output; without a terminal 110 columns wide, so that tables in logs keep their shape."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=int(os.environ.get("COLUMNS", "110")), soft_wrap=True)


def emit(record: Mapping[str, Any]) -> None:
    """One JSON object on its own line, at once."""
    print(json.dumps(record, ensure_ascii=False, separators=(",", ":")), flush=True)


def say(text: str) -> None:
    """A plain line for people on standard output, never wrapped: invites must stay whole."""
    print(text, flush=True)


def as_dict(message: Message) -> dict[str, Any]:
    """A protobuf message as JSON-ready data: names as in the .proto, zero values included, whole numbers as numbers.

    (Protobuf's own JSON writes 64-bit integers as strings.) An absent sub-message is None.
    """
    return {field.name: _plain(message, field.name) for field in message.DESCRIPTOR.fields}


def _plain(message: Message, name: str) -> Any:
    value = getattr(message, name)
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [as_dict(item) if isinstance(item, Message) else item for item in value]
    if isinstance(value, Message):
        return as_dict(value) if message.HasField(name) else None
    return value


class Throttle:
    """Lets a plain line through at most every `interval_s`, or when its key changes (such as the phase)."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._last_s = float("-inf")
        self._key: object = None

    def ready(self, key: object = None) -> bool:
        now = time.monotonic()
        if key == self._key and now - self._last_s < self._interval_s:
            return False
        self._key = key
        self._last_s = now
        return True
