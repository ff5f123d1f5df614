"""What all routes stand on: connections, bodies, streams, identification."""
