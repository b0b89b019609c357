"""Swarms that need not exist: fleet files, and what is known of devices, access lines and distances beforehand."""
