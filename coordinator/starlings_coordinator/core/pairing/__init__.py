"""The coordinator's half of exchanges in pairs: when slots begin, who meets whom, what each weighs, what came of it.

Pure, like all of the core: `now_s` and seeds are arguments, and everything here is soft. After a restart the
clock comes back with the first RoundReady, and a match that is lost costs its two replicas one swap. It is driven by
streaming/exchanges.py.

| file | what |
| --- | --- |
| clock.py | `StageClock`: slots of a stage; length by median step times, with hysteresis, announced ahead |
| links.py | `LinkEstimates`: how long a payload takes between two replicas; by site and region until it was seen |
| matching.py | `match_slot`: disjoint pairs for each swap of a slot; across regions, by bandwidth, seeded |
| weights.py | what a replica weighs: tokens by the ledger, capped by what was leased and by the planned rate |
| outcomes.py | `OutcomeBook`: who was averaged, alone, one-sided, and who was named by whom |
| rounds.py | `StageRounds`: all of it for one stage; messages in, messages out |
"""
