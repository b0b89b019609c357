"""What a timed simulation found, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from starlings_simulator.timed.figures import CAUSES, COMPUTE, Point

if TYPE_CHECKING:
    from starlings_simulator.timed.owner import Owner
    from starlings_simulator.timed.world import World


@dataclass(frozen=True, slots=True)
class WorkerReport:
    worker_id: str
    # What of the model it holds at the end, as "2-4"; "" for nothing.
    stages: str
    present_s: float
    seconds: Mapping[str, float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """`goodput` counts what the ledger acknowledged. `utilisation` is the share of all workers' time in which their
    devices computed for a microbatch; `seconds` says by cause where the whole went.
    """

    phase: str
    ended: str
    virtual_s: float
    tokens: int
    tokens_per_s: float
    # From the first token on.
    tokens_per_s_training: float
    samples_repeated: int
    samples_unmerged: int
    utilisation: float
    seconds: Mapping[str, float]
    sent_bytes: Mapping[str, int]
    plans: int
    events: tuple[tuple[float, str, str], ...]
    points: tuple[Point, ...]
    workers: tuple[WorkerReport, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report_of(world: World, owner: Owner) -> Report:
    books, core, now_s = world.books, owner.core, world.clock.now_s
    state = core.state
    total = books.total()
    whole_s = sum(total.values())
    training = [point for point in books.points if point.tokens > 0]
    begun_s = training[0].at_s if training else now_s
    begun_tokens = training[0].tokens if training else 0
    spans = state.spans if core.plan_is_live else {}
    workers = []
    for machine in world.swarm.machines:
        worker_id = machine.worker_id
        span = spans.get(worker_id)
        held = "" if span is None else f"{span.first_stage}-{span.last_stage}"
        spent = {cause: books.seconds[worker_id][cause] for cause in CAUSES}
        tokens = state.worker_tokens.get(worker_id, 0)
        workers.append(WorkerReport(worker_id, held, sum(spent.values()), spent, tokens))
    return Report(
        phase=core.phase.value,
        ended=owner.ended.reason if owner.ended is not None else "",
        virtual_s=now_s,
        tokens=state.tokens,
        tokens_per_s=state.tokens / now_s if now_s > 0 else 0.0,
        tokens_per_s_training=(state.tokens - begun_tokens) / (now_s - begun_s) if now_s > begun_s else 0.0,
        samples_repeated=state.leased.samples_repeated,
        samples_unmerged=state.samples_unmerged,
        utilisation=total[COMPUTE] / whole_s if whole_s > 0 else 0.0,
        seconds={cause: float(total[cause]) for cause in CAUSES},
        sent_bytes={kind: round(sent) for kind, sent in sorted(world.links.sent_bytes.items())},
        plans=owner.plans,
        events=tuple(books.events),
        points=tuple(books.points),
        workers=tuple(workers),
    )
