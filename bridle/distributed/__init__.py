"""Models in separate processes: the messages between shards and the router, and both ends of the connection."""
