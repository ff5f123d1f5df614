"""Scheduling of tokens into steps: scheduler, admission order, step plans."""
