"""A microbatch that this worker holds, and what the worker knows of where it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from starlings_protos.messages import Hop, LeaseKind, MicrobatchHeader, MicrobatchKey, WorkerId


class Phase(enum.IntEnum):
    """In the order in which a microbatch goes through them.

    Forward-only kinds end after AWAY (or FORWARD, at the last stage).
    """

    # Admitted; its tensors are coming in.
    ARRIVING = 0
    # Waits for the device, or for the step that it belongs to.
    QUEUED = 1
    FORWARD = 2
    # Computed; waits for a holder of the next stage.
    PLACING = 3
    # Sent on, or being sent; its gradient comes back some time.
    AWAY = 4
    GRADIENT_ARRIVING = 5
    GRADIENT_QUEUED = 6
    BACKWARD = 7
    # Accumulated; the gradient at its entry goes back to the hop before.
    RETURNING = 8


@dataclass(slots=True)
class Held:
    key: MicrobatchKey
    entry_stage: int
    # The hops before this worker; empty for one's own lease.
    route: tuple[Hop, ...]
    loss_denominator: float
    # Order of admission.
    order: int
    phase: Phase
    # The header whose transfer is under way (ARRIVING and GRADIENT_ARRIVING).
    arriving: MicrobatchHeader | None = None
    exit_stage: int = -1
    # It leaves early for a helper that may be idle.
    helped: bool = False
    # Whom the forward output went to, or goes to.
    next_worker: WorkerId | None = None
    # The whole route, known once it ended.
    full_route: tuple[Hop, ...] = ()
    loss_sum: float = 0.0
    target_count: int = 0
    # A transfer to `next_worker` (forward) or to the hop before (backward) is under way.
    sending_forward: bool = False
    sending_backward: bool = False
    sent_at_s: float = 0.0
    # When its last pass ended here.
    computed_at_s: float = 0.0
    # A transfer of unknown fate: only the same receiver may be asked again.
    ambiguous: bool = False
    tries: int = 0
    busy_tries: int = 0
    retry_at_s: float = 0.0
    failing_since_s: float | None = None
    # Since when it waits for the device, or to be taken by the next worker; what it has waited since it is here, at
    # workers behind this one too, once its gradient is back.
    began_at_s: float = 0.0
    waiting_since_s: float | None = None
    waited_s: float = 0.0
    # `async`: the own steps of each stage of the run when its forward pass was computed.
    steps_at_forward: tuple[int, ...] = ()

    @property
    def trains(self) -> bool:
        return self.key.kind is LeaseKind.TRAIN

    @property
    def epoch(self) -> tuple[int, int]:
        return (self.key.step, self.key.attempt)

    @property
    def previous(self) -> WorkerId | None:
        return self.route[-1].worker_id if self.route else None

    def own_hop(self, worker_id: WorkerId) -> Hop:
        return Hop(worker_id, self.entry_stage, self.exit_stage)

    def waits(self, now_s: float) -> None:
        self.waiting_since_s = now_s

    def goes_on(self, now_s: float, *, unavoidable_s: float = 0.0) -> None:
        """`unavoidable_s`: of its wait, what it would have taken anyway."""
        if self.waiting_since_s is not None:
            self.waited_s += max(0.0, now_s - self.waiting_since_s - unavoidable_s)
            self.waiting_since_s = None

    def settle(self) -> None:
        """The present transfer succeeded: later ones start with a clean slate."""
        self.ambiguous = False
        self.tries = 0
        self.busy_tries = 0
        self.retry_at_s = 0.0
        self.failing_since_s = None
