"""A worker's half of exchanges in pairs. Pure: no clock, no dice, no tensors; symbols in, effects out.

| file | what |
| --- | --- |
| slots.py | `StageSlots`: when slots begin, extrapolated from the coordinator's last word |
| work.py | what is asked of device and network, and what comes of it |
| swap.py | `Swap`: one exchange with one partner, from match to outcome |
| stage_rounds.py | `StageRounds`: one stage's slots, its swaps in order, rounds alone in a row, readiness |
| pair_rounds.py | `PairRounds`: all stages of a span; the way in for events and questions of peers |
| meeting.py | `Meeting`: what the worker's core knows of all that, also in jobs without |

States of a stage, and what moves it on:

    no clock --SlotClock--> between slots --slot reached--> outer step --OuterStepTaken--> swap 0 --> swap 1 --> over
                                 ^                                                                          |
                                 +---------------------------- next slot reached (whatever runs, ends) -----+

States of a swap:

    announced --start--> encoding --PairEncoded--> sending, waiting --payload here--> judging --> PREPARED said
        any of these --deadline, silence, refusal, fence, partner's "declined", device failure--> over: solo, and why
    PREPARED said, and the partner's PREPARED heard before the deadline --> committing --PairCommitted--> averaged
    averaged --own PREPARED acknowledged--> over: committed
    averaged --deadline, silence, or "it is over here"--> over: one-sided (perhaps the partner has averaged, too)

The outer step comes first and is the solo outcome: a swap that comes to nothing has nothing to undo, and nothing waits
for one. The commit is one device effect over a whole, verified payload. Device effects are carried out in the order in
which they are asked for, so a commit that was decided before the next slot is applied before its outer step.

| what fails | what happens |
| --- | --- |
| no match came, or too late | the slot is a solo round: NOT_MATCHED, LATE |
| the partner is frozen or dead | no sign of life for `progress_s` (5 s): SILENT; the next swap begins |
| the partner is busy or slow | it answers, so it is waited for until the swap's deadline: LATE |
| the partner goes on alone | it says so, or answers "stale": DECLINED |
| the partner is fenced by a newer plan | FENCED at once; a new life of it knows no round id of the old one |
| this worker was frozen | its deadlines are over, so nothing is committed; of missed slots only the newest is taken |
| a payload of another slot, fragment, round, or sender | refused before its body is read; nothing here changes |
| a payload that is malformed, not finite, implausible | REFUSED, with what the device said; the partner is named |
| it is too far from the partner after rounds alone | TOO_FAR: it should copy state instead |
| a payload or word is lost | repeated until the deadline, later and later; duplicates are recognised |
| the last word is lost | the side that has both averages: one-sided, reported so |
| bytes come late | refused (stale), or forgotten with the swap |
| the coordinator is away | slots go on; a match that is known is used; then slots are solo rounds |
| the coordinator matches a slot anew (restarted) | the newer match replaces one that has not begun; else it is late |
| the device fails | FAILED |

After `solo_rounds_limit` rounds of a fragment alone the rule takes mu = 0 and eta = 1: `TakeOuterStep.solo_rounds`
tells it. `core/streaming/stream.py` owns the `PairRounds` of a worker and tells them of steps and time; the worker's
core passes on what comes in; `pair_device.py`, `pair_transfers.py` and `pair_inbound.py` carry out what they ask for.
"""
