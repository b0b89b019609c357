"""Plans with links: who holds what so that most microbatches flow, under compute, memory and the uplinks of sites."""
