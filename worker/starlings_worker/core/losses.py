"""What becomes of a microbatch when a worker on its route is lost and the attempt goes on: a pure verdict.

The coordinator keeps an attempt only when nothing that is done passed through the lost worker. It cannot know what is
half done; those who hold that do. Three rules, and the first that applies is the verdict:

- Gradient of a route through the lost worker is in an accumulator here, or about to be: FAILED. Part of that gradient
  went with the worker, so only a new attempt settles who has it.
- The lost worker is before this one on the route: DROPPED. The hop before it sends the microbatch along another
  route; when it was the first hop, its lease is granted to somebody else.
- The lost worker is the next hop: SENT_AGAIN, to another, also where it may have had the microbatch: whoever got it
  from there drops it by the rule before, or fails it by the first.

So an index is in the gradient of each stage once, or its attempt is void, in whatever order its messages come: nobody
takes what comes of a route with somebody who is not in the plan any more, and who knows a newer plan is asked to wait.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from starlings_protos.messages import Hop, WorkerId
from starlings_worker.core.microbatches import Held, Phase


class Fate(enum.Enum):
    STAYS = "stays"
    FAILED = "failed"
    DROPPED = "dropped"
    SENT_AGAIN = "sent again"


def absent(route: Iterable[Hop], present: Collection[WorkerId]) -> list[WorkerId]:
    """Who of `route` is in the plan no more. `present`: everybody in it, this worker too."""
    return [hop.worker_id for hop in route if hop.worker_id not in present]


def fate_of(held: Held, present: Collection[WorkerId]) -> Fate:
    """For a training microbatch of the attempt that goes on."""
    coming_back = held.arriving.route if held.phase is Phase.GRADIENT_ARRIVING and held.arriving else ()
    whole_route = held.full_route or coming_back
    accumulates = held.phase >= Phase.BACKWARD
    if absent(held.route, present):
        return Fate.FAILED if accumulates else Fate.DROPPED
    if absent(whole_route, present):
        return Fate.FAILED
    if held.next_worker is None or held.next_worker in present:
        return Fate.STAYS
    return Fate.SENT_AGAIN if held.phase in (Phase.PLACING, Phase.AWAY) else Fate.STAYS


def stream_fate_of(held: Held, present: Collection[WorkerId]) -> Fate:
    """The same where no barrier joins the stages, and what was added stays added: nothing has failed. What came through
    the lost worker cannot go back to it, and what was sent to it goes to another; stages behind that had it already add
    it twice.
    """
    if absent(held.route, present):
        return Fate.DROPPED
    if held.next_worker is None or held.next_worker in present:
        return Fate.STAYS
    return Fate.SENT_AGAIN if held.phase in (Phase.PLACING, Phase.AWAY) else Fate.STAYS
