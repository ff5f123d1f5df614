"""Who computes which tokens in the next step: scheduler, admission order, step plans."""
