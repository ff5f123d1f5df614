"""Runs coding agents from their packages against a server of bridle: `python -m dev.agents.run --help`."""
