"""Processes that write streams to clients, so that the server's own process need not."""
