"""`async`: training without a barrier (design.md, section 6).

leasing.py      blocks of samples: who gets how many, what is acknowledged, what returns
shards.py       whose samples are which when data are unequal
doubt.py        what a worker may have trained that nobody heard of
progress.py     loss, credits, the gradient's norm: what people see, and what workers are told of the swarm
contributions.py  what each replica trained, and how much of it others have too
exchanges.py    exchanges in pairs: pairing/ fed with holders, time and messages
evaluations.py  held-out text on the way, beside training
copies.py       copies of the weights at some moment: for checkpoints, for newcomers, for the last holder who leaves
newcomers.py    joining from such a copy
streaming.py    the schedule, which puts them together
"""
