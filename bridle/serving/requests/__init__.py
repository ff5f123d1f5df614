"""Converts the prompt of a client to tokens and to a checked request."""
