"""The arithmetic of low-communication training: what an exchange does to weights, once bytes are decoded.

Pure: tensors in, tensors changed in place; no clock, no dice, no I/O, and nothing here knows of peers or codecs.
Numbers and their checks: `starlings_job.exchange_rules` (`rules_for("pairs")`, `phase_at`, torch-free); bytes:
`starlings_job.exchange_traffic`.

| file | what |
| --- | --- |
| state.py | `FragmentState` (phi, m, ...) per replica and fragment; `Payload`, what travels |
| fragments.py | the cut of a group's vector into fragments of equal bytes |
| judging.py | `PairRule`: which partner is plausible, comeback, and that only a plausible one is averaged with |
| pairs.py | `pairs`: own Nesterov step at once, average on commit |
| noloco.py | `noloco`: momentum and averaging in one formula |
| diloco.py | `diloco`: mean displacement, one outer step for all; by fragments, overlapped |
| sparseloco.py | `sparseloco`: few values of each displacement, and error feedback |
| gossip.py | `gossip`: push-sum over the one-peer exponential graph |
| quasi_global.py | the inner optimizer of `gossip` |
| palsgd.py | `palsgd`: `pairs`, and pulls towards the last average between rounds |
| allreduce.py | `allreduce`: the mean gradient |
| outcome.py | verdicts, reasons, `RoundOutcome`: what was averaged, with whom, who was left out and why |
| ../robust.py | a group's contributions to one vector: norm bound, clipping, trimmed mean, centred clipping |

A pair's round, on both sides:

    payload = rule.at_slot(state, theta, phase)            # own step; training goes on at once
    own, theirs = decode(encode(payload)), what came       # one's own, decoded, too
    verdict = rule.judge(state, own, theirs, partner)      # before one says PREPARED
    averaged = rule.commit(state, theta, own, theirs, share, verdict)
    ...                                                    # second swap: rule.payload(state, phase)
    state.solo_rounds = 0                                  # or one more, where none of them stood

A group's round: `payload = rule.at_slot(state, theta, phase)`, then `rule.commit(state, theta, aggregate, phase)`
with what everybody decoded (`robust.aggregate` makes it), or nothing at all. sparseloco's takes one's own decoded part
as well.

Every number that a rule needs comes with `rules` and the slot's `phase`. Vectors may be of any floating type (tests
use float64) on any device; workers use float32.
"""
