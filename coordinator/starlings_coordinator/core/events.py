"""What can happen to a coordinator. Past tense; every event is a frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.messages import Hello, PlanReply, ToCoordinator, WorkerId


@dataclass(frozen=True, slots=True)
class Now:
    """Three clocks (design section 4): liveness and leases use `monotonic_s`, expiries use `wall_s`, which
    never jumps while the process lives."""

    monotonic_s: float
    wall_s: float
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Booted:
    """The process started and the log was folded into the state."""


@dataclass(frozen=True, slots=True)
class KeeperStarted:
    addresses: tuple[str, ...]
    # Versions of the weights that it can serve, ascending.
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeeperLost:
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A control stream was opened, its certificate checked against `hello.worker_id`. `session` numbers
    streams of this process.
    """

    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    session: int
    worker_id: WorkerId
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    session: int
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerRevoked:
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class PlanComputed:
    reply: PlanReply


@dataclass(frozen=True, slots=True)
class PlannerFailed:
    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    version: int
    path: str
    byte_count: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    version: int
    reason: str
    # Of the sheet of exit codes, if the failure has one (9: the disk is full).
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class StopRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """By the owner, as the next four. `request` comes back in the Answer."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    request: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    request: int
    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class EvictionRequested:
    """`for_s`: 0 means until the owner lets it back. `force`: also the last holder of a stage."""

    request: int
    worker_id: WorkerId
    reason: str
    for_s: float
    force: bool = False


@dataclass(frozen=True, slots=True)
class ReadmissionRequested:
    request: int
    worker_id: WorkerId


OwnerCommand = PauseRequested | ResumeRequested | DrainAsked | EvictionRequested | ReadmissionRequested


@dataclass(frozen=True, slots=True)
class Ticked:
    """A few times a second."""


Event = (
    Booted
    | KeeperStarted
    | KeeperLost
    | WorkerConnected
    | WorkerSaid
    | WorkerDisconnected
    | WorkerRevoked
    | PlanComputed
    | PlannerFailed
    | CheckpointSaved
    | CheckpointFailed
    | StopRequested
    | OwnerCommand
    | Ticked
)
