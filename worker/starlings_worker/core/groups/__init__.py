"""A worker's half of exchanges in groups: local steps, then a round with quorum and deadline. Pure, as all of the core.

| file | what |
| --- | --- |
| work.py | what is asked of device and network, and what comes of it |
| round.py | `GroupRound`: one round, from its slot to its outcome |
| stage_groups.py | `StageGroups`: one stage's slots and rounds, its starting points, readiness |
| group_rounds.py | `GroupRounds`: all stages of a span; the way in, as `PairRounds` is for pairs |

A stage's slots are those of pairs (`pairing/slots.py`): H times the group's median step. A member's round:

    GroupMatched, slot reached --> Displace: phi - theta, in parts, encoded --> contributions leave for their owners
    all contributions to the own part here, or half of the time over --> GroupHeld
    GroupClosed(members) --> Reduce: the aggregate of exactly these --> to every seat
    an aggregate here --> Judge: finite, decodable, no longer than plausible
    all aggregates judged, or 85 % of the time over --> GroupPrepared(digests)
    GroupDecided(parts): has them all, with these digests --> Apply: the outer step with these parts --> RoundOutcome
                         lacks one, or another digest      --> nothing; it is behind from now on
    over, and the match names it as donor --> EncodeAnchor --> ANCHOR to each adopter

Everybody decodes the same bytes and applies the same parts or none, so that the starting point phi and the outer
momentum are equal on all who took part, bit for bit. Where they are is the *anchor*: a digest, said with each
RoundReady. The coordinator seats those who have the same; anybody else (a newcomer, a coordinator's crash between two
decisions, a member that lost an aggregate) sits out one round and copies the anchor of a seat. So whatever goes wrong
is repaired by the next round of that fragment, and nothing has to be remembered for it.

With `merge_alpha` 0 a replica computes nothing from its slot until the round is over (what it did would be
overwritten); with more it trains on, and that share of what it did meanwhile stays.

| what fails | what happens |
| --- | --- |
| a member is dead, frozen or late | at half of the time the round is closed without it; the outcome names it |
| fewer than a majority contribute | nothing changes; displacements stay, and come with the next round |
| an owner dies too early | its part is in no decision, the others are: a fraction is averaged, says the outcome |
| a member lacks an aggregate that most have | it applies nothing, and copies the fragment's anchor in its next round |
| an owner sends unlike aggregates | the digest that most have counts; the others lack the part |
| a contribution is malformed, not finite or out of norm | its owner leaves it out of that part, and names it |
| an aggregate is malformed, not finite or out of norm | it does not count as here; its owner is named |
| a starting point does not come within a slot | slots get longer until it has; in the longest: named, and left alone |
| the decision comes late | training goes on at the deadline; until the next slot the decision is still carried out |
| the decision never comes | the round is over when the next slot begins; whoever heard it is ahead, the rest copy |
| a match names another anchor than one has by now | one takes no part, and says the new one |
| bytes of another slot, fragment, round, part or sender | refused before their body is read |
| a member is fenced by a newer plan | the coordinator knows first: it closes and decides without it |
| the coordinator is away | slots pass without rounds; displacements grow and come with the next one |
| the device fails | FAILED; nothing changes |
"""
