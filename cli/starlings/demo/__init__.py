"""`starlings demo`: a whole mixed swarm on one machine, every process real."""
