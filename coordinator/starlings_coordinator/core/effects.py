"""What the coordinator's core asks its shell to do. Imperative; outcomes come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.messages import Peer, PlanRequest, Refusal, ToWorker, WorkerId
from starlings_protos.status import CommandReply


@dataclass(frozen=True, slots=True)
class Send:
    """To the worker's current session. The shell signs an Assignment and fills a Lease's records on the way out."""

    session: int
    worker_id: WorkerId
    message: ToWorker


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Send Refused (when `refusal` is set), then end the stream."""

    session: int
    worker_id: WorkerId
    refusal: Refusal | None
    message: str


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """To the planner process. -> PlanComputed | PlannerFailed"""

    request: PlanRequest


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """To the keeper: pull version `version` of every block from one of its donors and write it. ->
    CheckpointSaved | CheckpointFailed
    """

    version: int
    tokens: int
    # Block name -> who has a snapshot of it, and the digest it must have ("" when not known).
    donors: tuple[tuple[str, tuple[Peer, ...], str], ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """For people: a line of the event log. Kinds: see Event.kind in control.proto."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Nothing is left to do. Exit code of the sheet; 0 when done."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """To the owner's command of that number: what came of it, or why nothing does."""

    request: int
    reply: CommandReply
    refused: bool = False


Effect = Send | CloseSession | ComputePlan | SaveCheckpoint | Announce | JobEnded | Answer
