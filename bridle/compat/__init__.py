"""What other systems call things, and what that is here: data, which the APIs, the command line and
docs/coming-from.md read."""
