"""The clock of claims does not follow the machine's, once the process lives; certificates do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from starlings_coordinator.clock import SystemClock
from starlings_coordinator.signing import RENEW_AFTER_S, AssignmentSigner
from starlings_protos.assignments import CoordinatorClock, verify_assignment
from starlings_protos.identity import KEEPER as KEEPER_PEER
from starlings_protos.identity import new_key

MONTH = 30 * 86400.0


@dataclass
class Machine:
    """Both clocks of one computer."""

    up_s: float = 5_000.0
    ahead_s: float = 0.0

    def monotonic(self) -> float:
        return self.up_s

    def wall(self) -> float:
        return 1_800_000_000.0 + self.up_s + self.ahead_s


@pytest.mark.parametrize("jump_s", [-MONTH, -86400.0, -600.0, 600.0, 86400.0, MONTH])
def test_a_jump_of_the_coordinators_clock_makes_no_claim_void_and_renews_nothing_early(jump_s: float) -> None:
    machine = Machine()
    clock = SystemClock(machine.monotonic, machine.wall)
    signer = AssignmentSigner(new_key(), "job")
    # A peer whose own wall clock is never asked; its monotonic one began elsewhere.
    peer = CoordinatorClock.learnt(clock.now().wall_s, machine.up_s - 4_321.0)
    signed = signer.sign_keeper(clock.now().wall_s)

    def accepted() -> bool:
        now_wall_s = peer.wall_s(machine.up_s - 4_321.0)
        verify_assignment(signer.key_der, signed, worker_id=KEEPER_PEER.id, job="job", now_wall_s=now_wall_s)
        return True

    machine.ahead_s = jump_s
    assert accepted(), "of one signed before the jump"
    assert clock.now().wall_s == 1_800_000_000.0 + machine.up_s
    signed = signer.sign_keeper(clock.now().wall_s)
    assert accepted(), "of one signed after it, by who has heard nothing since"
    machine.up_s += RENEW_AFTER_S
    assert accepted(), "until it is renewed"
