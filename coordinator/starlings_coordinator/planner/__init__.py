"""Who holds which stages. Runs in a process of its own (`python -m starlings_coordinator.planner`): it needs scipy."""
