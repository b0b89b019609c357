"""What a run may end with, given what was done to it."""

from __future__ import annotations

from starlings_simulator.faults import FaultKind
from starlings_simulator.scenario import Scenario
from starlings_simulator.simulation import Outcome


def objection(scenario: Scenario, outcome: Outcome) -> str:
    """Why this end is wrong; "" when it is right.

    A job whose workers all come back must be done. One that lost workers for good may wait, if it says what for and
    that is true. One whose device or disk fails may fail, with the reason named.
    """
    match outcome.verdict:
        case "done":
            missing = scenario.steps - outcome.highest_version
            return f"{missing} steps are missing" if missing else ""
        case "waiting":
            if not scenario.gone_for_good:
                return f"nobody is gone for good, and yet: {outcome.reason}"
            if outcome.phase != "gathering" or outcome.present >= scenario.least_workers:
                return f"{outcome.present} workers are enough, and yet: {outcome.reason}"
            return ""
        case "failed":
            if not outcome.reason:
                return "it failed without a reason"
            if scenario.compute_failure or scenario.exchange_failure:
                return ""
            if scenario.has(FaultKind.DISK_FULL) and "checkpoint could not be saved" in outcome.reason:
                return ""
            return f"nothing fails by itself here, and yet: {outcome.reason}"
        case _:
            return "it hangs and does not say why"
