"""One stage of the coordinator's half of pair exchanges, its replicas, and a time that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from starlings_coordinator.core.pairing.links import PassiveEstimates
from starlings_coordinator.core.pairing.rounds import PairSettings, StageRounds, Told
from starlings_coordinator.core.pairing.weights import TokenCount
from starlings_job.exchange_rules import Phase, rules_for
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import (
    PairMatched,
    RoundOutcome,
    RoundReady,
    SlotClock,
    SwapResult,
)

A, B, C = (WorkerId(name) for name in "abc")
TOKENS_TOTAL = 1000


@dataclass
class Ledger:
    counts: dict[WorkerId, TokenCount] = field(default_factory=dict)

    def tokens(self, worker_id: WorkerId, stage: int) -> TokenCount:
        return self.counts.get(worker_id, TokenCount())


class Desk:
    """One stage, its replicas, and a time that the test moves."""

    def __init__(self, *workers: WorkerId, swaps: int = 1, fragments: int = 1, regions: str = "") -> None:
        self.ledger = Ledger()
        rules = rules_for("pairs", warmup=Phase(5, 1.0, 0.0), swaps=swaps, fragments=fragments)
        self.links = PassiveEstimates()
        self.rounds = StageRounds(3, PairSettings(rules, 7, TOKENS_TOTAL, 1000), self.links, self.ledger)
        self.now_s = 100.0
        self.tokens_done = 500
        for number, worker_id in enumerate(workers):
            region = regions[number] if regions else "eu"
            assert self.rounds.joined(worker_id, 1, region, self.now_s) == []

    def ready(
        self,
        worker_id: WorkerId,
        slot: int,
        *,
        tokens: int = 0,
        step_s: float = 0.2,
        begins_in_s: float | None = None,
        incarnation: int = 1,
    ) -> list[Told]:
        """`begins_in_s`: when the slot begins by the clock of the replica, by default the right one."""
        clock = self.rounds.clock
        if begins_in_s is None:
            begins_in_s = clock.begins_at(slot) - self.now_s if slot and clock.running else 0.0
        message = RoundReady(3, slot, begins_in_s, tokens, step_s)
        return self.rounds.ready(worker_id, incarnation, message, self.tokens_done, self.now_s)

    def started(self) -> Desk:
        for worker_id in self.rounds.replicas:
            told = self.ready(worker_id, 0)
        assert {w for w, m in told if isinstance(m, SlotClock)} == set(self.rounds.replicas)
        return self

    def all_ready(self, slot: int) -> list[Told]:
        return [told for worker_id in list(self.rounds.replicas) for told in self.ready(worker_id, slot)]

    def look(self, after_s: float = 0.0) -> list[Told]:
        self.now_s += after_s
        return self.rounds.look_at_time(self.tokens_done, self.now_s)

    def outcome(self, worker_id: WorkerId, match: PairMatched, result: SwapResult, **changes: object) -> None:
        message = RoundOutcome(
            3, match.slot, match.fragment, match.swap, match.round_id, match.partner, result
        )
        self.rounds.outcome(worker_id, 1, replace(message, **changes))  # type: ignore[arg-type]


def matches(told: list[Told]) -> dict[tuple[WorkerId, int], PairMatched]:
    return {(w, m.swap): m for w, m in told if isinstance(m, PairMatched)}
