"""`python -m starlings_simulator.replay --seed N`: run one seed again and print what happened, line by line.

The last line is the verdict and the transcript's digest: equal for equal seeds, whatever the machine and its
hash seed.
"""

from __future__ import annotations

import argparse
import sys

from starlings_simulator.cores import CORES, simulation_of
from starlings_simulator.scenario import draw, without_crashes_of_the_coordinator
from starlings_simulator.simulation import Outcome, Violation
from starlings_simulator.transcript import Transcript
from starlings_simulator.verdicts import objection


def main(arguments: list[str] | None = None) -> int:
    """0: it ended as it should; 1: an invariant broke, or the job hung or ended otherwise."""
    parser = argparse.ArgumentParser(prog="starlings_simulator.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--core", choices=sorted(CORES), default="real", help="which coordinator")
    parser.add_argument("--calm", action="store_true", help="the same fleet and job without faults")
    parser.add_argument("--only", default="", help="lines that contain this text")
    parser.add_argument("--verdict", action="store_true", help="only the last line")
    options = parser.parse_args(arguments)
    scenario = draw(options.seed, calm=options.calm)
    if options.core == "standin":
        scenario = without_crashes_of_the_coordinator(scenario)
    try:
        outcome = simulation_of(scenario, options.core).run()
    except Violation as violation:
        _print(violation.transcript, options.only, quiet=options.verdict)
        print(f"seed {options.seed}: violated: {violation.cause}")
        return 1
    _print(outcome.transcript, options.only, quiet=options.verdict)
    print(summary(outcome))
    wrong = objection(scenario, outcome)
    if wrong:
        print(f"seed {options.seed}: {wrong}")
    return 1 if wrong else 0


def summary(outcome: Outcome) -> str:
    return (
        f"seed {outcome.seed}: {outcome.verdict} ({outcome.reason}) after {outcome.ended_at_s:.3f} s, "
        f"{outcome.events} events, {outcome.restarts} restarts, {outcome.rewinds} rewinds; "
        f"transcript {outcome.transcript.digest()[:16]}"
    )


def _print(transcript: Transcript, only: str, *, quiet: bool) -> None:
    if quiet:
        return
    for line in transcript.lines():
        if only in line:
            print(line)


if __name__ == "__main__":
    sys.exit(main())
