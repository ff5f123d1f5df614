"""Traces of a server: they are stored, replayed, and used as regression tests."""
