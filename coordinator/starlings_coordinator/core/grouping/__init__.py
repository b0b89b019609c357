"""The coordinator's half of exchanges in groups: who averages with whom, when a round is closed, what it decides.

Slots, readiness, weights and lives are those of pairs (`pairing/`); everything here is soft like there. What each
member does in a round, and what happens when something fails: `starlings_worker/core/groups/__init__.py`.

| file | what |
| --- | --- |
| round.py | `GroupRound`: from contributions held to the decision |
| stage.py | `GroupStage`: one stage: seats and adopters by starting points, rounds, outcomes |
| book.py | `GroupBook`: what members report |

    all are ready for slot k, or it begins soon --> seats: those with the starting point that most have --> GroupMatched
    every owner has everybody's contribution, or 55 % of the time is over --> GroupClosed(those whom all owners have)
    every member has every aggregate, or 90 % of the time is over --> GroupDecided(parts that a majority has alike)

A round that the coordinator forgets (it was started anew) is over when the next slot begins: nobody applies anything,
or those do who heard the decision before; then starting points differ, and the fewer copy those of the more.
"""
