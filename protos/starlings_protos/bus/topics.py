"""The names of the bus's topics, and what a name says. Pure.

starlings/v1/<job>/worker/<id>/status      retained, by the worker; its will too
starlings/v1/<job>/worker/<id>/telemetry   by the worker
starlings/v1/<job>/plan                    retained, by the coordinator
starlings/v1/<job>/event                   by the coordinator
starlings/v1/<job>/command                 by the coordinator
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

PREFIX = "starlings/v1"
# What a job and an id consist of: no character with a meaning in MQTT ("+", "#", "/", "$") can occur.
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WORKER = re.compile(r"w[0-9a-f]{16}")


def is_worker_id(text: str) -> bool:
    """Whether a worker may have this id. Observers, keeper and owner have others, and no topics of their own."""
    return _WORKER.fullmatch(text) is not None


class Kind(enum.StrEnum):
    """What a topic is for: its last level."""

    STATUS = "status"
    TELEMETRY = "telemetry"
    PLAN = "plan"
    EVENT = "event"
    COMMAND = "command"


_OF_WORKER = (Kind.STATUS, Kind.TELEMETRY)


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `worker_id` is set for status and telemetry, and empty for the others.

    Raises:
        ValueError: at construction, a job or id that cannot exist, or an id where there is none.
    """

    job: str
    kind: Kind
    worker_id: str = ""

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job):
            raise ValueError(f"{self.job!r} is no name of a job")
        if (self.kind in _OF_WORKER) != bool(self.worker_id):
            raise ValueError(
                f"{self.kind.value} topics {'need' if self.kind in _OF_WORKER else 'have no'} worker id"
            )
        if self.worker_id and not is_worker_id(self.worker_id):
            raise ValueError(f"{self.worker_id!r} is no id of a worker")

    def __str__(self) -> str:
        middle = f"worker/{self.worker_id}/" if self.worker_id else ""
        return f"{PREFIX}/{self.job}/{middle}{self.kind.value}"


def parse(topic: str) -> Topic | None:
    """What `topic` names; None for a topic that is not ours."""
    match topic.split("/"):
        case ["starlings", "v1", job, "worker", worker_id, kind] if kind in _OF_WORKER:
            parts = (job, Kind(kind), worker_id)
        case ["starlings", "v1", job, kind] if kind in set(Kind) - set(_OF_WORKER):
            parts = (job, Kind(kind), "")
        case _:
            return None
    try:
        return Topic(*parts)
    except ValueError:
        return None


def all_of(job: str) -> str:
    """The filter that matches every topic of `job`."""
    return f"{PREFIX}/{Topic(job, Kind.PLAN).job}/#"


def client_id(job: str, role: str, id: str) -> str:
    """What a connection calls itself: a second one of the same identity ends the first."""
    return f"{job}-{role}-{id}"
