"""Access and fair sharing among users: keys, rate limits, fairness, admission."""
