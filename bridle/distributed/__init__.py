"""Models in processes of their own: what shards say to the router, and both ends of it."""
