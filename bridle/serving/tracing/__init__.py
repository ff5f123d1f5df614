"""Traces of a server: kept, replayed, and used as regression tests."""
