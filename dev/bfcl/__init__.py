"""Runs tool calls of the Berkeley Function Calling Leaderboard against a server: `python -m dev.bfcl.run --help`."""
