"""Digests of blocks that several workers report: whether replicas are equal, and who is the odd one."""

from __future__ import annotations

from collections.abc import Mapping

from starlings_protos.messages import WorkerId


def disagreement(reports: Mapping[WorkerId, Mapping[str, str]]) -> str:
    """The first block of which two workers report different digests, in words; "" when all agree."""
    seen: dict[str, tuple[str, WorkerId]] = {}
    for worker_id, digests in sorted(reports.items()):
        for block, digest in sorted(digests.items()):
            first = seen.setdefault(block, (digest, worker_id))
            if first[0] != digest:
                return f"block {block} differs between {first[1]} and {worker_id}"
    return ""


def odd_ones(reports: Mapping[WorkerId, Mapping[str, str]]) -> set[WorkerId]:
    """Who holds some block unlike most of its replicas; of two unlike halves, the one without the lowest id."""
    holders: dict[str, dict[str, list[WorkerId]]] = {}
    for worker_id, digests in sorted(reports.items()):
        for block, digest in digests.items():
            holders.setdefault(block, {}).setdefault(digest, []).append(worker_id)
    odd: set[WorkerId] = set()
    for groups in holders.values():
        # `max` keeps the first of equals, which holds the lowest id.
        most = max(groups.values(), key=len)
        odd |= {w for group in groups.values() if group is not most for w in group}
    return odd
