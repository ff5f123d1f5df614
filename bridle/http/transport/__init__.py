"""What carries every route: connections, bodies, streams, who asks."""
