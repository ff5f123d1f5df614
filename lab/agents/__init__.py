"""Coding agents from their packages against a server of bridle: `python -m lab.agents.run --help`."""
