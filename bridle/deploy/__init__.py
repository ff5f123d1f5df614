"""Processes around a server: starting, watching and restarting what computes elsewhere."""
