"""The worker's pure core: events in, effects out; no clock, no I/O, no torch, no grpc."""
