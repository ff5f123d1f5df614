"""Code that all routes share: request bodies, request records, identification of senders, host names."""
