"""Conversion of the results of a step to events: tokens, text, stop strings, trace records."""
