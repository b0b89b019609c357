"""What a replica weighs in a pair: the tokens that it trained since its fragment's last round, by the ledger.

Never by its own claim. And the ledger's number is capped twice more: by what was leased to it and not trained before
(leases are taken in store, so those of another time count), and by what its device was measured to do, so that a worker
that is acknowledged for work of others gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlings_protos.messages import WorkerId

# A worker may be faster than planned by this factor before it gains no more.
PLANNED_RATE_FACTOR = 2.0
# A claim this many times above what was leased is no error of counting.
CLAIM_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Of one replica: totals since training began, and the rate that the plan expects."""

    trained: float = 0.0
    leased: float = 0.0
    # 0: the plan says nothing.
    planned_per_s: float = 0.0


class TokenLedger(Protocol):
    def tokens(self, worker_id: WorkerId, stage: int) -> TokenCount:
        """Target tokens whose gradient the replica holds, and of leases whose gradient it may come to hold."""
        ...


@dataclass(frozen=True, slots=True)
class TokenMark:
    """Where the ledger stood at a replica's last round."""

    count: TokenCount
    at_s: float


def credited(count: TokenCount, mark: TokenMark, now_s: float) -> float:
    """Tokens since the mark, capped."""
    tokens = max(0.0, min(count.trained, count.leased) - mark.count.trained)
    if count.planned_per_s > 0:
        tokens = min(tokens, PLANNED_RATE_FACTOR * count.planned_per_s * max(0.0, now_s - mark.at_s))
    return tokens


def incredible(claimed: float, count: TokenCount, mark: TokenMark) -> bool:
    """Whether a replica claims what nobody can have trained. It gains nothing by it, and is named."""
    return claimed > CLAIM_FACTOR * max(1.0, count.leased - mark.count.trained)
