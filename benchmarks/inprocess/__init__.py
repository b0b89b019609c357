"""A whole swarm in one process, for measurements of what it learns rather than of how fast it is.

Real code wherever numbers are made: spans, runners, optimizers, boundary codecs, exchange buffers. Only what
carries bytes between workers is replaced, by memory (`exchange`), and who does what is decided plainly here (`swarm`,
`training`).
"""
