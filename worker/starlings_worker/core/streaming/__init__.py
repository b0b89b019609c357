"""Training without a barrier, at the worker: `async` (design.md, section 6).

rules.py    the job's numbers
clock.py    what is known of the swarm: its tokens, extrapolated, and thus the learning rate; its gradient's norm
table.py    the microbatches held, without epochs
stream.py   steps of the stages, staleness, leases in stock, copies, and the end of training
"""
