"""LMTP, the Language Model Transport Protocol: many token streams over one channel."""
