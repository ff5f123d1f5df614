"""Common parts of all routes: connections, bodies, streams, identification."""
