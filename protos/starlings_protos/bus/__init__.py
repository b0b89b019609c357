"""The MQTT bus: topics, payloads, and what they say of a worker's presence. Advisory throughout."""
