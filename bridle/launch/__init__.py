"""Starts, watches and restarts child processes that compute models for a server."""
