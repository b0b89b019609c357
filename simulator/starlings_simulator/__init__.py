"""Both real cores on a virtual clock and network, with symbolic gradients; one seed replays a run exactly."""
