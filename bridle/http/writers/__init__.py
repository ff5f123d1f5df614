"""Processes that write streams to clients, to relieve the server's own process."""
