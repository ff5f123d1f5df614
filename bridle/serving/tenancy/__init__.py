"""Access to a server and fair sharing among users: keys, rate limits, fairness, admission."""
