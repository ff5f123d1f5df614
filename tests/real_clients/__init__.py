"""Clients that others wrote, unmodified, against a running server. Each lives in an environment of its own."""
