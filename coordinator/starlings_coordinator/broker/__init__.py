"""A ready configuration of Mosquitto for a job: `configuration.py` is text, `files.py` puts it on the disk."""
