"""Scheduling of tokens into steps: the scheduler, the admission order, and step plans."""
