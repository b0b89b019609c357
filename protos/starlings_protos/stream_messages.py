"""What coordinator and workers say in `async` jobs, most of it only there: records that mirror control.proto."""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.vocabulary import MicrobatchKey

# ------------------------------------------------------------------ worker -> coordinator


@dataclass(frozen=True, slots=True)
class StageSteps:
    stage: int
    steps: int
    squared_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class StageReport:
    stages: tuple[StageSteps, ...]


@dataclass(frozen=True, slots=True)
class LeasesReturned:
    keys: tuple[MicrobatchKey, ...]


# ------------------------------------------------------------------ coordinator -> worker


@dataclass(frozen=True, slots=True)
class SwarmProgress:
    tokens: int
    tokens_per_s: float
    gradient_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class MicrobatchVoided:
    keys: tuple[MicrobatchKey, ...]


@dataclass(frozen=True, slots=True)
class TrainingPaused:
    version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class JobPaused:
    """In every job."""

    paused: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """In every job."""

    reason: str
