"""Traces of a server: stored, replayed, and used as regression tests."""
