"""Who meets whom in `gossip`: the one-peer exponential graph, made of pairs. Pure.

Slots come in cycles of ceil(log2 n). In slot k of a cycle the replica in place i meets the one in place i XOR 2^k,
places being those in the sorted list of who is ready. With n = 2^j replicas, all of them there, a cycle of even
averages gives each the exact mean of all, as the directed graph of Ying et al. 2021 ("Exponential graph is provably
efficient for decentralized deep training", section 4) does; and since a pair averages on both sides or not at all,
everybody's weight stays 1, where pushes to one side would need push-sum (Assran et al. 2019). With other numbers some
places have no partner in a slot; places turn by one from cycle to cycle, so that it is not always the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlings_coordinator.core.pairing.matching import SwapMatching
from starlings_protos.messages import WorkerId


def match_exponentially(ready: Iterable[WorkerId], turn: int) -> SwapMatching:
    """Disjoint pairs of one slot. The order of the replicas does not matter.

    Args:
        turn: of the slot's fragment, which has its own cycles: slot // fragments.
    """
    members = sorted(ready)
    count = len(members)
    if count < 2:
        return SwapMatching((), tuple(members))
    cycle, k = divmod(turn, (count - 1).bit_length())
    turned = [members[(place + cycle) % count] for place in range(count)]
    pairs = {
        (min(one, other), max(one, other))
        for place, one in enumerate(turned)
        if (partner := place ^ (1 << k)) < count
        for other in (turned[partner],)
    }
    met = {member for pair in pairs for member in pair}
    return SwapMatching(tuple(sorted(pairs)), tuple(member for member in members if member not in met))
