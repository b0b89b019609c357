"""What happened, for people: kept as objects, turned into text only when somebody reads it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

# Enough to see what led to a violation.
ENTRIES_AT_MOST = 200_000


@dataclass(frozen=True, slots=True)
class Entry:
    at_s: float
    actor: str
    # "<-" something reached the actor, "->" the actor did something, "!!" a fault, "**" a verdict.
    mark: str
    what: object

    def text(self) -> str:
        return f"{self.at_s:11.4f}  {self.actor:<12} {self.mark} {shorten(self.what)}"


def shorten(what: object) -> str:
    """A record in one line, without what is empty."""
    if isinstance(what, str):
        return what
    fields = getattr(what, "__dataclass_fields__", None)
    if fields is None:
        return repr(what)
    shown = []
    for name in fields:
        value = getattr(what, name)
        if value in ("", b"", (), 0, 0.0, None, {}) and value is not False:
            continue
        if isinstance(value, bytes):
            text = f"<{len(value)} bytes>"
        elif isinstance(value, tuple):
            text = "(" + ", ".join(shorten(item) for item in value) + ")"
        elif isinstance(value, float):
            text = f"{value:.6g}"
        elif hasattr(value, "__dataclass_fields__"):
            text = shorten(value)
        else:
            text = str(value)
        shown.append(f"{name}={text}")
    return f"{type(what).__name__}({', '.join(shown)})"


class Transcript:
    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=ENTRIES_AT_MOST)

    def add(self, at_s: float, actor: str, mark: str, what: object) -> None:
        self.entries.append(Entry(at_s, actor, mark, what))

    def lines(self) -> Iterator[str]:
        for entry in self.entries:
            yield entry.text()

    def tail(self, count: int = 60) -> str:
        return "\n".join(entry.text() for entry in list(self.entries)[-count:])

    def digest(self) -> str:
        """Equal for equal runs, whatever the interpreter's hash seed."""
        running = hashlib.sha256()
        for line in self.lines():
            running.update(line.encode() + b"\n")
        return running.hexdigest()
