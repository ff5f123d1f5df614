"""From what a client sent to a checked request of tokens."""
