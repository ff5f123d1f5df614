"""The lifecycle of a request, from its acceptance to its record in log, metrics and spans."""
