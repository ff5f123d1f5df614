"""Converts a client's prompt to a checked request of tokens."""
