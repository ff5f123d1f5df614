"""Writer processes, which write streams to clients so that the server's own process has less work."""
