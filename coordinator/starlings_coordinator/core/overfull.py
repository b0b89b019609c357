"""A worker that has no memory for its span after all: it holds fewer stages from there on, or stands by and says why.

What it was measured to have is corrected, in the log too: less than the plan gave it, so that no plan gives it as much
again. Then it is as if it had given its span up. The worker itself has tried before with half of a microbatch at a
time, and so on down to single rows (worker: fitting.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from starlings_coordinator.core.members import Member
from starlings_coordinator.core.observers import stage_words
from starlings_coordinator.core.records import WorkerMeasured

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

# Of what did not suffice.
LESS = 0.95


def overfull(core: Core, member: Member, reason: str) -> None:
    """A holder of the live plan, while others train."""
    span, probe = core.state.spans[member.worker_id], member.probe
    assert probe is not None
    planned = core.state.planned.get(member.worker_id)
    given = planned.memory_bytes if planned is not None and planned.memory_bytes else probe.memory_bytes
    less = int(LESS * min(given, probe.memory_bytes))
    member.probe = replace(probe, memory_bytes=less)
    core.desk.record(WorkerMeasured(member.worker_id, member.incarnation, member.probe))
    words = f"no memory for {stage_words(span)}, not even for one row at a time ({reason})"
    core.desk.announce(
        "out_of_memory",
        f"{member.worker_id} has {words}: planned with {less / 1e9:.2f} GB from here on, instead of "
        f"{probe.memory_bytes / 1e9:.2f}",
    )
    core.planning.stand_by(member, words)
    core.membership.changed()
    core.planning.holder_gone(member.worker_id, f"{member.worker_id} has {words}")
    core.joining.placing.ask_anew()
