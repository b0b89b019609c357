"""The keeper: on the data plane for the owner. Serves version 0 and checkpoints, pulls committed state, writes it.

A child of the coordinator with its own certificate and no torch; the only process that holds storage credentials.
"""
