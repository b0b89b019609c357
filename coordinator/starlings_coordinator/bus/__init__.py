"""The coordinator on the MQTT bus: it tells who follows the swarm there, and is told nothing."""
