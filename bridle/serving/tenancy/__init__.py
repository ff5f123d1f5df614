"""Who may use a server and how much of it: keys, rate limits, fairness, admission."""
