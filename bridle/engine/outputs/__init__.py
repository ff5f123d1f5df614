"""Converts the results of a step to events: tokens, text, stop strings, and trace records."""
