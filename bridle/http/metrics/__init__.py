"""Prometheus metrics, under the names that several dashboards expect."""
