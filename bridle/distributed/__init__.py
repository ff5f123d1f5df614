"""Models in separate processes: the messages between the router and its shards or replicas, and both ends of the
connection."""
