"""What the replicas of a real swarm say of their rounds, collected from its status replies."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlings_protos import control_pb2
from starlings_protos.pair_messages import SoloReason, SwapResult
from swarms import LiveSwarm

COMMITTED, SOLO = int(SwapResult.COMMITTED), int(SwapResult.SOLO)


class Rounds:
    """What replicas of stage 0 say of their swaps, as status replies come in. Called with each of them."""

    def __init__(self) -> None:
        # By worker, slot and swap; and when it was seen first.
        self.outcomes: dict[tuple[str, int, int], control_pb2.RoundOutcome] = {}
        self.seen_s: dict[tuple[str, int, int], float] = {}
        self.tokens: dict[str, int] = {}
        self.slot = 0
        self.averaged = 0

    def __call__(self, reply: control_pb2.StatusReply) -> None:
        self.tokens = {worker.worker_id: worker.tokens for worker in reply.workers}
        for stage in reply.exchanges:
            self.slot, self.averaged = stage.slot, stage.rounds_averaged
            for replica in stage.replicas:
                key = (replica.worker_id, replica.last.slot, replica.last.swap)
                if replica.HasField("last") and key not in self.outcomes:
                    self.outcomes[key] = replica.last
                    self.seen_s[key] = time.monotonic()

    def of(self, worker_id: str, since_slot: int = 0) -> list[control_pb2.RoundOutcome]:
        return [o for (w, slot, _), o in self.outcomes.items() if w == worker_id and slot >= since_slot]

    def table(self) -> str:
        """For people who look for why a test failed."""
        return "\n".join(
            f"{w} slot {slot}.{swap} with {o.partner or list(o.members) or '-'}: {SwapResult(o.result).name} "
            f"{SoloReason(o.solo_reason).name} {o.detail} {[(d.worker_id, d.reason) for d in o.dropped] or ''} "
            f"{o.fraction} distance {o.distance:.3g} in {o.seconds:.2f} s"
            for (w, slot, swap), o in sorted(self.outcomes.items(), key=lambda item: item[0][1:])
        )


def watch(
    swarm: LiveSwarm, rounds: Rounds, until: Callable[[control_pb2.StatusReply], object], within_s: float
) -> control_pb2.StatusReply:
    """Follows the swarm until that holds, and hands every reply to `rounds`; prints its table when it does not."""

    def look(reply: control_pb2.StatusReply) -> object:
        rounds(reply)
        return until(reply)

    try:
        return swarm.wait(look, within_s)
    except AssertionError:
        print(rounds.table())
        raise
