"""Where a microbatch leaves this worker's span, and who takes it next: pure functions of what is known now.

The measure is the expected time until the last stage is done (design section 6): seconds here up to the
boundary, the link, what waits at the next holder, its seconds to the end of its span, and beyond that the
fastest holder of each stage.

A microbatch visits a worker once. `onward` keeps the rest of the way open: after leaving here every later
stage must have a holder that was not visited. That holds by induction for the next hop too, because spans are
contiguous: whoever runs to the end of its span is needed for no later stage.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from starlings_protos.messages import Span, WorkerId


@dataclass(frozen=True, slots=True)
class PeerView:
    """What this worker knows of one holder at this moment.

    `stage_seconds`: forward plus backward of one microbatch per stage of the span, in order. `backlog_s`:
    work waiting there by its own last word, aged, plus what was sent there since. `free_slots`: None when
    unknown. `usable`: not waiting for a retry. `link_s`: how long sending there took lately.
    """

    worker_id: WorkerId
    span: Span
    stage_seconds: tuple[float, ...]
    backlog_s: float = 0.0
    free_slots: int | None = None
    usable: bool = True
    link_s: float = 0.0

    def seconds(self, first_stage: int, last_stage: int) -> float:
        """Seconds for the stages first..last, all inside the span."""
        low = first_stage - self.span.first_stage
        return sum(self.stage_seconds[low : low + last_stage - first_stage + 1])


@dataclass(frozen=True, slots=True)
class Boundary:
    """A way out:

    leave after stage `exit_stage`, to `next_worker` (None: the model ends here, or nobody is usable now). `helped`:
    it leaves early so that a helper takes over what waits here, not because that is its own fastest way.
    """

    exit_stage: int
    next_worker: WorkerId | None
    cost_s: float
    helped: bool = False


@dataclass(frozen=True, slots=True)
class Onward:
    """For each stage up to `stage_count`: is there a way on from it, and how long at least, both off the route.

    Holders of a stage behind the next hop's span are never the next hop itself, so one table serves every choice.
    """

    passable: tuple[bool, ...]
    fastest_s: tuple[float, ...]


def onward(stage_count: int, peers: Collection[PeerView], visited: Collection[WorkerId]) -> Onward:
    passable, fastest_s = [True], [0.0]
    for stage in reversed(range(stage_count)):
        seconds = [
            peer.seconds(stage, stage)
            for peer in peers
            if stage in peer.span and peer.worker_id not in visited
        ]
        passable.append(passable[-1] and bool(seconds))
        fastest_s.append(fastest_s[-1] + min(seconds, default=0.0))
    return Onward(tuple(reversed(passable)), tuple(reversed(fastest_s)))


def choose_next(
    stage: int,
    stage_count: int,
    peers: Sequence[PeerView],
    visited: Collection[WorkerId],
    rng: random.Random,
    table: Onward | None = None,
) -> Boundary | None:
    """The best usable holder of `stage`, or None.

    A few per cent of noise keep many senders from picking the same one. Holders that said they are full come
    after all others. `peers` in a fixed order, so that a seed fixes the answer.
    """
    table = table or onward(stage_count, peers, visited)
    best: tuple[bool, float, WorkerId] | None = None
    for peer in peers:
        if not peer.usable or stage not in peer.span or peer.worker_id in visited:
            continue
        end = peer.span.last_stage
        # Running to the end of its span must leave a way; no exit of it asks for less.
        if not table.passable[end + 1]:
            continue
        cost_s = peer.link_s + peer.backlog_s + peer.seconds(stage, end) + table.fastest_s[end + 1]
        rank = (peer.free_slots == 0, cost_s * rng.uniform(0.97, 1.03), peer.worker_id)
        if best is None or rank < best:
            best = rank
    return None if best is None else Boundary(stage - 1, best[2], best[1])


def helpers(peers: Iterable[PeerView]) -> list[PeerView]:
    """Those with room that get work from others alone. Whoever holds the first stage leases as much as it can do."""
    return [peer for peer in peers if peer.span.first_stage > 0 and peer.free_slots != 0]


def choose_exit(
    entry_stage: int,
    span: Span,
    stage_count: int,
    own_stage_seconds: Mapping[int, float],
    peers: Sequence[PeerView],
    visited: Collection[WorkerId],
    *,
    early_exits: Collection[int],
    margin: float,
    rng: random.Random,
    waiting: int = 0,
) -> Boundary:
    """Where a microbatch that enters at `entry_stage` leaves `span`; normally the end of the span.

    An earlier stage is taken only if it is one of `early_exits`, when its expected time beats the span's end by
    the factor `margin` and every later stage has a holder off the route. `visited` includes this worker.

    Args:
        waiting: microbatches that wait for what this one takes here. They do so for less when a helper takes it over.
    """
    end = span.last_stage
    table = onward(stage_count, peers, visited)
    own_s = 0.0
    waited_s = waiting * sum(own_stage_seconds.get(stage, 0.0) for stage in range(entry_stage, end + 1))
    able = helpers(peers) if waiting else []
    options: list[Boundary] = []
    for exit_stage in range(entry_stage, end + 1):
        own_s += own_stage_seconds.get(exit_stage, 0.0)
        if exit_stage == stage_count - 1:
            options.append(Boundary(exit_stage, None, own_s + waited_s))
            continue
        if exit_stage != end and not (exit_stage in early_exits and table.passable[exit_stage + 1]):
            continue
        chosen = choose_next(exit_stage + 1, stage_count, peers, visited, rng, table)
        if exit_stage != end and able:
            helper = choose_next(exit_stage + 1, stage_count, able, visited, rng, table)
            if helper is not None:
                cost_s = own_s + helper.cost_s + waiting * own_s
                options.append(Boundary(exit_stage, helper.next_worker, cost_s, helped=True))
        if chosen is not None:
            options.append(Boundary(exit_stage, chosen.next_worker, own_s + chosen.cost_s + waited_s))
        elif exit_stage == end:
            options.append(Boundary(exit_stage, None, own_s + waited_s))
    at_end = options[-1]
    earlier = min(options[:-1], key=lambda option: option.cost_s, default=at_end)
    if at_end.next_worker is None and end != stage_count - 1:
        # Nobody is usable after the span's end just now: an earlier way that works is better than waiting.
        return earlier
    return earlier if earlier.cost_s * margin < at_end.cost_s else at_end
