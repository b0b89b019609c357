"""The coordinator's own log file: for the owner when something went wrong; bounded."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_BYTES = 8 << 20


class _QuietHandler(logging.handlers.RotatingFileHandler):
    """A log that cannot be written (a full disk) must not bury the one sentence that says so under tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Everything that our packages log within the block goes to `path` (and one older file)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _QuietHandler(path, maxBytes=LIMIT_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("starlings_coordinator")
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)
        handler.close()
