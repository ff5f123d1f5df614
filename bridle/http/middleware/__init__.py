"""Middleware and parts that all routes share: connections, request bodies, streams, identification."""
