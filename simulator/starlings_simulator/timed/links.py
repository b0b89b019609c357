"""Links as fluids: transfers that are under way share their sites' uplinks and downlinks.

Each direction of a site's access is divided among its transfers by water filling (Bertsekas and Gallager, Data
Networks, section 6.5.2): all may have as much as a common level, and what one cannot use because its other end offers
less raises the level of the rest. A transfer's rate is the lesser of the two offers. Urgent transfers (activations and
gradients) come first, as workers send them first; the rest shares what they leave, and a little more, so that nothing
stands still. When a transfer begins or ends, the offers of its two ends are computed anew; what others elsewhere could
gain by that, they learn at their own next change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from starlings_simulator.clock import Clock, Timer
from starlings_simulator.timed.machines import Swarm

# What is left to transfers that are not urgent, whatever the urgent ones could use.
BACKGROUND_SHARE = 0.02
# A change of rate that is smaller is none: it would only move timers about.
_SAME = 1e-3


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes on their way. `rate` holds since `updated_s`."""

    source: str
    target: str
    urgent: bool
    kind: str
    left_bytes: float
    done: Callable[[], None]
    rate: float = 0.0
    updated_s: float = 0.0
    up_offer: float = inf
    down_offer: float = inf
    timer: Timer | None = None
    over: bool = False


@dataclass(eq=False, slots=True)
class _End:
    """One direction of a site's access."""

    rate: float
    transfers: dict[Transfer, None] = field(default_factory=dict)
    carried_bytes: float = 0.0


class Links:
    def __init__(self, clock: Clock, swarm: Swarm) -> None:
        self._clock = clock
        self._swarm = swarm
        self._up = {name: _End(site.up_bytes_per_s) for name, site in swarm.sites.items()}
        self._down = {name: _End(site.down_bytes_per_s) for name, site in swarm.sites.items()}
        # Bytes that have left a worker, by what they are; of a transfer that was broken off, what had gone.
        self.sent_bytes: Counter[str] = Counter()

    def start(
        self,
        source: str,
        target: str,
        byte_count: float,
        kind: str,
        done: Callable[[], None],
        *,
        urgent: bool = False,
    ) -> Transfer:
        """`done` is called when the last byte has left, unless it is cancelled before."""
        transfer = Transfer(
            source, target, urgent, kind, max(1.0, byte_count), done, updated_s=self._clock.now_s
        )
        if source == target:
            lan = self._swarm.sites[source].lan_bytes_per_s if source in self._swarm.sites else inf
            self._set_rate(transfer, lan)
            return transfer
        for end in self._ends(transfer):
            end.transfers[transfer] = None
        self._share(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        if not transfer.over:
            self._finish(transfer)

    def carried_bytes(self, site: str) -> tuple[float, float]:
        """Up and down, so far, between this site and others."""
        return self._up[site].carried_bytes, self._down[site].carried_bytes

    # ------------------------------------------------------------------

    def _ends(self, transfer: Transfer) -> tuple[_End, ...]:
        if transfer.source == transfer.target:
            return ()
        ends = []
        if transfer.source in self._up:
            ends.append(self._up[transfer.source])
        if transfer.target in self._down:
            ends.append(self._down[transfer.target])
        return tuple(ends)

    def _share(self, changed: Transfer) -> None:
        """Compute the offers of both ends of `changed` anew, and move the timers of whoever is concerned."""
        touched: dict[Transfer, None] = {}
        up, down = self._up.get(changed.source), self._down.get(changed.target)
        if down is not None:
            # The other end has not heard of a new transfer yet: it will give it an equal part.
            for transfer, offer in _divide(
                down, lambda t: min(t.up_offer, self._even_part(self._up.get(t.source), t))
            ):
                transfer.down_offer = offer
                touched[transfer] = None
        if up is not None:
            for transfer, offer in _divide(up, lambda t: t.down_offer):
                transfer.up_offer = offer
                touched[transfer] = None
        for transfer in touched:
            self._set_rate(transfer, min(transfer.up_offer, transfer.down_offer))

    @staticmethod
    def _even_part(end: _End | None, transfer: Transfer) -> float:
        return end.rate / len(end.transfers) if end is not None and transfer.up_offer == inf else inf

    def _set_rate(self, transfer: Transfer, rate: float) -> None:
        now_s = self._clock.now_s
        if transfer.timer is not None and abs(rate - transfer.rate) <= _SAME * transfer.rate:
            return
        self._settle(transfer, now_s)
        transfer.rate = rate
        if transfer.timer is not None:
            transfer.timer.cancel()
        transfer.timer = None
        if rate > 0:
            seconds = 0.0 if rate == inf else transfer.left_bytes / rate
            transfer.timer = self._clock.after(seconds, lambda: self._arrived(transfer))

    def _settle(self, transfer: Transfer, now_s: float) -> None:
        """Account for what went by since the rate was last set."""
        moved = transfer.left_bytes
        if transfer.rate != inf:
            moved = min(moved, transfer.rate * (now_s - transfer.updated_s))
        transfer.updated_s = now_s
        transfer.left_bytes -= moved
        self.sent_bytes[transfer.kind] += moved  # type: ignore[assignment]
        for end in self._ends(transfer):
            end.carried_bytes += moved

    def _arrived(self, transfer: Transfer) -> None:
        if not transfer.over:
            self._finish(transfer)
            transfer.done()

    def _finish(self, transfer: Transfer) -> None:
        self._settle(transfer, self._clock.now_s)
        transfer.over = True
        if transfer.timer is not None:
            transfer.timer.cancel()
        ends = self._ends(transfer)
        for end in ends:
            end.transfers.pop(transfer, None)
        if ends:
            self._share(transfer)


def _divide(end: _End, cap_of: Callable[[Transfer], float]) -> list[tuple[Transfer, float]]:
    """What one direction of an access offers each of its transfers, the urgent first."""
    urgent = [(t, cap_of(t)) for t in end.transfers if t.urgent]
    others = [(t, cap_of(t)) for t in end.transfers if not t.urgent]
    offers = fill(end.rate, urgent)
    left = end.rate
    if end.rate != inf:
        left -= sum(min(cap, offer) for (_, cap), (_, offer) in zip(urgent, offers, strict=True))
    return offers + fill(max(left, BACKGROUND_SHARE * end.rate), others)


def fill(rate: float, capped: list[tuple[Transfer, float]]) -> list[tuple[Transfer, float]]:
    """How much of `rate` each may have, when the others use no more than their caps."""
    if rate == inf:
        return [(transfer, inf) for transfer, _ in capped]
    left, level = rate, 0.0
    ranked = sorted(cap for _, cap in capped)
    for number, cap in enumerate(ranked):
        level = left / (len(ranked) - number)
        if cap >= level:
            break
        left -= cap
    else:
        # Everybody has what it can use, and this is left.
        return [(transfer, cap + left) for transfer, cap in capped]
    return [(transfer, level) for transfer, _ in capped]
