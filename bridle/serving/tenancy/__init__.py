"""Access to a server and fair sharing among users: API keys, rate limits, fairness, and admission."""
