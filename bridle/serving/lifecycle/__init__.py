"""The lifecycle of a request: from its acceptance to its record in logs, metrics and spans."""
