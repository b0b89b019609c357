"""What the planner is asked about a plan that stands: records that mirror process.proto and common.proto."""

from __future__ import annotations

from dataclasses import dataclass

from starlings_protos.messages import PlanRequest, PlanWorker
from starlings_protos.vocabulary import Span, WorkerId


@dataclass(frozen=True, slots=True)
class AdviceRequest:
    plan: PlanRequest
    codec: str
    copied_bytes: tuple[float, ...]
    remaining_s: float
    slowed: tuple[PlanWorker, ...] = ()
    idle: tuple[PlanWorker, ...] = ()
    leaving: tuple[WorkerId, ...] = ()
    about: str = ""


@dataclass(frozen=True, slots=True)
class AdvisedMove:
    worker_id: WorkerId
    before: Span | None = None
    after: Span | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    question: str
    moves: tuple[AdvisedMove, ...] = ()
    rate_now: float = 0.0
    rate_meanwhile: float = 0.0
    rate_then: float = 0.0
    migration_bytes: float = 0.0
    migration_s: float = 0.0
    worthwhile: bool = False
    verdict: str = ""
    rate_before: float = 0.0


@dataclass(frozen=True, slots=True)
class AdviceReply:
    request_id: int
    advice: tuple[Advice, ...] = ()
    failure: str = ""
