"""How far two wall clocks may be apart, in one place for both sides, and the sentences about it."""

from __future__ import annotations

from starlings_protos.authority import BACKDATED_S
from starlings_protos.invite import spoken_duration

# A machine that is further behind than certificates are backdated would find them not yet valid; five minutes are kept
# for clocks that drift further apart after the join.
BEHIND_TOLERANCE_S = BACKDATED_S - 300.0
# A machine that is ahead finds certificates older than they are. Seven days less the third of a life before which all
# are renewed leaves two; a wrong time zone is at most one.
AHEAD_TOLERANCE_S = 86400.0
# Below this nobody needs to hear of it.
NOTICE_S = 60.0


def skew_problem(skew_s: float) -> str | None:
    """Why a machine cannot take part whose clock is `skew_s` ahead of the coordinator's (negative: behind); or None."""
    if -BEHIND_TOLERANCE_S <= skew_s <= AHEAD_TOLERANCE_S:
        return None
    return (
        f"This machine's clock is {_spoken(skew_s)} the coordinator's, too far for certificates: set the clock (switch "
        "time synchronisation on; check the time zone), then join again."
    )


def skew_notice(skew_s: float) -> str | None:
    """What to say about a skew that does no harm; None when it is not worth a line."""
    if abs(skew_s) < NOTICE_S:
        return None
    return (
        f"This machine's clock is {_spoken(skew_s)} the coordinator's; that is tolerated, but better set it."
    )


def _spoken(skew_s: float) -> str:
    return f"{spoken_duration(skew_s)} {'ahead of' if skew_s > 0 else 'behind'}"
