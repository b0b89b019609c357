"""What a run may end with, given what was done to it."""

from __future__ import annotations

from starlings_simulator.scenario import Scenario
from starlings_simulator.simulation import Outcome


def objection(scenario: Scenario, outcome: Outcome) -> str:
    """Why this end is wrong; "" when it is right.

    A job whose workers all come back must be done. One that lost workers for good may wait, with a reason. One
    whose device fails at random may fail, with the microbatch or the worker named.
    """
    match outcome.verdict:
        case "done":
            missing = scenario.steps - outcome.highest_version
            return f"{missing} steps are missing" if missing else ""
        case "waiting":
            if scenario.gone_for_good and outcome.phase == "gathering":
                return ""
            return f"nobody is gone for good, and yet: {outcome.reason}"
        case "failed":
            if scenario.compute_failure or scenario.exchange_failure:
                return "" if outcome.reason else "it failed without a reason"
            return f"nothing fails by itself here, and yet: {outcome.reason}"
        case _:
            return "it hangs and does not say why"
