"""Whether an amendment of a plan is worth its migration. Pure: the same figures, the same verdict, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from starlings_protos.messages import Span, WorkerId

# What is gained must exceed what moving costs by this factor: estimates of both are rough.
GAIN_OVER_COST = 1.5
# And the plan must become this much faster, or estimates that wander would move workers to and fro.
GAIN_LEAST = 0.05


@dataclass(frozen=True, slots=True)
class Amendment:
    """Some workers' spans change. Rates are microbatches/s of the whole swarm.

    Args:
        moves: by worker, the span before (None: held nothing) and after (None: will hold nothing).
        rate_meanwhile: while state is on its way; donors and links serve both.
        migration_s: until the last new holder has its state.
    """

    moves: dict[WorkerId, tuple[Span | None, Span | None]]
    rate_now: float
    rate_meanwhile: float
    rate_then: float
    migration_bytes: float
    migration_s: float


@dataclass(frozen=True, slots=True)
class Worthwhile:
    """What is gained in `remaining_s` less what moving costs, in microbatches."""

    gained: float
    cost: float


@dataclass(frozen=True, slots=True)
class LastReplica:
    """A stage that is held now would have no holder."""

    stage: int


@dataclass(frozen=True, slots=True)
class TooLittle:
    """The plan would become faster by `part` only."""

    part: float


@dataclass(frozen=True, slots=True)
class TooCostly:
    """Moving costs more than what it gains in the time that is left justifies, in microbatches."""

    gained: float
    cost: float


Verdict = Worthwhile | LastReplica | TooLittle | TooCostly


def verdict_words(verdict: Verdict) -> str:
    """The rule's reason, for people."""
    match verdict:
        case Worthwhile(gained, cost):
            return f"worth it: {gained:,.0f} more microbatches until then, for {cost:,.0f} that moving costs"
        case LastReplica(stage):
            return f"not possible: stage {stage} would have no holder"
        case TooLittle(part) if part <= 0:
            return "not worth it: the swarm would not become faster"
        case TooLittle(part):
            return f"not worth it: {part:.1%} faster, and holders move for {GAIN_LEAST:.0%} or more only"
        case TooCostly(gained, cost):
            return (
                f"not worth it: {gained:,.0f} more microbatches until then, less than {GAIN_OVER_COST:g} times the "
                f"{cost:,.0f} that moving costs"
            )
        case _:
            assert_never(verdict)


def judge(amendment: Amendment, holders: dict[WorkerId, Span], remaining_s: float) -> Verdict:
    """Design, section 5: gain over the expected remaining time above 1.5x the migration cost, at least 5 % where
    holders move, and never the last replica of a stage.

    A stage that is bare already is reason enough: the swarm does nothing until somebody holds it.

    Args:
        holders: who holds what now.
        remaining_s: expected until the job ends or the moved workers leave, whichever is sooner.
    """
    before = {stage for span in holders.values() for stage in span.stages}
    after = dict(holders)
    for worker_id, (_, span) in amendment.moves.items():
        if span is None:
            after.pop(worker_id, None)
        else:
            after[worker_id] = span
    bare = before - {stage for span in after.values() for stage in span.stages}
    if bare:
        return LastReplica(min(bare))
    gain = amendment.rate_then - amendment.rate_now
    # Whoever holds nothing loses nothing by a place: only moves of holders could go to and fro.
    moves_holders = any(span is not None for span, _ in amendment.moves.values())
    if gain <= 0 or (moves_holders and gain < GAIN_LEAST * amendment.rate_now):
        return TooLittle(gain / amendment.rate_now if amendment.rate_now > 0 else 0.0)
    gained = gain * max(0.0, remaining_s - amendment.migration_s)
    cost = max(0.0, amendment.rate_now - amendment.rate_meanwhile) * amendment.migration_s
    if gained <= GAIN_OVER_COST * cost:
        return TooCostly(gained, cost)
    return Worthwhile(gained, cost)
