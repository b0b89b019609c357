"""What the planner makes of a swarm that need not exist: plans, what else they could be, what more would add, advice.

Runs in a process of its own (it needs scipy): `starlings plan` and `starlings advise` ask it through `starlings.heavy`.
"""
